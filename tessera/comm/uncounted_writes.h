#pragma once

namespace tessera::comm {

/// While alive, collectives of this thread count no writes (Tensor::_version): an engine makes one of others on the caller's own memory, and the caller's
/// counts.
class UncountedWrites {
 public:
  UncountedWrites();
  ~UncountedWrites();
  UncountedWrites(const UncountedWrites&) = delete;
  UncountedWrites& operator=(const UncountedWrites&) = delete;

 private:
  bool before_;
};

}  // namespace tessera::comm
