#include <array>
#include <optional>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>

#include "tessera/kernels/meta/registration.h"

namespace tessera::kernels::meta {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

bool is_defined(const OptionalTensor& tensor) { return tensor && tensor->defined(); }

/// Statistics are fp32 where reduced-precision inputs meet fp32 parameters, and of the input's dtype otherwise.
at::ScalarType statistics_type(const at::Tensor& input, const OptionalTensor& weight) {
  return is_defined(weight) && weight->scalar_type() != input.scalar_type() ? at::kFloat : input.scalar_type();
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm(const at::Tensor& input, c10::SymIntArrayRef normalized_shape, const OptionalTensor& weight,
                                                          const OptionalTensor&, double) {
  const at::Tensor x = input.contiguous();
  const int64_t outer = x.dim() - static_cast<int64_t>(normalized_shape.size());
  std::vector<int64_t> statistics(x.dim(), 1);
  for (int64_t dim = 0; dim < outer; ++dim) statistics[dim] = x.size(dim);
  const auto options = x.options().dtype(statistics_type(x, weight));
  const at::Tensor y = at::empty(x.sizes(), x.options());
  return {y, at::empty(statistics, options), at::empty(statistics, options)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(const at::Tensor& grad, const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                                                   const at::Tensor&, const at::Tensor&, const OptionalTensor& weight,
                                                                   const OptionalTensor& bias, std::array<bool, 3> wanted) {
  const at::Tensor x = input.contiguous(), contiguous_grad = grad.contiguous();
  at::Tensor dx, d_weight, d_bias;
  if (wanted[0]) dx = at::empty(x.sizes(), x.options());
  if (wanted[1]) d_weight = at::empty(weight->sizes(), weight->options());
  if (wanted[2]) d_bias = at::empty(bias->sizes(), bias->options());
  int64_t features = 1;
  for (const auto& size : normalized_shape) features *= size.expect_int();
  at::Tensor partial_sums;
  if (d_weight.defined() || d_bias.defined()) partial_sums = at::empty({2, at::get_num_threads(), features}, x.options());
  return {dx, d_weight, d_bias};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input, const OptionalTensor& weight, const OptionalTensor&, const OptionalTensor&,
                                                          const OptionalTensor&, bool training, double, double) {
  const auto options = input.options().dtype(statistics_type(input, weight));
  const int64_t channels = training ? input.size(1) : 0;
  const at::Tensor y = at::empty_like(input);
  return {y, at::empty({channels}, options), at::empty({channels}, options)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(const at::Tensor&, const at::Tensor& input, const OptionalTensor& weight,
                                                                   const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                                   bool, double, std::array<bool, 3> wanted) {
  const auto options = is_defined(weight) ? weight->options() : input.options();
  const auto channels = [&](bool is_wanted) { return is_wanted ? at::empty({input.size(1)}, options) : at::Tensor(); };
  const at::Tensor dx = wanted[0] ? at::empty_like(input) : at::Tensor();
  return {dx, channels(wanted[1]), channels(wanted[2])};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  implement(m, "native_layer_norm", layer_norm);
  implement(m, "native_layer_norm_backward", layer_norm_backward);
  implement(m, "native_batch_norm", batch_norm);
  implement(m, "native_batch_norm_backward", batch_norm_backward);
}

}  // namespace tessera::kernels::meta
