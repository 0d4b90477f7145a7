#include "tessera/nn/norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/layer_norm.h>

#include "tessera/core/error.h"
#include "tessera/kernels/rms_norm.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/parameter.h"

namespace tessera::nn {

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
  const auto out = compute_dtype().value_or(x.scalar_type());
  const auto fp32 = [](const at::Tensor& parameter) { return parameter.defined() ? cast(parameter, at::kFloat) : parameter; };
  return cast(at::layer_norm(cast(x, at::kFloat), options.normalized_shape(), fp32(weight), fp32(bias), options.eps()), out);
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

at::Tensor RMSNormImpl::forward(const at::Tensor& x) { return kernels::rms_norm(x, weight, eps, compute_dtype()); }

void RMSNormImpl::pretty_print(std::ostream& stream) const { stream << "tessera::nn::RMSNorm(" << weight.size(0) << ", eps=" << eps << ")"; }

}  // namespace tessera::nn
