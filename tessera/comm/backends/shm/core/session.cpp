#include "tessera/comm/backends/shm/core/session.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include <unistd.h>

// Of all that goes wrong in a group the first cause is the cause: whoever meets it claims it by one compare-and-set, writes it, and wakes all sleepers;
// others that fail after it quote it. Its writer may die in between, so readers do not wait for the text for ever. A sleeper is mostly woken; if it is not, it
// looks around: is the group sound, do peers live, is the time over.

namespace tessera::comm::shm {
namespace {

std::string listed(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

}  // namespace

// A rank with a core for itself spins for longer than a peer needs to come from sleep; others give the core away at once.
Session::Session(Membership membership, Directory& directory)
    : membership_(std::move(membership)),
      layout_(membership_.size, membership_.large_slot_bytes),
      segment_(meet(directory)),
      controls_(reinterpret_cast<RankControl*>(segment_->data() + layout_.rank_controls)),
      spin_(membership_.alone_on_core ? std::chrono::microseconds(50) : std::chrono::nanoseconds(0)),
      timeout_(membership_.timeout.count()) {
  enter(directory);
}

Session::~Session() { leave(); }

std::string Session::name_of(int rank) const {
  auto name = "rank " + std::to_string(rank) + " of group " + membership_.group;
  if (!one_process_) name += " (pid " + std::to_string(control(rank).pid) + ")";
  return name;
}

void Session::reserve(size_t offset, size_t bytes) const {
  try {
    segment_->reserve(offset, bytes);
  } catch (const Failure& failure) {
    fail(failure.what());
  }
}

void Session::leave() noexcept {
  auto expected = Presence::Joined;
  if (control(rank()).presence.compare_exchange_strong(expected, Presence::Left)) wake_all();
}

void Session::abort() noexcept { break_group("aborted by " + name_of(rank())); }

void Session::fail(const std::string& cause) const {
  if (!break_group(cause)) throw_cause();  // another was first; its cause is the cause
  throw Failure(cause);
}

bool Session::break_group(const std::string& cause) const noexcept {
  auto& shared = this->soundness();
  uint32_t sound = Soundness::Sound;
  if (!shared.state.compare_exchange_strong(sound, Soundness::BeingWritten)) return false;
  shared.rank = rank();
  std::snprintf(shared.cause, sizeof shared.cause, "%s", cause.c_str());
  shared.state.store(Soundness::Broken, std::memory_order_release);
  wake_all();
  return true;
}

void Session::wake_all() const noexcept {
  for (int rank = 0; rank < size(); ++rank) {
    control(rank).arrived.wake();
    control(rank).bell.wake();
  }
}

void Session::throw_cause() const {
  const auto& shared = this->soundness();
  for (int i = 0; shared.state.load(std::memory_order_acquire) != Soundness::Broken && i < 1000; ++i) ::usleep(100);  // its writer may have died
  if (shared.state.load(std::memory_order_acquire) != Soundness::Broken) throw Failure("the group is broken");
  const std::string cause = shared.cause;
  if (shared.rank == rank() || cause.starts_with("aborted")) throw Failure(cause);
  throw Failure("rank " + std::to_string(shared.rank) + " gave up: " + cause);
}

void Session::check_alive() const {
  for (const auto& [rank, watch] : watches_) {
    if (control(rank).presence.load(std::memory_order_acquire) == Presence::Joined && !watch.alive()) fail(name_of(rank) + " has died");
  }
}

void Session::Patience::glance(const std::function<std::vector<int>()>& late) const {
  session_.check_sound();
  session_.check_alive();
  const auto waited = std::chrono::steady_clock::now() - start_;
  if (waited < std::chrono::milliseconds(session_.timeout_.load(std::memory_order_relaxed))) return;
  session_.fail("timed out after " + seconds(std::chrono::duration<double>(waited).count()) + " waiting for " + listed(late()));
}

}  // namespace tessera::comm::shm
