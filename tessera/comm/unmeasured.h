#pragma once

namespace tessera::comm {

/// While it lives, on its thread and in what autograd runs for it, no wait of a device counts as exposed (exposed_time.h): in a graph that is captured, events
/// have no times.
class Unmeasured {
 public:
  Unmeasured();
  ~Unmeasured();
  Unmeasured(const Unmeasured&) = delete;
  Unmeasured& operator=(const Unmeasured&) = delete;
  static bool now();

 private:
  bool before_;
};

}  // namespace tessera::comm
