#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace tessera {

/// Bytes that a rank's files have grown to: what a disk must hold. A dry run writes none and knows them, too. A handle: copies speak of the same.
class DiskBytes {
 public:
  int64_t value() const { return *bytes_; }
  void grow(int64_t bytes) const { *bytes_ += bytes; }

 private:
  std::shared_ptr<std::atomic<int64_t>> bytes_ = std::make_shared<std::atomic<int64_t>>(0);
};

}  // namespace tessera
