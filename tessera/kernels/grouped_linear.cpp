#include "tessera/kernels/grouped_linear.h"

#include <algorithm>
#include <array>
#include <functional>
#include <numeric>
#include <utility>

#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/kernels/product_blocks.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/on_host.h"

// What kernels/product_blocks does not take (fp64, fp8, widened types, other processors) is multiplied group by group. libtorch's own grouped product
// (at::_grouped_mm) on a CPU is this loop, too; but it cannot write into a given place, cannot leave rows out, and knows nothing of processors without bf16
// products. On a device it takes bf16 alone.

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

/// Where MKL's results depend on nothing but shapes.
bool is_aligned(const at::Tensor& x) {
  constexpr uintptr_t kLine = 64;
  return !x.is_cpu() || reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kLine == 0;
}

/// A group's rows begin where those before it end, which says nothing of the group: its product is to have the same bits wherever it lies, so what begins
/// within a cache line is copied. Rows of whole lines, as most are, always begin with one. What is widened is copied anyway. There is room for all rows in one
/// group: a dry run does not know how many a group has, and takes the same.
class Copies {
 public:
  enum Place { Rows, Columns, Weight };

  /// Of `rows`, of a result or second operand with as many rows and `columns` columns, and of a group's weight or its gradient.
  Copies(const at::Tensor& rows, int64_t columns, const std::optional<Fp8Products>& fp8) {
    const bool wide = is_widened(rows);
    const int64_t width = rows.size(1), line = 64 / (wide ? 4 : rows.element_size());
    if (!is_on_host(rows) || fp8 || (!wide && width % line == 0 && columns % line == 0)) return;
    int64_t end = 0;
    for (const auto& [place, elements] : {std::pair{Rows, rows.size(0) * width}, {Columns, rows.size(0) * columns}, {Weight, width * columns}}) {
      begin_[place] = end;
      end += (elements + line - 1) / line * line;
    }
    room_ = at::empty({end}, wide ? rows.options().dtype(at::kFloat) : rows.options());
  }

  /// `x` itself or, with other memory, a tensor like it; `filled`: of its values.
  at::Tensor taken(const at::Tensor& x, Place place, bool filled = true) const {
    const bool wide = is_widened(x);
    if (!wide && is_aligned(x)) return x;
    const bool fits = room_.defined() && x.is_non_overlapping_and_dense();
    const at::Tensor copy = fits ? room_.as_strided(x.sizes(), x.strides(), begin_[place]) : at::empty_like(x, wide ? at::kFloat : x.scalar_type());
    return filled ? copy.copy_(x) : copy;
  }

 private:
  at::Tensor room_;
  std::array<int64_t, 3> begin_{};
};

/// out <- a b, of which `a` has the rows.
void multiply(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const Copies& copies, Copies::Place b_place, Copies::Place out_place) {
  at::Tensor to = out, result = copies.taken(to, out_place, /*filled=*/false);
  at::mm_out(result, copies.taken(a, Copies::Rows), copies.taken(b, b_place));
  if (!result.is_same(to)) to.copy_(result);
}

/// A group's rows as a device's fp8 products take them: 16 at a time. Zeros add nothing, and change no scale.
at::Tensor in_tiles(const at::Tensor& rows) {
  constexpr int64_t tile = 16;
  const int64_t more = rows.is_cuda() ? (tile - rows.size(0) % tile) % tile : 0;
  return more > 0 ? at::constant_pad_nd(rows, {0, 0, 0, more}) : rows;
}

/// out <- rows weight^T, in fp8
void multiply(const at::Tensor& out, const at::Tensor& rows, at::ScalarType format, const at::Tensor& weight, const Fp8Products& fp8) {
  out.copy_(fp8_product(in_tiles(rows), format, weight, at::kFloat8_e4m3fn, fp8.out_dtype, fp8.scaling).narrow(0, 0, rows.size(0)));
}

at::Tensor zero_behind(const at::Tensor& rows, int64_t used) {
  if (used < rows.size(0)) rows.narrow(0, used, rows.size(0) - used).zero_();
  return rows;
}

at::Tensor product(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes, const std::optional<Fp8Products>& fp8) {
  if (!fp8 && multiplies_blocks(x)) return multiply_groups(x, weight, /*transposed=*/true, sizes);
  const at::Tensor out = at::empty({x.size(0), weight.size(1)}, fp8 ? x.options().dtype(fp8->out_dtype) : x.options());
  const Copies copies(x, weight.size(1), fp8);
  const int64_t used = for_groups(sizes, [&](int64_t group, int64_t first, int64_t rows) {
    const at::Tensor to = out.narrow(0, first, rows), from = x.narrow(0, first, rows), by = weight.select(0, group);
    fp8 ? multiply(to, from, at::kFloat8_e4m3fn, by, *fp8) : multiply(to, from, by.t(), copies, Copies::Weight, Copies::Columns);
  });
  return zero_behind(out, used);
}

struct GroupedLinear : torch::autograd::Function<GroupedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes,
                            const std::optional<Fp8Products>& fp8) {
    context->save_for_backward({x, weight});
    context->saved_data["sizes"] = sizes;
    if (fp8) context->saved_data["fp8"] = std::vector<int64_t>{static_cast<int64_t>(fp8->out_dtype), static_cast<int64_t>(fp8->scaling)};
    return product(x, weight, sizes, fp8);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto sizes = context->saved_data["sizes"].toIntVector();
    std::optional<Fp8Products> fp8;
    if (const auto found = context->saved_data.find("fp8"); found != context->saved_data.end()) {
      const auto format = found->second.toIntVector();
      fp8 = {.out_dtype = static_cast<at::ScalarType>(format[0]), .scaling = static_cast<Fp8Scaling>(format[1])};
    }
    const at::Tensor dy = grads[0].contiguous();
    at::Tensor dx, d_weight;
    if (context->needs_input_grad(0)) dx = grouped_input_gradient(dy, saved[1], sizes, fp8, saved[0].scalar_type());
    if (context->needs_input_grad(1)) d_weight = grouped_weight_gradient(dy, saved[0], sizes, fp8, saved[1].scalar_type());
    return once_differentiable("grouped_linear", "multiply each group by itself, with nn::project", grads, {dx, d_weight, at::Tensor(), at::Tensor()});
  }
};

}  // namespace

std::vector<int64_t> group_sizes(const at::Tensor& counts, int64_t rows, int64_t few) {
  const int64_t groups = counts.size(0);
  std::vector<int64_t> sizes(static_cast<size_t>(groups));
  if (counts.is_meta()) {
    const int64_t taking = few > 0 ? std::min(few, groups) : groups;
    for (int64_t group = 0; group < taking; ++group) sizes[static_cast<size_t>(group)] = rows / taking + (group < rows % taking ? 1 : 0);
    return sizes;
  }
  const auto read = host_read_all(counts, 0);
  for (size_t group = 0; group < sizes.size(); ++group) sizes[group] = static_cast<int64_t>(read[group]);
  return sizes;
}

at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& sizes, const std::optional<Fp8Products>& fp8) {
  require(x.dim() == 2 && weight.dim() == 3 && x.size(1) == weight.size(2) && (fp8 || x.scalar_type() == weight.scalar_type()), "grouped_linear: x ",
          x.scalar_type(), " ", x.sizes(), " and weight ", weight.scalar_type(), " ", weight.sizes(), " must be [N, I] and [E, O, I] of one dtype");
  const int64_t rows = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  require(static_cast<int64_t>(sizes.size()) == weight.size(0) && rows <= x.size(0), "grouped_linear: ", sizes.size(), " groups of ", rows, " rows for ",
          weight.size(0), " weights and ", x.size(0), " rows");
  return GroupedLinear::apply(x, weight, sizes, fp8);
}

at::Tensor grouped_input_gradient(const at::Tensor& dy, const at::Tensor& weight, const std::vector<int64_t>& sizes, const std::optional<Fp8Products>& fp8,
                                  at::ScalarType dtype) {
  if (!fp8 && multiplies_blocks(dy)) return multiply_groups(dy, weight, /*transposed=*/false, sizes);
  const at::Tensor dx = at::empty({dy.size(0), weight.size(2)}, fp8 ? dy.options().dtype(dtype) : dy.options());
  const Copies copies(dy, weight.size(2), fp8);
  const int64_t used = for_groups(sizes, [&](int64_t group, int64_t first, int64_t rows) {
    const at::Tensor to = dx.narrow(0, first, rows), from = dy.narrow(0, first, rows), by = weight.select(0, group);
    fp8 ? multiply(to, from, at::kFloat8_e5m2, by.t(), *fp8) : multiply(to, from, by, copies, Copies::Weight, Copies::Columns);
  });
  return zero_behind(dx, used);
}

at::Tensor grouped_weight_gradient(const at::Tensor& dy, const at::Tensor& x, const std::vector<int64_t>& sizes, const std::optional<Fp8Products>& fp8,
                                   at::ScalarType dtype) {
  if (!fp8 && multiplies_blocks(dy)) return multiply_within_groups(dy, x, sizes);
  const at::Tensor d_weight = at::empty({static_cast<int64_t>(sizes.size()), dy.size(1), x.size(1)}, fp8 ? dy.options().dtype(dtype) : dy.options());
  for (size_t group = 0; group < sizes.size(); ++group) {
    if (sizes[group] == 0) d_weight.select(0, static_cast<int64_t>(group)).zero_();
  }
  const Copies copies(dy, x.size(1), fp8);
  for_groups(sizes, [&](int64_t group, int64_t first, int64_t rows) {
    const at::Tensor to = d_weight.select(0, group), left = dy.narrow(0, first, rows), right = x.narrow(0, first, rows);
    if (!fp8) return multiply(to, left.t(), right, copies, Copies::Columns, Copies::Weight);
    to.copy_(fp8_product(in_tiles(left).t(), at::kFloat8_e5m2, in_tiles(right).t(), at::kFloat8_e4m3fn, fp8->out_dtype, fp8->scaling));
  });
  return d_weight;
}

}  // namespace tessera::kernels
