#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <c10/core/Allocator.h>

#include "tests/support/sim_device/happens_before.h"

// Memory of the simulated devices. A device address lies in a range that the host may not touch; the bytes are mapped a second time, at a fixed distance, where
// operators find them (host_of). A host that reads or writes a device address is reported, with where it was, and goes on: the page stays open until
// close_opened_pages(). Pinned memory lies in pages of its own, which are closed while a copy that the host has not waited for uses them.

namespace tessera::sim {

inline constexpr int kMaxDevices = 16;

/// A piece of device or pinned memory.
struct Block {
  uintptr_t begin = 0;
  size_t bytes = 0;  ///< asked for
  size_t room = 0;
  int device = 0;
  int stream = 0;               ///< that it was allocated on
  int64_t pool = 0;             ///< of the graph that it was made in; 0: of none
  bool closed = false;          ///< pinned memory that the host may not touch now
  std::vector<int> recorded{};  ///< by record_stream
  History history{};
};

bool is_device(const void* address);
bool is_pinned(const void* address);
void* host_of(const void* device_address);
int device_of(const void* device_address);

/// Calls use(block) for the device or pinned memory that the address lies in, under the lock; false where there is none.
bool with_block(const void* address, const std::function<void(Block&)>& use);

/// Device memory, filled with ones (NaN), for nothing may be read before it is written; counted on the thread's tracker.
void* take(size_t bytes, int device, int stream);
void give(void* device_address);
void record_stream(const void* device_address, int stream);
int64_t bytes_in_use(int device);

/// What the device has given: what is alive, in rooms of powers of two and whole MiB, and what is kept for reuse, which goes back where it would pass the
/// limit.
struct Reserved {
  int64_t current = 0, peak = 0;
};
Reserved reserved(int device);
void limit_reserved(int device, int64_t bytes);  ///< 0: none
void lift_limits();                              ///< of all devices
/// What a test has left: limits, reports, and what a rank that failed has asked of its device and never waited for, for which the next test would be blamed.
void forget_test();
/// Each piece of device memory that is alive.
void each_block(int device, const std::function<void(const Block&)>& use);
/// Fills with ones what was made in a graph's pool, be it alive or not.
void spoil(int device, int64_t pool);

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();

void close_while_pending(Block& pinned);
void open(Block& pinned);
void after_host_sync();     ///< opens what the host now knows to be done
void close_opened_pages();  ///< of device memory

void install_fault_handler();

/// While alive on a thread, this operator runs on it.
class Running {
 public:
  explicit Running(const char* op);
  ~Running();
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;
  /// "the host" outside of operators.
  static const char* now();

 private:
  const char* before_;
};

}  // namespace tessera::sim
