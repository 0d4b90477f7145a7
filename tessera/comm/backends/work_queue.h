#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

/// Runs an engine's collectives in the order in which they were asked for, on a thread that starts with the first. One thread at a time may ask.
class WorkQueue {
 public:
  using Task = std::function<void()>;

  /// `at_start` is called on the queue's thread when it starts.
  explicit WorkQueue(std::function<void()> at_start = {});
  /// Waits for what is queued: break what the tasks wait for first, where nothing will come of it.
  ~WorkQueue();
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  /// Queues the task. Without `async` it runs at once on the caller's thread, unless others are before it. Its exceptions are the work's.
  c10::intrusive_ptr<c10d::Work> run(Task task, bool async);

  /// Whether everything that was asked for has been run; true as soon as the last work's wait has returned.
  bool idle();

  /// Ends the queued tasks that have not begun, and all later ones, with an error.
  void abort();

 private:
  class TaskWork;
  void serve();
  bool idle_locked() const { return !busy_ && queue_.empty(); }

  std::function<void()> at_start_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<TaskWork>> queue_;
  bool busy_ = false;
  bool aborted_ = false;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm
