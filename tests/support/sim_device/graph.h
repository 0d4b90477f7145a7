#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include <c10/core/Device.h>

// Graphs of the simulated devices (at::accelerator::Graph): while one captures, whatever is asked of its device is taken down, with its numbers, addresses and
// shapes as they are, and not done: all memory has its bytes of before when the capture ends, and what was made within it holds NaN. A replay does it again on
// the same addresses, which are the graph's alone. What CUDA refuses a stream that captures throws: a host that waits or reads, a copy of memory that is not
// pinned, waits that cross the capture's edge, questions to events that were recorded within it.

namespace tessera::sim {

class Capture {
 public:
  explicit Capture(int device);
  ~Capture();
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  /// What is under way on the device; null: nothing.
  static Capture* of(int device);
  /// Throws where something is.
  static void refuse(int device, const char* what);

  /// `call` does again what was asked for, as work of `stream`.
  void add(std::function<void(int stream)> call);
  /// Ends it: nothing has happened.
  void end();
  void replay(int stream) const;
  int64_t pool() const { return pool_; }  ///< of memory that nobody else gets

 private:
  struct Saved {
    void* address;
    std::vector<char> bytes;
  };
  int device_;
  int64_t pool_;
  std::mutex mutex_;
  std::vector<Saved> before_;
  std::vector<std::function<void(int)>> calls_;
};

/// With libtorch, for the devices' type.
void register_graphs();

}  // namespace tessera::sim
