#include "tessera/comm/backends/shm/worker.h"

#include "tessera/comm/backends/shm/core/event.h"

namespace tessera::comm {

void Worker::Task::run(std::atomic<int>& unfinished) {
  std::exception_ptr error;
  try {
    body_();
  } catch (...) {
    error = std::current_exception();
  }
  body_ = nullptr;  // lets go of the tensors
  unfinished.fetch_sub(1, std::memory_order_release);
  finish(error);
}

Worker::~Worker() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

Worker::Work Worker::run(std::function<void()> body) {
  auto task = c10::make_intrusive<Task>(std::move(body));
  unfinished_.fetch_add(1, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(task);
    if (!thread_.joinable()) thread_ = std::thread([this] { loop(); });
  }
  changed_.notify_one();
  return task;
}

void Worker::loop() {
  shm::wait_in_background();
  while (true) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ending_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task->run(unfinished_);
  }
}

}  // namespace tessera::comm
