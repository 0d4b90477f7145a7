#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace tessera::comm::shm {

/// Two lines of 64 bytes, because processors fetch lines in pairs: what different ranks write lies at least this far apart.
inline constexpr size_t kLine = 128;

/// A word in shared memory that others wait for. Waiting costs the writer nothing while nobody sleeps: it looks at `sleepers` and makes a system call only
/// where that is not zero. A wake-up cannot be missed: a sleeper is counted before the kernel compares the word again, and the writer changes the word before
/// it looks at the count (both sequentially consistent).
struct alignas(kLine) Event {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  /// Sets the word; what was written before is seen by whoever reads the new value. One writer.
  void set(uint32_t to);
  /// Adds one. Any number of writers.
  void ring();
  /// Wakes every sleeper without a change, to make it look around.
  void wake();
  /// Sleeps while the word is `seen`, at most `longest`; false where that time passed. May return early.
  bool sleep(uint32_t seen, std::chrono::milliseconds longest);
};
static_assert(sizeof(Event) == kLine && std::atomic<uint32_t>::is_always_lock_free);

/// Tells the processor that this is a loop that waits.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// From now on this thread waits beside one that computes: it hardly spins, whatever the ranks and cores.
void wait_in_background();

/// How long this thread spins before it sleeps, where a rank that has its core for itself may spin for `alone`.
std::chrono::nanoseconds spin_time(std::chrono::nanoseconds alone);

}  // namespace tessera::comm::shm
