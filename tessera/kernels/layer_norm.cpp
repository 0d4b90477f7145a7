#include "tessera/kernels/layer_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "tessera/core/autograd_function.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"

// As rms_norm.cpp, with a mean to take off and a bias to add. One operator serves the norm alone and the one of a stream that grows: without what is added, it
// gives an empty sum.

namespace tessera::kernels {

namespace {

using torch::autograd::variable_list;
using Results = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Forward = Results(const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, double, at::ScalarType);
using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
                                                                const at::Tensor&, const at::Tensor&);

Results forward(const at::Tensor& x, const std::optional<at::Tensor>& added, const at::Tensor& weight, const at::Tensor& bias, double eps,
                at::ScalarType out_dtype) {
  const at::Tensor sum = added ? at::empty(x.sizes(), x.options()) : at::Tensor(), out = at::empty(x.sizes(), x.options().dtype(out_dtype));
  const auto floats = x.options().dtype(at::kFloat);
  const at::Tensor mean = at::empty({x.numel() / weight.size(0)}, floats), rstd = at::empty_like(mean);
  routines_for(x).layer_norm.forward(out, mean, rstd, sum, x.contiguous(), added ? added->contiguous() : at::Tensor(), weight.contiguous(), bias.contiguous(),
                                     eps);
  return {added ? sum : at::empty({0}, x.options()), out, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad, const std::optional<at::Tensor>& grad_sum, const at::Tensor& x,
                                                        const at::Tensor& weight, const at::Tensor& mean, const at::Tensor& rstd) {
  const at::Tensor dx = at::empty(x.sizes(), x.options()), d_weight = at::empty_like(weight), d_bias = at::empty_like(weight);
  const int64_t blocks = (rstd.numel() + kRmsNormBlock - 1) / kRmsNormBlock;
  const at::Tensor partial = at::empty({blocks, 2, weight.size(0)}, x.options().dtype(at::kFloat));
  routines_for(x).layer_norm.backward(dx, d_weight, d_bias, partial, grad.contiguous(), grad_sum ? grad_sum->contiguous() : at::Tensor(), x.contiguous(),
                                      weight.contiguous(), mean, rstd);
  return {dx, d_weight, d_bias};
}

struct LayerNormFunction : AutogradFunction<LayerNormFunction> {
  /// {out}, or, with what is added, {sum, out}.
  static variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const std::optional<at::Tensor>& added, const at::Tensor& weight,
                               const at::Tensor& bias, double eps, at::ScalarType out_dtype) {
    static const auto op = find_operator<Forward>("tessera::layer_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [sum, out, mean, rstd] = op.call(x, added, weight, bias, eps, out_dtype);
    context->save_for_backward({added ? sum : x, weight, mean, rstd});
    if (!added) return {out};
    context->saved_data["added"] = added->scalar_type();
    return {sum, out};
  }

  static variable_list backward(torch::autograd::AutogradContext* context, const variable_list& grads) {
    static const auto op = find_operator<Backward>("tessera::layer_norm_backward");
    const auto saved = context->get_saved_variables();
    const auto added = context->saved_data.find("added");
    const bool grows = added != context->saved_data.end();
    auto [dx, d_weight, d_bias] = op.call(grads[grows ? 1 : 0], grows ? std::optional(grads[0]) : std::nullopt, saved[0], saved[1], saved[2], saved[3]);
    variable_list gradients{dx};
    if (grows) gradients.push_back(dx.to(added->second.toScalarType()));
    if (!grows) gradients.emplace_back();
    gradients.insert(gradients.end(), {d_weight, d_bias, at::Tensor(), at::Tensor()});
    return first_derivative("layer_norm", grads, std::move(gradients));
  }
};

void require_fit(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  require(x.dim() >= 1 && weight.dim() == 1 && weight.sizes() == bias.sizes() && weight.size(0) == x.size(-1) && weight.size(0) > 0, "layer_norm: weight ",
          weight.sizes(), " and bias ", bias.sizes(), " must hold one entry per feature of x ", x.sizes());
  require(weight.scalar_type() == bias.scalar_type(), "layer_norm: weight is ", weight.scalar_type(), " and bias ", bias.scalar_type(), "; they must be alike");
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def(
      "layer_norm(Tensor x, Tensor? added, Tensor weight, Tensor bias, float eps, ScalarType out_dtype) -> (Tensor sum, Tensor out, Tensor mean, "
      "Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, Tensor mean, Tensor rstd) -> (Tensor dx, Tensor d_weight, "
      "Tensor d_bias)");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("layer_norm", forward);
  m.impl("layer_norm_backward", backward);
}

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps, std::optional<at::ScalarType> out_dtype) {
  require_fit(x, weight, bias);
  const at::ScalarType result = out_dtype.value_or(x.scalar_type());
  if (!x.is_cuda() && (x.scalar_type() == at::kHalf || weight.scalar_type() == at::kHalf || result == at::kHalf)) {
    return layer_norm(x.to(at::kFloat), weight.to(at::kFloat), bias.to(at::kFloat), eps, at::kFloat).to(result);
  }
  if (takes_reference(Kernel::layer_norm)) return reference::layer_norm(x, weight, bias, eps, out_dtype);
  require_supported("layer_norm: x", x);
  require_supported("layer_norm: weight", weight);
  require(is_supported(result), "layer_norm: out_dtype ", c10::toString(result), " is not supported; use Float or BFloat16");
  return LayerNormFunction::apply(x, std::optional<at::Tensor>(), weight, bias, eps, result)[0];
}

std::pair<at::Tensor, at::Tensor> add_layer_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, const at::Tensor& bias, double eps,
                                                 std::optional<at::ScalarType> out_dtype) {
  require_fit(x, weight, bias);
  require(x.sizes() == added.sizes(), "add_layer_norm: x ", x.sizes(), " and what is added ", added.sizes(), " must have one shape");
  const at::ScalarType result = out_dtype.value_or(x.scalar_type());
  const bool fused = is_supported(x.scalar_type()) && is_supported(added.scalar_type()) && is_supported(weight.scalar_type()) && is_supported(result);
  if (takes_reference(Kernel::layer_norm) || !fused) {
    const at::Tensor sum = x + added.to(x.scalar_type());
    return {sum, layer_norm(sum, weight, bias, eps, out_dtype)};
  }
  auto results = LayerNormFunction::apply(x, std::optional(added), weight, bias, eps, result);
  return {std::move(results[0]), std::move(results[1])};
}

}  // namespace tessera::kernels
