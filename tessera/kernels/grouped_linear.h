#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/kernels/fp8.h"

namespace tessera::kernels {

/// How many rows each group has, on the host: `counts` [E] int64 of which sum <= rows. A CPU's counts lie there already; a device's are read once, through
/// host_read; a dry run, which has none, gets an even load of all `rows`, over the first `few` groups where that is not 0.
std::vector<int64_t> group_sizes(const at::Tensor& counts, int64_t rows, int64_t few = 0);

/// Products of groups of rows with a weight each: group e, the sizes[e] rows behind those of the groups before, is multiplied with weight[e] transposed.
///   x [N, I], weight [E, O, I] of one dtype; with `fp8`, as fp8_linear, any      result [N, O] of that dtype, or fp8's; rows behind the last group are zero
/// Differentiable in both: a group without rows gives its weight a gradient of zero. 16-bit products that the device lacks are widened group by group
/// (kernels/products.h). Kept for backward: x and weight.
/// FLOPs: 2 sum(sizes) I O, on CPUs in blocks (product_blocks.h, which says what scratch they take), elsewhere as one product of a group; in fp8 a group's
/// operands, each rounded by scales of its own, and its result.
/// Throws ConfigError where shapes, dtypes or sizes do not fit.
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes, const std::optional<Fp8Products>& fp8 = {});

/// What backward makes of dy [N, O], outside of autograd: the gradient of x, rows behind the groups zero; that of weight [E, O, I]. In fp8 in `dtype`, else in
/// that of dy.
at::Tensor grouped_input_gradient(const at::Tensor& dy, const at::Tensor& weight, const std::vector<int64_t>& sizes, const std::optional<Fp8Products>& fp8 = {},
                                  at::ScalarType dtype = at::kFloat);
at::Tensor grouped_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const std::vector<int64_t>& sizes, const std::optional<Fp8Products>& fp8 = {},
                                   at::ScalarType dtype = at::kFloat);

}  // namespace tessera::kernels
