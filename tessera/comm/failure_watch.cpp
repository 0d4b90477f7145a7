#include "tessera/comm/failure_watch.h"

#include <algorithm>
#include <utility>

#include "tessera/comm/failure.h"
#include "tessera/comm/thread_without_signals.h"
#include "tessera/core/error.h"

namespace tessera::comm {

void FailureNotice::give(const std::string& cause) {
  const std::lock_guard lock(mutex_);
  if (given_) return;
  cause_ = cause;
  given_.store(true, std::memory_order_release);
}

std::string FailureNotice::cause() const {
  const std::lock_guard lock(mutex_);
  return cause_;
}

void FailureNotice::require_none() const {
  if (given()) throw CommError(cause());
}

FailureWatch::FailureWatch(int ranks, Questions questions) {
  const auto pause_elsewhere = std::max<std::chrono::milliseconds>(kPause, std::chrono::milliseconds(ranks));
  thread_ = start_thread_without_signals([this, pause_elsewhere, questions = std::move(questions)] { watch(pause_elsewhere, questions); });
}

FailureWatch::~FailureWatch() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  closed_.notify_all();
  thread_.join();
}

void FailureWatch::watch(std::chrono::milliseconds pause_elsewhere, const Questions& questions) {
  std::chrono::milliseconds since{0};
  std::unique_lock lock(mutex_);
  while (!closed_.wait_for(lock, kPause, [&] { return closing_; })) {
    since += kPause;
    lock.unlock();
    const bool elsewhere = since >= pause_elsewhere;
    if (look(questions, elsewhere)) return;
    if (elsewhere) since = {};
    lock.lock();
  }
}

bool FailureWatch::look(const Questions& questions, bool elsewhere) const {
  std::string cause;
  bool here = true;
  try {
    cause = questions.here();
    if (cause.empty() && elsewhere) {
      cause = questions.elsewhere();
      here = false;
    }
  } catch (...) {  // an engine that cannot even say so
    cause = message_of(std::current_exception());
  }
  if (!cause.empty()) questions.found(cause, here);
  return !cause.empty();
}

}  // namespace tessera::comm
