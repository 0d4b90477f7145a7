#include "tessera/optim/clip.h"

#include <optional>

#include <ATen/Dispatch.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/resolve_conj.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/pieces.h"
#include "tessera/memory/on_host.h"

// A rank holds some rows of a parameter, and which ones depends on the layout. So a row is the unit: its sum of squares is made in an order that its length
// alone decides. Sums of rows then meet by rank, which is fast and depends on the cut in the last bits of fp64, or in one tree over the rows of the whole
// tensor, which does not. Nothing here is read on the host: the factor is a tensor, so that clipping costs no wait on a device.

namespace tessera::optim {
namespace {

/// Rows of a local tensor that lie one after the other both in memory and in the logical tensor.
struct RowRun {
  int64_t first_logical_row;
  int64_t first_element;  ///< of the local tensor's memory
  int64_t rows, columns;
};

int64_t logical_rows(const Slice& slice) { return slice.shape.empty() ? 1 : slice.shape[0]; }

std::vector<RowRun> row_runs(const Slice& slice) {
  std::vector<RowRun> runs;
  if (slice.numel() == 0) return runs;
  if (slice.shape.empty()) return {{0, 0, 1, 1}};
  if (slice.concat_dim() > 0) {  // boxes side by side: they share their rows
    const Box& box = slice.boxes.front();
    return {{box.offset[0], 0, box.size[0], slice.numel() / box.size[0]}};
  }
  int64_t element = 0;
  for (const Box& box : slice.boxes) {
    if (box.empty()) continue;
    runs.push_back({box.offset[0], element, box.size[0], box.numel() / box.size[0]});
    element += box.numel();
  }
  return runs;
}

int64_t num_rows(const std::vector<RowRun>& runs) {
  int64_t rows = 0;
  for (const auto& run : runs) rows += run.rows;
  return rows;
}

/// Eight sums side by side, then a tree over them: the order depends on the length alone, and the compiler may use vector registers.
template <class T>
double sum_of_squares(const T* x, int64_t n) {
  constexpr int64_t kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  }
  for (int64_t j = 0; i + j < n; ++j) lanes[j] += static_cast<double>(x[i + j]) * static_cast<double>(x[i + j]);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

/// The same order with the machine's widest registers: every step reads all gradients once for this, and with narrow ones the conversion to fp64 is slower
/// than memory.
double sum_of_squares(const float* x, int64_t n) { return kernels::cpu::loops().sum_of_squares(x, n); }

/// In fp64 of a cast of its own, a piece at a time: the reduction's own cast is of the whole gradient, and a dry run would not see it.
void sum_rows_on_device(const at::Tensor& gradient, const RowRun& run, const at::Tensor& out) {
  constexpr int64_t kPiece = int64_t{1} << 25;  // 268 MB
  if (run.columns > kPiece) {                   // parts of a row, whose length alone says where they end
    const int64_t whole = run.columns / kPiece, rest = run.columns % kPiece;
    for (int64_t row = 0; row < run.rows; ++row) {
      const at::Tensor parts = at::zeros({whole + 1}, out.options());
      const int64_t first = run.first_element + row * run.columns;
      sum_rows_on_device(gradient, {0, first, whole, kPiece}, parts.narrow(0, 0, whole));
      if (rest > 0) sum_rows_on_device(gradient, {0, first + whole * kPiece, 1, rest}, parts.narrow(0, whole, 1));
      out.select(0, row).copy_(parts.sum());
    }
    return;
  }
  kernels::in_pieces(run.rows, kPiece / run.columns, gradient.is_meta(), [&](int64_t begin, int64_t count) {
    const at::Tensor rows = gradient.view(-1).narrow(0, run.first_element + begin * run.columns, count * run.columns).view({count, run.columns});
    const at::Tensor wide = rows.to(at::kDouble);
    if (wide.is_meta()) return;
    at::Tensor sums = out.narrow(0, begin, count);
    at::linalg_vector_norm_out(sums, wide, 2, at::IntArrayRef{1}).square_();
  });
}

/// Writes the sum of squares of each row of one run to `out`, fp64 [rows].
void sum_rows(const at::Tensor& gradient, const RowRun& run, const at::Tensor& out) {
  if (gradient.is_meta() && is_on_host(gradient)) return;
  if (gradient.is_complex()) {
    return sum_rows(at::view_as_real(gradient.resolve_conj()).view(-1), {run.first_logical_row, 2 * run.first_element, run.rows, 2 * run.columns}, out);
  }
  if (!gradient.is_cpu()) {
    // The device's own reduction, whose order within a row is that device's: the norm agrees with the CPU's but for the last bits of fp64, and so does what is
    // clipped by it but where the factor, rounded to fp32, falls on the other side.
    return sum_rows_on_device(gradient, run, out);
  }
  double* const sums = out.data_ptr<double>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, gradient.scalar_type(), "sum_rows", [&] {
    const scalar_t* const data = gradient.const_data_ptr<scalar_t>() + run.first_element;
    constexpr int64_t kGrain = 1 << 15;
    parallel_for(0, run.rows, std::max<int64_t>(1, kGrain / run.columns), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) sums[row] = sum_of_squares(data + row * run.columns, run.columns);
    });
  });
}

/// The same where `out` may lie on another device than the gradient: of parameters some of which wait on the host.
void sum_rows_there(const at::Tensor& gradient, const RowRun& run, const at::Tensor& out) {
  if (gradient.device() == out.device()) return sum_rows(gradient, run, out);
  const at::Tensor here = at::empty({run.rows}, out.options().device(gradient.device()));
  sum_rows(gradient, run, here);
  out.copy_(here);
}

/// The sum of `rows`, fp64 [1], added up by pairs of neighbors, then pairs of pairs. Overwrites `rows`.
at::Tensor sum_tree(const at::Tensor& rows) {
  auto sum = at::empty({1}, rows.options());
  if (rows.is_meta() && is_on_host(rows)) return sum;
  if (!rows.is_cpu()) return sum.copy_(rows.sum().view({1}));  // on a device, too, the order depends on the length alone
  double* const x = rows.data_ptr<double>();
  int64_t n = rows.numel();
  if (n == 0) return sum.zero_();
  for (; n > 1; n = (n + 1) / 2) {
    for (int64_t i = 0; i < n / 2; ++i) x[i] = x[2 * i] + x[2 * i + 1];
    if (n % 2 == 1) x[n / 2] = x[n - 1];
  }
  *sum.data_ptr<double>() = x[0];
  return sum;
}

/// The group's sum of squares over all ranks, fp64 [1].
at::Tensor sum_of_group(const NormGroup& group, NormOrder order, const at::TensorOptions& options) {
  struct Term {
    at::Tensor gradient;
    std::vector<RowRun> runs;
    int64_t first_row;
  };
  std::vector<Term> terms;
  int64_t total_rows = 0;
  for (const auto& parameter : group.parameters) {
    const Slice& slice = nn::slice_of(parameter.tensor);
    Term term{parameter.tensor.grad(), row_runs(slice), total_rows};
    total_rows += order == NormOrder::FixedTree ? logical_rows(slice) : num_rows(term.runs);
    if (!term.gradient.defined()) continue;
    invariant(term.gradient.sizes() == at::IntArrayRef(slice.local_shape()), "the gradient of '", parameter.name, "' has shape ", term.gradient.sizes(),
              ", its slice ", at::IntArrayRef(slice.local_shape()));
    term.gradient = term.gradient.contiguous();
    terms.push_back(std::move(term));
  }

  at::Tensor rows = at::zeros({total_rows}, options);  // zero where another rank holds the row, or no gradient came
  for (const auto& term : terms) {
    int64_t local_row = 0, next_logical = 0;
    for (const auto& run : term.runs) {
      const int64_t row = term.first_row + (order == NormOrder::FixedTree ? run.first_logical_row : local_row);
      const at::Tensor sums = rows.narrow(0, row, run.rows);
      if (order == NormOrder::FixedTree && run.first_logical_row < next_logical) {  // a stretch of three dimensions: several boxes lie in one row
        const at::Tensor more = at::zeros({run.rows}, options);
        sum_rows_there(term.gradient, run, more);
        at::Tensor(sums).add_(more);
      } else {
        sum_rows_there(term.gradient, run, sums);
      }
      next_logical = run.first_logical_row + run.rows;
      local_row += run.rows;
    }
  }

  if (order == NormOrder::Fast) {
    at::Tensor sum = sum_tree(rows);
    if (group.reduce) group.reduce(sum);
    return sum;
  }
  if (group.reduce) group.reduce(rows);
  return sum_tree(rows);
}

/// fp64 on the device where the parameters live; where some of them wait on the host, on that of the others.
at::TensorOptions norm_options(const std::vector<NormGroup>& groups) {
  at::TensorOptions options(at::kDouble);
  for (const auto& group : groups) {
    for (const auto* parameters : {&group.parameters, &group.elsewhere}) {
      for (const auto& parameter : *parameters) {
        options = options.device(parameter.tensor.device());
        if (!parameter.tensor.is_cpu()) return options;
      }
    }
  }
  return options;
}

}  // namespace

at::Tensor global_norm(const std::vector<NormGroup>& groups, NormOrder order) {
  const c10::NoGradGuard no_grad;
  const auto options = norm_options(groups);
  auto total = at::zeros({1}, options);
  for (const auto& group : groups) total.add_(sum_of_group(group, order, options));
  return total.sqrt_().squeeze(0);
}

at::Tensor global_norm(const std::vector<nn::NamedParameter>& parameters) { return global_norm({NormGroup{parameters, {}}}); }

void clip_gradients(const std::vector<nn::NamedParameter>& parameters, const at::Tensor& norm, double max_norm) {
  const c10::NoGradGuard no_grad;
  scale_gradients(parameters, clip_factor(norm, max_norm));
}

void clip_gradients(const std::vector<NormGroup>& groups, const at::Tensor& norm, double max_norm) {
  for (const auto& group : groups) {
    clip_gradients(group.parameters, norm, max_norm);
    clip_gradients(group.elsewhere, norm, max_norm);
  }
}

at::Tensor clip_factor(const at::Tensor& norm, double max_norm) { return norm.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0); }

void scale_gradients(const std::vector<nn::NamedParameter>& parameters, const at::Tensor& factor) {
  const c10::NoGradGuard no_grad;
  if (!factor.is_cpu() && !factor.is_meta()) {  // of what waits on the host: its factor is read once
    std::vector<nn::NamedParameter> here, there;
    for (const auto& parameter : parameters) (parameter.tensor.grad().defined() && parameter.tensor.grad().is_cpu() ? here : there).push_back(parameter);
    if (!here.empty()) {
      scale_gradients(here, factor.cpu());
      return scale_gradients(there, factor);
    }
  }
  const at::Tensor whole = factor.to(at::kDouble), rounded = factor.to(at::kFloat);  // once, here: mul_ would convert it anew for every gradient
  if (whole.is_cpu() && *whole.const_data_ptr<double>() == 1.0) return;
  std::vector<at::Tensor> together;  // of an accelerator, for which many small multiplications cost more than the numbers in them
  for (const auto& parameter : parameters) {
    at::Tensor gradient = parameter.tensor.grad();
    if (!gradient.defined()) continue;
    if (gradient.scalar_type() == at::kFloat && !is_on_host(gradient)) {
      together.push_back(gradient);
    } else {
      gradient.mul_(c10::toRealValueType(gradient.scalar_type()) == at::kDouble ? whole : rounded);
    }
  }
  if (!together.empty()) at::_foreach_mul_(together, rounded);
}

}  // namespace tessera::optim
