#include "tessera/launch/link.h"

#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "tessera/comm/failure.h"

// The thread shares its state with the link by a pointer and is detached from the start: where a store hangs in a system call that nothing ends, the link can
// still go, and the thread finds out whenever it comes back. That costs a thread and a socket each time, which is cheaper than an agent that cannot answer a
// signal.

namespace tessera::launch {

namespace {

/// How long a thread may take to end before it counts as one that never will.
constexpr auto farewell = std::chrono::milliseconds(500);

}  // namespace

struct Link::Shared {
  Connect connect;
  std::chrono::milliseconds interval;

  std::mutex mutex{};
  std::condition_variable news{};
  const Wake* wake;  ///< null once the link was left behind
  NodeReport record;
  std::optional<Proposal> proposal{};
  bool urgent = true;
  Seen seen{};
  bool ended = false;
};

Link::Link(Connect connect, NodeReport record, std::chrono::milliseconds interval, const Wake& wake)
    : shared_(new Shared{.connect = std::move(connect), .interval = interval, .wake = &wake, .record = std::move(record)}) {
  std::thread([shared = shared_] { carry(shared); }).detach();
}

Link::~Link() {
  std::unique_lock lock(shared_->mutex);
  shared_->wake = nullptr;
  shared_->news.notify_all();
  shared_->news.wait_for(lock, farewell, [&] { return shared_->ended; });
}

void Link::post(const NodeReport& record) {
  const std::lock_guard lock(shared_->mutex);
  NodeReport same_beat = record;
  same_beat.beat = shared_->record.beat;
  if (same_beat == shared_->record) return;
  shared_->record = std::move(same_beat);
  shared_->seen.current = false;
  shared_->urgent = true;
  shared_->news.notify_all();
}

void Link::propose(Proposal proposal) {
  const std::lock_guard lock(shared_->mutex);
  shared_->proposal = std::move(proposal);
  shared_->urgent = true;
  shared_->news.notify_all();
}

Link::Seen Link::look() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->seen;
}

void Link::carry(const std::shared_ptr<Shared>& shared) {
  std::unique_ptr<Board> board;
  std::unique_lock lock(shared->mutex);
  while (shared->wake != nullptr) {
    shared->urgent = false;
    shared->seen.connecting = !board;
    ++shared->record.beat;
    const NodeReport record = shared->record;
    const std::optional<Proposal> proposal = std::exchange(shared->proposal, std::nullopt);
    lock.unlock();
    std::optional<View> view;
    std::string problem;
    try {
      if (!board) board = shared->connect();
      view = board->exchange(record, proposal, Clock::now());
    } catch (...) {
      problem = comm::message_of(std::current_exception());
      board.reset();
    }
    lock.lock();
    shared->seen.problem = problem;
    ++shared->seen.tries;
    shared->seen.current = view && !shared->urgent;
    if (view) {
      shared->seen.view = std::move(view);
      ++shared->seen.exchanges;
    }
    if (shared->wake == nullptr) break;
    shared->wake->ring();
    shared->news.wait_for(lock, shared->interval, [&] { return shared->urgent || shared->wake == nullptr; });
  }
  lock.unlock();
  board.reset();
  lock.lock();
  shared->ended = true;
  shared->news.notify_all();
}

}  // namespace tessera::launch
