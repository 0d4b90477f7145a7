#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// How many rows each group has, on the host: `counts` [E] int64 of which sum <= rows. A CPU's counts lie there already; a device's are read once, through
/// host_read; a dry run, which has none, gets an even load of all `rows`.
std::vector<int64_t> group_sizes(const at::Tensor& counts, int64_t rows);

/// Products of groups of rows with a weight each: group e, the sizes[e] rows behind those of the groups before, is multiplied with weight[e] transposed.
///   x [N, I], weight [E, O, I] of one dtype      result [N, O]; rows behind the last group are zero
/// Differentiable in both: a group without rows gives its weight a gradient of zero. 16-bit products that the device lacks are widened group by group
/// (kernels/products.h). Kept for backward: x and weight.
/// FLOPs: 2 sum(sizes) I O, each as one product of a group, which on CPUs is as fast as libtorch's grouped product (bench/kernels) and takes no scratch.
/// Throws ConfigError where shapes, dtypes or sizes do not fit.
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes);

/// What backward makes of dy [N, O], outside of autograd: the gradient of x, rows behind the groups zero; that of weight [E, O, I].
at::Tensor grouped_input_gradient(const at::Tensor& dy, const at::Tensor& weight, const std::vector<int64_t>& sizes);
at::Tensor grouped_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const std::vector<int64_t>& sizes);

}  // namespace tessera::kernels
