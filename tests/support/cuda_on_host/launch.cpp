#include "tests/support/cuda_on_host/launch.h"

#include <exception>
#include <memory>
#include <string>
#include <vector>

#include <boost/context/fiber.hpp>
#include <c10/util/Exception.h>

#include "tessera/core/error.h"

namespace tessera::cuda_on_host {

namespace {

using boost::context::fiber;

thread_local std::string error;  ///< of the last launch that failed, until somebody asks

/// Other threads of its block wait for one that has failed.
struct Abandoned {};

/// A stack on which one thread after another runs.
class Stack {
 public:
  Stack() {
    fiber_ = fiber([this](fiber&& outside) -> fiber {
      outside_ = std::move(outside);
      for (;;) {
        try {
          (*thread_)();
        } catch (const Abandoned&) {
        } catch (...) {
          failure_ = std::current_exception();
        }
        waits_at_ = 0;
        outside_ = std::move(outside_).resume();  // where it ends, with what the operating system's thread ends
      }
    });
  }

  void begin(const std::function<void()>& thread) {
    thread_ = &thread;
    abandoned_ = false;
    go_on();
  }
  void go_on() {
    fiber_ = std::move(fiber_).resume();
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }
  void abandon() {
    abandoned_ = true;
    go_on();
  }
  void wait(const char* file, int line) {
    file_ = file;
    waits_at_ = line;
    outside_ = std::move(outside_).resume();
    if (abandoned_) throw Abandoned();
  }
  bool waits() const { return waits_at_ != 0; }
  bool waits_with(const Stack& other) const { return waits_at_ == other.waits_at_ && file_ == other.file_; }
  std::string place() const { return detail::concat(file_, ":", waits_at_); }

 private:
  fiber fiber_, outside_;
  const std::function<void()>* thread_ = nullptr;
  std::exception_ptr failure_;
  const char* file_ = "";
  int waits_at_ = 0;
  bool abandoned_ = false;
};

thread_local Stack* running = nullptr;

/// One block: its threads up to their next __syncthreads() or end, in one order, again and again.
class BlockOfThreads {
 public:
  explicit BlockOfThreads(unsigned threads, bool upwards) : waiting_(threads), threads_(threads), upwards_(upwards) {}

  void run(const std::function<void()>& thread) {
    unsigned begun = 0, current = 0;
    const std::function<void()> next_threads = [&] {  // as many as end without waiting have one stack
      while (begun < threads_) {
        current = thread_index.x = in_order(begun++);
        thread();
      }
    };
    try {
      while (begun < threads_) {
        std::unique_ptr<Stack> stack = take_stack();
        running = stack.get();
        stack->begin(next_threads);
        (stack->waits() ? waiting_[current] : unused().emplace_back()) = std::move(stack);
      }
      while (all_wait()) {
        for (unsigned i = 0; i < threads_; ++i) {
          thread_index.x = in_order(i);
          running = waiting_[thread_index.x].get();
          running->go_on();
        }
        for (auto& stack : waiting_) {
          if (!stack->waits()) unused().push_back(std::move(stack));
        }
      }
    } catch (...) {
      for (auto& stack : waiting_) {
        if (stack && stack->waits()) stack->abandon();
      }
      throw;
    }
  }

 private:
  static std::vector<std::unique_ptr<Stack>>& unused() {
    thread_local std::vector<std::unique_ptr<Stack>> stacks;
    return stacks;
  }
  static std::unique_ptr<Stack> take_stack() {
    if (unused().empty()) return std::make_unique<Stack>();
    auto stack = std::move(unused().back());
    unused().pop_back();
    return stack;
  }

  unsigned in_order(unsigned i) const { return upwards_ ? i : threads_ - 1 - i; }

  /// False where all have ended.
  bool all_wait() const {
    const Stack* first = nullptr;
    unsigned ended = 0;
    for (const auto& stack : waiting_) {
      if (!stack) {
        ++ended;
        continue;
      }
      if (first == nullptr) first = stack.get();
      TORCH_CHECK(stack->waits_with(*first), "threads of one block wait at ", first->place(), " and at ", stack->place());
    }
    TORCH_CHECK(first == nullptr || ended == 0, ended, " threads of a block have ended, and others wait for them at ", first == nullptr ? "" : first->place());
    return first != nullptr;
  }

  std::vector<std::unique_ptr<Stack>> waiting_;  ///< by thread; none: it has ended
  unsigned threads_;
  bool upwards_;
};

std::string refusal(const Dim3& grid, const Dim3& block) {
  constexpr unsigned along_x = 2147483647, along_others = 65535, threads = 1024;
  if (grid.x >= 1 && grid.x <= along_x && grid.y >= 1 && grid.y <= along_others && grid.z == 1 && block.x >= 1 && block.x <= threads && block.y == 1 &&
      block.z == 1)
    return "";
  return detail::concat("CUDA error: invalid configuration argument (", grid.x, " x ", grid.y, " blocks of ", block.x, " threads)");
}

}  // namespace

void sync_threads(const char* file, int line) { running->wait(file, line); }

void failed_assertion(const char* file, int line, const char* condition) {
  throw std::runtime_error(detail::concat("CUDA error: device-side assert triggered (", file, ":", line, ": ", condition, ")"));
}

void run(Dim3 grid, Dim3 block, const std::function<void()>& thread) {
  thread_local bool upwards = false;
  upwards = !upwards;
  if (error.empty()) error = refusal(grid, block);
  if (!error.empty()) return;
  try {
    const uint64_t blocks = static_cast<uint64_t>(grid.x) * grid.y;
    for (uint64_t i = 0; i < blocks; ++i) {
      const uint64_t at = upwards ? i : blocks - 1 - i;
      block_index.x = static_cast<unsigned>(at % grid.x);
      block_index.y = static_cast<unsigned>(at / grid.x);
      BlockOfThreads(block.x, upwards).run(thread);
    }
  } catch (const std::exception& failure) {
    error = failure.what();
  }
}

void throw_error() { TORCH_CHECK(error.empty(), std::exchange(error, {})); }

}  // namespace tessera::cuda_on_host
