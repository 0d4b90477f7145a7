#pragma once

#include <condition_variable>
#include <exception>
#include <mutex>

namespace tessera {

/// Where the ranks of a layout and the reference take turns: the ranks stop and show what they have, the reference looks, the ranks go on. What one of them
/// throws ends the wait of all. Waiting costs no processor time, and has no limit: the reference may need as long as all ranks together.
class Meeting {
 public:
  explicit Meeting(int ranks) : ranks_(ranks) {}

  /// A rank stops here until the reference has looked. Throws where another party has failed.
  void show();
  /// The reference waits until all ranks have stopped. Throws where one has failed.
  void wait_for_ranks();
  /// Lets the ranks go on.
  void dismiss();

  /// Wakes everybody up; the first cause counts.
  void fail(std::exception_ptr cause);
  /// Throws the first cause, if there is one.
  void rethrow() const;

 private:
  void check() const;

  const int ranks_;
  int shown_ = 0;
  int64_t round_ = 0;
  std::exception_ptr cause_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace tessera
