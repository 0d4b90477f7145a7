#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// A number that no two backward passes of the process share, of the pass that runs on this thread; -1 outside of one. A pass that ended by an exception is
/// told by it, too: the next one has another number.
int backward_pass();

/// Where a wrapper comes among those that have something to do when a pass ends: by the name of its first parameter, which is the same on all ranks, and, of
/// models with the same names, by the order in which they were made.
struct Turn {
  explicit Turn(std::string first_parameter);
  auto operator<=>(const Turn&) const = default;

  std::string first_parameter;
  int64_t number;
};

/// Calls `done` once, when the backward pass that runs on this thread has accumulated every gradient, before `backward()` returns; never where it ends by an
/// exception, so keep no state that only `done` resets. Those of one pass are called in the order of their turns, not in that in which they were given, which
/// follows gradients and may differ from rank to rank: what they do may be collective. Throws InternalError outside of a pass.
void at_end_of_backward(const Turn& turn, std::function<void()> done);

/// A backward pass, for who has to know that it is over, however it ended. Of a pass that an exception ended the engine tells nobody; but it drops what is to
/// be called at its end, on the thread that asked for the pass and before that sees the exception (nn/saved_tensors.cpp), and that is heard here.
class PassWatch {
 public:
  PassWatch() = default;
  PassWatch(const PassWatch&) = delete;
  PassWatch& operator=(const PassWatch&) = delete;
  ~PassWatch() { forget(); }

  /// Watches the pass that runs on this thread, and no other any more. Calls `done` as at_end_of_backward does, and `failed`, which must not throw,
  /// where it is not called or throws.
  void begin(const Turn& turn, std::function<void()> done, std::function<void()> failed);
  /// Whether there is no pass under way (and within `failed`).
  bool is_over() const;
  /// From here on nothing is called.
  void forget();

 private:
  struct Pass;
  struct Token;
  std::shared_ptr<Pass> pass_{};
};

/// For `done` of at_end_of_backward: whether the pass that ends runs inside of another's, on this thread.
bool is_inside_of_backward();

/// Whether the pass that runs on this thread is there for the gradient of `leaf`, too: backward() is, torch::autograd::grad, or backward() for the gradients of
/// other tensors, is not.
bool accumulates_into(const at::Tensor& leaf);

}  // namespace tessera::nn
