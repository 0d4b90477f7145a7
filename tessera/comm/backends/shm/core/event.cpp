#include "tessera/comm/backends/shm/core/event.h"

#include <cerrno>
#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

// A futex, and not a condition variable of pthread's: it needs no lock that a killed process would take with it, and a writer that nobody waits for makes no
// system call.

namespace tessera::comm::shm {
namespace {

thread_local bool in_background = false;

// Not FUTEX_PRIVATE_FLAG: the word is mapped at different addresses by different processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* longest) {
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, longest, nullptr, 0);
}

}  // namespace

void Event::set(uint32_t to) {
  value.store(to, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Event::ring() {
  value.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) != 0) wake();
}

void Event::wake() { futex(value, FUTEX_WAKE, INT_MAX, nullptr); }

bool Event::sleep(uint32_t seen, std::chrono::milliseconds longest) {
  const timespec duration{.tv_sec = longest.count() / 1000, .tv_nsec = longest.count() % 1000 * 1'000'000};
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const bool in_time = futex(value, FUTEX_WAIT, seen, &duration) == 0 || errno != ETIMEDOUT;
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return in_time;
}

void wait_in_background() { in_background = true; }

std::chrono::nanoseconds spin_time(std::chrono::nanoseconds alone) { return in_background ? std::chrono::nanoseconds(0) : alone; }

}  // namespace tessera::comm::shm
