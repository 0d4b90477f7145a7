#include "tessera/kernels/grouped_linear.h"

#include <functional>
#include <numeric>

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/kernels/products.h"

// libtorch's own grouped product (at::_grouped_mm) on a CPU is this loop, too, and was no faster in fp32 and bf16, forward and for the weights; but it cannot
// write into a given place, cannot leave rows out, and knows nothing of processors without bf16 products. On a device it takes bf16 alone.

namespace tessera::kernels {

namespace {

/// visit(group, first row, rows) for each group that has rows; returns how many rows all of them have.
int64_t for_groups(const std::vector<int64_t>& sizes, const std::function<void(int64_t group, int64_t first, int64_t rows)>& visit) {
  int64_t first = 0;
  for (size_t group = 0; group < sizes.size(); ++group) {
    if (sizes[group] > 0) visit(static_cast<int64_t>(group), first, sizes[group]);
    first += sizes[group];
  }
  return first;
}

/// out <- a b
void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b) {
  at::Tensor to = out;
  if (!is_widened(a)) {
    at::mm_out(to, a, b);
  } else {
    to.copy_(at::mm(a.to(at::kFloat), b.to(at::kFloat)));
  }
}

at::Tensor zero_behind(const at::Tensor& rows, int64_t used) {
  if (used < rows.size(0)) rows.narrow(0, used, rows.size(0) - used).zero_();
  return rows;
}

at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes) {
  const at::Tensor out = at::empty({x.size(0), weight.size(1)}, x.options());
  const int64_t used = for_groups(
      sizes, [&](int64_t group, int64_t first, int64_t rows) { multiply(out.narrow(0, first, rows), x.narrow(0, first, rows), weight.select(0, group).t()); });
  return zero_behind(out, used);
}

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes) {
    context->save_for_backward({x, weight});
    context->saved_data["sizes"] = sizes;
    return product(x, weight, sizes);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto sizes = context->saved_data["sizes"].toIntVector();
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx, d_weight;
    if (context->needs_input_grad(0)) dx = grouped_input_gradient(dy, saved[1], sizes);
    if (context->needs_input_grad(1)) d_weight = grouped_weight_gradient(dy, saved[0], sizes);
    return once_differentiable("grouped_linear", "multiply each group by itself, with nn::project", grads, {dx, d_weight, at::Tensor()});
  }
};

}  // namespace

std::vector<int64_t> group_sizes(const at::Tensor& counts, int64_t rows) {
  const int64_t groups = counts.size(0);
  std::vector<int64_t> sizes(static_cast<size_t>(groups));
  if (counts.is_meta()) {
    for (int64_t group = 0; group < groups; ++group) sizes[static_cast<size_t>(group)] = rows / groups + (group < rows % groups ? 1 : 0);
    return sizes;
  }
  const auto read = host_read_all(counts, 0);
  for (size_t group = 0; group < sizes.size(); ++group) sizes[group] = static_cast<int64_t>(read[group]);
  return sizes;
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes) {
  require(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(2) && x.scalar_type() == weight.scalar_type(), "grouped_linear: x ", x.scalar_type(),
          " ", x.sizes(), " and weight ", weight.scalar_type(), " ", weight.sizes(), " must be [N, I] and [E, O, I] of one dtype");
  const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  require(static_cast<int64_t>(sizes.size()) == weight.size(0) && rows <= x.size(0), "grouped_linear: ", sizes.size(), " groups of ", rows, " rows for ",
          weight.size(0), " weights and ", x.size(0), " rows");
  return GroupedLinear::apply(x, weight, sizes);
}

at::Tensor grouped_input_gradient(const at::Tensor& dy, const at::Tensor& weight, const std::vector<int64_t>& sizes) {
  const at::Tensor dx = at::empty({dy.size(0), weight.size(2)}, dy.options());
  const int64_t used = for_groups(
      sizes, [&](int64_t group, int64_t first, int64_t rows) { multiply(dx.narrow(0, first, rows), dy.narrow(0, first, rows), weight.select(0, group)); });
  return zero_behind(dx, used);
}

at::Tensor grouped_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const std::vector<int64_t>& sizes) {
  const at::Tensor d_weight = at::empty({static_cast<int64_t>(sizes.size()), dy.size(1), x.size(1)}, dy.options());
  for (size_t group = 0; group < sizes.size(); ++group) {
    if (sizes[group] == 0) d_weight.select(0, static_cast<int64_t>(group)).zero_();
  }
  for_groups(sizes,
             [&](int64_t group, int64_t first, int64_t rows) { multiply(d_weight.select(0, group), dy.narrow(0, first, rows).t(), x.narrow(0, first, rows)); });
  return d_weight;
}

}  // namespace tessera::kernels
