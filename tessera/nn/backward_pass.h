#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// A number that no two backward passes of the process share, of the pass that runs on this thread; -1 outside of one. A pass that ended by an exception is
/// told by it, too: the next one has another number.
int backward_pass();

/// Calls `done` once, when the backward pass that runs on this thread has accumulated every gradient, before `backward()` returns; never where it ends by an
/// exception, so keep no state that only `done` resets. Throws InternalError outside of a pass.
void at_end_of_backward(std::function<void()> done);

/// For `done` of at_end_of_backward: whether the pass that ends runs inside of another's, on this thread.
bool is_inside_of_backward();

/// Whether the pass that runs on this thread is there for the gradient of `leaf`, too: backward() is, torch::autograd::grad, or backward() for the gradients of
/// other tensors, is not.
bool accumulates_into(const at::Tensor& leaf);

}  // namespace tessera::nn
