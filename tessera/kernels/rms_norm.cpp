#include "tessera/kernels/rms_norm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include "tessera/core/autograd_function.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"

// The weight's gradient is a sum over all rows. Rows are added in blocks of fixed size, and blocks in their order, so that the bits do not depend on how many
// threads took part.

namespace tessera::kernels {

namespace {

using Forward = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, double, at::ScalarType);
using AddedForward = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, double, at::ScalarType);
using Backward = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                                    const std::optional<at::Tensor>&);

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, const at::Tensor& weight, double eps, at::ScalarType out_dtype) {
  const at::Tensor input = x.contiguous();
  const at::Tensor out = at::empty(x.sizes(), x.options().dtype(out_dtype));
  const at::Tensor rstd = at::empty({x.numel() / weight.size(0)}, x.options().dtype(at::kFloat));
  routines_for(x).rms_norm.forward(out, rstd, {}, input, {}, weight.contiguous(), eps);
  return {out, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> added_forward(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, double eps,
                                                             at::ScalarType out_dtype) {
  const at::Tensor sum = at::empty(x.sizes(), x.options()), out = at::empty(x.sizes(), x.options().dtype(out_dtype));
  const at::Tensor rstd = at::empty({x.numel() / weight.size(0)}, x.options().dtype(at::kFloat));
  routines_for(x).rms_norm.forward(out, rstd, sum, x.contiguous(), added.contiguous(), weight.contiguous(), eps);
  return {sum, out, rstd};
}

std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& rstd,
                                            const std::optional<at::Tensor>& grad_sum) {
  const at::Tensor dx = at::empty(x.sizes(), x.options());
  const at::Tensor d_weight = at::empty_like(weight);
  const int64_t blocks = (rstd.numel() + kRmsNormBlock - 1) / kRmsNormBlock;
  const at::Tensor partial = at::empty({blocks, weight.size(0)}, x.options().dtype(at::kFloat));
  const at::Tensor beside = grad_sum && grad_sum->defined() ? grad_sum->contiguous() : at::Tensor();
  routines_for(x).rms_norm.backward(dx, d_weight, partial, grad.contiguous(), beside, x.contiguous(), weight.contiguous(), rstd);
  return {dx, d_weight};
}

struct RmsNormFunction : AutogradFunction<RmsNormFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, double eps, at::ScalarType out_dtype) {
    static const auto op = find_operator<Forward>("tessera::rms_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [out, rstd] = op.call(x, weight, eps, out_dtype);
    context->save_for_backward({x, weight, rstd});
    return out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = find_operator<Backward>("tessera::rms_norm_backward");
    const auto saved = context->get_saved_variables();
    auto [dx, d_weight] = op.call(grads[0], saved[0], saved[1], saved[2], std::nullopt);
    return first_derivative("rms_norm", grads, {dx, d_weight, at::Tensor(), at::Tensor()});
  }
};

struct AddRmsNormFunction : AutogradFunction<AddRmsNormFunction> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& added,
                                                const at::Tensor& weight, double eps, at::ScalarType out_dtype) {
    static const auto op = find_operator<AddedForward>("tessera::add_rms_norm");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [sum, out, rstd] = op.call(x, added, weight, eps, out_dtype);
    context->save_for_backward({sum, weight, rstd});
    context->saved_data["added"] = added.scalar_type();
    return {sum, out};
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = find_operator<Backward>("tessera::rms_norm_backward");
    const auto saved = context->get_saved_variables();
    auto [dx, d_weight] = op.call(grads[1], saved[0], saved[1], saved[2], grads[0]);
    return first_derivative("add_rms_norm", grads, {dx, dx.to(context->saved_data["added"].toScalarType()), d_weight, at::Tensor(), at::Tensor()});
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, ScalarType out_dtype) -> (Tensor out, Tensor rstd)");
  m.def("add_rms_norm(Tensor x, Tensor added, Tensor weight, float eps, ScalarType out_dtype) -> (Tensor sum, Tensor out, Tensor rstd)");
  m.def("rms_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor rstd, Tensor? grad_sum) -> (Tensor dx, Tensor d_weight)");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("rms_norm", forward);
  m.impl("add_rms_norm", added_forward);
  m.impl("rms_norm_backward", backward);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, std::optional<at::ScalarType> out_dtype) {
  require(x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1) && weight.size(0) > 0, "rms_norm: weight ", weight.sizes(),
          " must hold one entry per feature of x ", x.sizes());
  const at::ScalarType result = out_dtype.value_or(x.scalar_type());
  if (!x.is_cuda() && (x.scalar_type() == at::kHalf || weight.scalar_type() == at::kHalf || result == at::kHalf)) {
    const at::Tensor normalized = rms_norm(x.to(at::kFloat), weight.to(at::kFloat), eps, at::kFloat);
    return normalized.to(result);
  }
  if (takes_reference(Kernel::rms_norm)) return reference::rms_norm(x, weight, eps, out_dtype);
  require_supported("rms_norm: x", x);
  require_supported("rms_norm: weight", weight);
  require(is_supported(result), "rms_norm: out_dtype ", c10::toString(result), " is not supported; use Float or BFloat16");
  return RmsNormFunction::apply(x, weight, eps, result);
}

std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& x, const at::Tensor& added, const at::Tensor& weight, double eps,
                                               std::optional<at::ScalarType> out_dtype) {
  require(x.sizes() == added.sizes() && x.dim() >= 1 && weight.dim() == 1 && weight.size(0) == x.size(-1) && weight.size(0) > 0, "add_rms_norm: x ", x.sizes(),
          " and what is added ", added.sizes(), " must have one shape, and weight ", weight.sizes(), " an entry per feature");
  const at::ScalarType result = out_dtype.value_or(x.scalar_type());
  const bool fused = is_supported(x.scalar_type()) && is_supported(added.scalar_type()) && is_supported(weight.scalar_type()) && is_supported(result);
  if (takes_reference(Kernel::rms_norm) || !fused) {
    const at::Tensor sum = x + added.to(x.scalar_type());
    return {sum, rms_norm(sum, weight, eps, out_dtype)};
  }
  auto results = AddRmsNormFunction::apply(x, added, weight, eps, result);
  return {std::move(results[0]), std::move(results[1])};
}

}  // namespace tessera::kernels
