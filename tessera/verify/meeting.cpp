#include "tessera/verify/meeting.h"

#include "tessera/core/error.h"

namespace tessera {

void Meeting::show() {
  std::unique_lock lock(mutex_);
  const int64_t round = round_;
  ++shown_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return cause_ || round_ != round; });
  check();
}

void Meeting::wait_for_ranks() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return cause_ || shown_ == ranks_; });
  check();
}

void Meeting::dismiss() {
  const std::lock_guard lock(mutex_);
  shown_ = 0;
  ++round_;
  changed_.notify_all();
}

void Meeting::fail(std::exception_ptr cause) {
  const std::lock_guard lock(mutex_);
  if (!cause_) cause_ = std::move(cause);
  changed_.notify_all();
}

void Meeting::rethrow() const {
  const std::lock_guard lock(mutex_);
  if (cause_) std::rethrow_exception(cause_);
}

// Not the cause itself: it belongs to whoever failed, and is thrown once, by rethrow().
void Meeting::check() const {
  if (cause_) throw CommError("another rank of the verification has failed");
}

}  // namespace tessera
