#include "tessera/kernels/bias_activation.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <torch/library.h>

#include "tessera/core/autograd_function.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/half.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"
#include "tessera/memory/on_host.h"

namespace tessera::kernels {

namespace {

using Forward = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);
using Backward = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t);

at::Tensor rows_of(const at::Tensor& x, const at::Tensor& bias) { return x.reshape({-1, bias.size(0)}).contiguous(); }

at::Tensor forward(const at::Tensor& x, const at::Tensor& bias, int64_t activation) {
  const at::Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() > 0) routines_for(x).pointwise.bias_activation(out, rows_of(x, bias), bias.contiguous(), static_cast<Activation>(activation));
  return out;
}

std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& bias, int64_t activation) {
  const at::Tensor dx = at::empty(x.sizes(), x.options()), d_bias = at::empty_like(bias);
  const int64_t rows = x.numel() / bias.size(0), blocks = (rows + kRmsNormBlock - 1) / kRmsNormBlock;
  const at::Tensor partial = at::empty({blocks, bias.size(0)}, x.options().dtype(at::kFloat));
  const at::Tensor input = rows == 0 ? x.reshape({0, bias.size(0)}) : rows_of(x, bias);
  routines_for(x).pointwise.bias_activation_backward(dx, d_bias, partial, grad.contiguous(), input, bias.contiguous(), static_cast<Activation>(activation));
  return {dx, d_bias};
}

struct BiasActivationFunction : AutogradFunction<BiasActivationFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& bias, int64_t activation) {
    static const auto op = find_operator<Forward>("tessera::bias_activation");
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x, bias});
    context->saved_data["activation"] = activation;
    return op.call(x, bias, activation);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = find_operator<Backward>("tessera::bias_activation_backward");
    const auto saved = context->get_saved_variables();
    auto [dx, d_bias] = op.call(grads[0], saved[0], saved[1], context->saved_data["activation"].toInt());
    return first_derivative("bias_activation", grads, {dx, d_bias, at::Tensor()});
  }
};

using Activate = at::Tensor(const at::Tensor&, int64_t);
using ActivateBackward = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t);

at::Tensor activate_forward(const at::Tensor& x, int64_t activation) {
  const at::Tensor out = at::empty(x.sizes(), x.options());
  if (out.numel() > 0) routines_for(x).pointwise.bias_activation(out, as_rows(x).contiguous(), {}, static_cast<Activation>(activation));
  return out;
}

at::Tensor activate_backward(const at::Tensor& grad, const at::Tensor& x, int64_t activation) {
  const at::Tensor dx = at::empty(x.sizes(), x.options());
  if (dx.numel() == 0) return dx;
  const at::Tensor rows = as_rows(x).contiguous();
  routines_for(x).pointwise.bias_activation_backward(dx, {}, {}, grad.contiguous(), rows, {}, static_cast<Activation>(activation));
  return dx;
}

struct ActivateFunction : AutogradFunction<ActivateFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, int64_t activation) {
    static const auto op = find_operator<Activate>("tessera::activate");
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x});
    context->saved_data["activation"] = activation;
    return op.call(x, activation);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = find_operator<ActivateBackward>("tessera::activate_backward");
    const auto saved = context->get_saved_variables();
    return first_derivative("activate", grads, {op.call(grads[0], saved[0], context->saved_data["activation"].toInt()), at::Tensor()});
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("bias_activation(Tensor x, Tensor bias, int activation) -> Tensor");
  m.def("bias_activation_backward(Tensor grad, Tensor x, Tensor bias, int activation) -> (Tensor dx, Tensor d_bias)");
  m.def("activate(Tensor x, int activation) -> Tensor");
  m.def("activate_backward(Tensor grad, Tensor x, int activation) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("bias_activation", forward);
  m.impl("bias_activation_backward", backward);
  m.impl("activate", activate_forward);
  m.impl("activate_backward", activate_backward);
}

at::Tensor bias_activation(const at::Tensor& x, const at::Tensor& bias, Activation activation) {
  require(x.dim() >= 1 && bias.dim() == 1 && bias.size(0) == x.size(-1) && bias.size(0) > 0, "bias_activation: bias ", bias.sizes(),
          " must hold one entry per feature of x ", x.sizes());
  if (is_emulated_half(x) || is_emulated_half(bias)) {
    return bias_activation(x.to(at::kFloat), bias.to(at::kFloat), activation).to(x.scalar_type());
  }
  if (takes_reference(Kernel::bias_activation)) return reference::bias_activation(x, bias, activation);
  require_supported("bias_activation: x", x);
  require_supported("bias_activation: bias", bias);
  return BiasActivationFunction::apply(x, bias, static_cast<int64_t>(activation));
}

at::Tensor activate(const at::Tensor& x, Activation activation) {
  const bool fused = is_on_host(x) && is_supported(x.scalar_type()) && x.dim() > 0 && x.size(-1) > 0 && !takes_reference(Kernel::bias_activation);
  if (!fused) return activation == Activation::Silu ? at::silu(x) : at::gelu(x, "tanh");
  return ActivateFunction::apply(x, static_cast<int64_t>(activation));
}

}  // namespace tessera::kernels
