#include "tessera/comm/backends/work_queue.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>

#include "tessera/comm/failure.h"

// A queue costs a collective two hand-overs between threads, some microseconds each; a caller that waits for the result anyway runs it itself, if nothing is
// before it: all ranks must run in one order. So "idle" must be true by the time that the last wait has returned, or the next call would take the slow way for
// nothing.

namespace tessera::comm {

class WorkQueue::TaskWork : public c10d::Work {
 public:
  explicit TaskWork(Task task) : task_(std::move(task)) {}

  /// What went wrong, if anything did.
  std::exception_ptr perform() {
    std::exception_ptr error;
    try {
      task_();
    } catch (...) {
      // The group's own collectives have put names in front of the cause; the caller's will do so again, and adds what the world knows.
      error = std::make_exception_ptr(std::runtime_error(message_of(std::current_exception())));
    }
    task_ = nullptr;  // its tensors
    return error;
  }

  /// Lets the waiting go on.
  void end(std::exception_ptr error) { finish(std::move(error)); }

  void refuse() {
    task_ = nullptr;
    end(std::make_exception_ptr(std::runtime_error("aborted by this rank")));
  }

 private:
  Task task_;
};

WorkQueue::WorkQueue(std::function<void()> at_start) : at_start_(std::move(at_start)) {}

WorkQueue::~WorkQueue() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

c10::intrusive_ptr<c10d::Work> WorkQueue::run(Task task, bool async) {
  auto work = c10::make_intrusive<TaskWork>(std::move(task));
  {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      work->refuse();
      return work;
    }
    if (async || !idle_locked()) {
      if (!thread_.joinable()) {  // before there is something to do: where it cannot be started, nothing waits for it
        thread_ = std::thread([this, threads = at::get_num_threads()] {
          at::set_num_threads(threads);
          serve();
        });
      }
      queue_.push_back(work);
      changed_.notify_all();
      return work;
    }
  }
  work->end(work->perform());
  return work;
}

bool WorkQueue::idle() {
  const std::lock_guard lock(mutex_);
  return idle_locked();
}

void WorkQueue::abort() {
  std::deque<c10::intrusive_ptr<TaskWork>> refused;
  {
    const std::lock_guard lock(mutex_);
    aborted_ = true;
    refused.swap(queue_);
  }
  for (const auto& work : refused) work->refuse();
}

void WorkQueue::serve() {
  const at::NoGradGuard no_grad;
  if (at_start_) at_start_();
  for (std::unique_lock lock(mutex_);;) {
    changed_.wait(lock, [&] { return ending_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const auto work = std::move(queue_.front());
    queue_.pop_front();
    busy_ = true;
    lock.unlock();
    auto error = work->perform();
    lock.lock();
    busy_ = false;  // before the waiting go on: their next call finds the queue idle
    lock.unlock();
    work->end(std::move(error));
    lock.lock();
  }
}

}  // namespace tessera::comm
