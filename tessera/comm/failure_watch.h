#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

/// Failures that nobody who waits would hear of. A collective on a device is asked for, and the host goes on; where it fails, or never ends because a peer is
/// gone, the host learns of it at the earliest when it reads a result, and then it may stand there for ever, or read what is none.
namespace tessera::comm {

/// That the ranks of a world cannot go on, and why: said once, asked by any thread.
class FailureNotice {
 public:
  bool given() const { return given_.load(std::memory_order_acquire); }
  /// The first cause stays.
  void give(const std::string& cause);
  std::string cause() const;  ///< empty: none was given
  /// Throws CommError with the cause, where one was given.
  void require_none() const;

 private:
  std::atomic<bool> given_ = false;
  mutable std::mutex mutex_;
  std::string cause_;
};

/// Asks, on a thread of its own and until it hears of one, for failures of this rank's engines and for those that other ranks have reported.
class FailureWatch {
 public:
  static constexpr std::chrono::milliseconds kPause{200};

  struct Questions {
    std::function<std::string()> here;                               ///< what this rank's engines found; empty: nothing
    std::function<std::string()> elsewhere;                          ///< what ranks have reported
    std::function<void(const std::string& cause, bool here)> found;  ///< the first of them, once
  };

  /// `ranks` of the world: of more than 200 each asks more rarely what others reported, so that who answers them is asked a thousand times a second at most.
  FailureWatch(int ranks, Questions questions);
  /// Waits for the thread.
  ~FailureWatch();
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

 private:
  void watch(std::chrono::milliseconds pause_elsewhere, const Questions& questions);
  bool look(const Questions& questions, bool elsewhere) const;

  std::mutex mutex_;
  bool closing_ = false;
  std::condition_variable closed_;
  std::thread thread_;
};

}  // namespace tessera::comm
