#include "tessera/kernels/widen.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include "tessera/core/autograd_function.h"

// Autograd brings what a function hands on into the type that the receiver asks for. So it is enough that the backward of the cast does not.

namespace tessera::kernels {

namespace {

struct Widen : AutogradFunction<Widen> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& parameter, at::ScalarType dtype) {
    const at::AutoDispatchBelowADInplaceOrView below;
    return parameter.to(dtype);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, const torch::autograd::variable_list& grads) {
    return {grads[0], at::Tensor()};
  }
};

bool is_wider(at::ScalarType dtype, at::ScalarType than) { return dtype != than && c10::promoteTypes(dtype, than) == dtype; }

}  // namespace

at::Tensor widen(const at::Tensor& parameter, at::ScalarType dtype) {
  const bool hands_on = at::GradMode::is_enabled() && parameter.requires_grad() && parameter.is_leaf() && is_wider(dtype, parameter.scalar_type());
  return hands_on ? Widen::apply(parameter, dtype) : parameter.to(dtype);
}

at::ScalarType handed_on_in(const at::Tensor& parameter, at::ScalarType computed) {
  return parameter.is_leaf() ? parameter.grad_dtype().value_or(computed) : parameter.scalar_type();
}

}  // namespace tessera::kernels
