#pragma once

#include <functional>
#include <string>

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// A tensor that stands where a parameter's gradient would be, whose gradient lies elsewhere (in parts, on each rank its own): what has the parameter's shape
/// and no memory, and throws ConfigError with `message`, one sentence that names the parameter and the line to change, from every operator that would read or
/// write it: an optimizer over the parameters, clip_grad_norm_ of libtorch. zero_grad may clear it, in both its ways. Who accumulates a gradient has to take
/// it away before (GradientDispatcher::listen_arriving).
at::Tensor make_gradient_guard(const at::Tensor& parameter, std::string message);

/// One more like it, that tells of a clear when it happens: made zero in place (true), any number of times, or gone (false): nobody holds it any more, nor a
/// copy (Tensor::data). Who takes it away, or puts another in its place, is told as well. `cleared` must not throw.
at::Tensor make_gradient_guard_like(const at::Tensor& guard, std::function<void(bool to_zeros)> cleared);

/// Whether `gradient` is such a tensor.
bool is_gradient_guard(const at::Tensor& gradient);

/// Which guard it is, and its copies are: an address that is no other's while one of them lives. Null where it is none.
const void* identity_of_guard(const at::Tensor& gradient);

/// Whether zero_grad has cleared it, or a copy, in place since it was made, or armed.
bool is_cleared(const at::Tensor& guard);

/// Makes it as new.
void arm(const at::Tensor& guard);

}  // namespace tessera::nn
