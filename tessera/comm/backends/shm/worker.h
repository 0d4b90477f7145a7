#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace tessera::comm {

/// Runs calls one after the other on a thread of its own, which starts with the first.
class Worker {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  Worker() = default;
  /// Waits for the calls that are still to be run.
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  /// `body` runs after all that came before it; what it throws, the work's wait throws.
  Work run(std::function<void()> body);
  /// Whether everything has been run.
  bool idle() const { return unfinished_.load(std::memory_order_acquire) == 0; }

 private:
  class Task : public c10d::Work {
   public:
    explicit Task(std::function<void()> body) : body_(std::move(body)) {}
    void run(std::atomic<int>& unfinished);

   private:
    std::function<void()> body_;
  };
  void loop();

  std::atomic<int> unfinished_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<Task>> tasks_;
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace tessera::comm
