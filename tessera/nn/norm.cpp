#include "tessera/nn/norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/native_layer_norm.h>
#include <ATen/ops/native_layer_norm_backward.h>

#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"
#include "tessera/kernels/layer_norm.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"

namespace tessera::nn {

namespace {

at::Tensor in_fp32(const at::Tensor& tensor) { return tensor.defined() ? tensor.to(at::kFloat) : tensor; }

/// The arithmetic is fp32, and so is the gradient that a 16-bit weight is handed.
at::Tensor widened(const at::Tensor& weight) { return at::isReducedFloatingType(weight.scalar_type()) ? cast(weight, at::kFloat) : weight; }

/// LayerNorm of 16-bit inputs that kernels::layer_norm does not take, with fp32 arithmetic that keeps the input as it came, and not the fp32 copy of twice its
/// size that the arithmetic needs.
struct NarrowLayerNorm : AutogradFunction<NarrowLayerNorm> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const std::vector<int64_t>& shape,
                            const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps, at::ScalarType out) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor w = weight.value_or(at::Tensor()), b = bias.value_or(at::Tensor());
    const auto [y, mean, rstd] = at::native_layer_norm(x.to(at::kFloat), shape, in_fp32(w), in_fp32(b), eps);
    context->save_for_backward({x, w, b, mean, rstd});
    context->saved_data["shape"] = shape;
    return y.to(out);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1], &bias = saved[2];
    const auto [dx, d_weight, d_bias] =
        at::native_layer_norm_backward(grads[0].to(at::kFloat), x.to(at::kFloat), context->saved_data["shape"].toIntVector(), saved[3], saved[4],
                                       in_fp32(weight), in_fp32(bias), {true, weight.defined(), bias.defined()});
    const auto as = [](const at::Tensor& gradient, const at::Tensor& of) { return of.defined() ? gradient.to(of.scalar_type()) : at::Tensor(); };
    return {dx.to(x.scalar_type()), at::Tensor(), as(d_weight, weight), as(d_bias, bias), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

LayerNormImpl::LayerNormImpl(LayerNormOptions given) : options(std::move(given)) {
  if (options.elementwise_affine()) {
    weight = register_parameter("weight", at::empty(options.normalized_shape()));
    bias = register_parameter("bias", at::empty(options.normalized_shape()));
    set_init(weight, InitRule::ones());
    set_init(bias, InitRule::zeros());
    reset_parameters();
  }
}

void LayerNormImpl::reset_parameters() {
  at::NoGradGuard no_grad;
  if (weight.defined()) weight.fill_(1);
  if (bias.defined()) bias.zero_();
}

at::Tensor LayerNormImpl::forward(const at::Tensor& x) {
  if (bypassed(*this)) return call(*this, x);
  const auto out = compute_dtype().value_or(x.scalar_type());
  const at::Tensor scale = in_use(weight), shift = in_use(bias);
  const bool plain = scale.defined() && options.normalized_shape().size() == 1 && kernels::is_supported(scale.scalar_type());
  const bool in_bf16 = x.scalar_type() == at::kBFloat16 || (x.scalar_type() == at::kFloat && out == at::kBFloat16);
  if (plain && in_bf16 && kernels::is_supported(out)) return kernels::layer_norm(x, widened(scale), widened(shift), options.eps(), out);
  const auto given = [](const at::Tensor& parameter) { return parameter.defined() ? std::optional(widened(parameter)) : std::nullopt; };
  if (at::isReducedFloatingType(x.scalar_type())) {
    return NarrowLayerNorm::apply(x, options.normalized_shape(), given(scale), given(shift), options.eps(), out);
  }
  const auto wide = wide_type(x);
  const auto in_wide = [&](const at::Tensor& parameter) { return parameter.defined() ? cast(parameter, wide) : parameter; };
  return cast(at::layer_norm(cast(x, wide), options.normalized_shape(), in_wide(scale), in_wide(shift), options.eps()), out);
}

void LayerNormImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::LayerNorm(" << at::IntArrayRef(options.normalized_shape()) << ", eps=" << options.eps() << ")";
}

RMSNormImpl::RMSNormImpl(int64_t dim, double eps) : eps(eps) {
  weight = register_parameter("weight", at::empty({dim}));
  set_init(weight, InitRule::ones());
  reset_parameters();
}

void RMSNormImpl::reset_parameters() {
  at::NoGradGuard no_grad;
  weight.fill_(1);
}

at::Tensor RMSNormImpl::forward(const at::Tensor& x) {
  if (bypassed(*this)) return call(*this, x);
  return kernels::rms_norm(x, widened(in_use(weight)), eps, compute_dtype());
}

void RMSNormImpl::pretty_print(std::ostream& stream) const { stream << "tessera::nn::RMSNorm(" << weight.size(0) << ", eps=" << eps << ")"; }

}  // namespace tessera::nn
