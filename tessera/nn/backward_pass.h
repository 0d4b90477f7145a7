#pragma once

#include <compare>
#include <cstdint>
#include <functional>
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

/// For `done` of at_end_of_backward: whether the pass that ends runs inside of another's, on this thread.
bool is_inside_of_backward();

/// Whether the pass that runs on this thread is there for the gradient of `leaf`, too: backward() is, torch::autograd::grad, or backward() for the gradients of
/// other tensors, is not.
bool accumulates_into(const at::Tensor& leaf);

}  // namespace tessera::nn
