#include "tessera/optim/adafactor.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

#include <ATen/ops/zeros.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

// A rank adds up the squares of its elements into the sums of all rows and columns of the logical matrix, at their places, whatever boxes it holds; ranks add
// those up; and each then has all of them. The sums are fp64, so that neither the cut nor the number of ranks shows in more than the last bits of fp32. What
// clips an update, its root mean square, is known when all ranks have theirs: so the direction is made twice, once to measure it.

namespace tessera::optim {

namespace {

constexpr double kDecay = -0.8;

/// The logical shape of the sums over dimension `dim` (-1: of rows, -2: of columns).
std::vector<int64_t> sums_shape(std::vector<int64_t> shape, int dim) {
  shape[shape.size() + static_cast<size_t>(dim)] = 1;
  return shape;
}

int64_t numel_of(const std::vector<int64_t>& shape) { return Slice::whole("", shape).logical_numel(); }

int64_t numbers_of(const Slice& whole) {
  if (whole.shape.size() < 2) return 1;
  return numel_of(sums_shape(whole.shape, -1)) + numel_of(sums_shape(whole.shape, -2)) + 1;
}

/// Of a tensor like the parameter, but for `dim`, over which it is one: the part that lies beside `box`.
at::Tensor beside(const at::Tensor& sums, const Box& box, int dim) {
  at::Tensor part = sums;
  const auto dims = static_cast<int64_t>(box.size.size());
  for (int64_t d = 0; d < dims; ++d) {
    if (d != dims + dim) part = part.narrow(d, box.offset[static_cast<size_t>(d)], box.size[static_cast<size_t>(d)]);
  }
  return part;
}

/// In fp64, by a cast of its own: a sum in another dtype makes one as well, which a dry run would not see.
at::Tensor squares_of(const at::Tensor& x) { return x.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true).square_(); }

}  // namespace

Adafactor::Adafactor(std::vector<ParameterGroup> groups, AdafactorOptions options, WholeModel model)
    : Optimizer(std::move(groups)),
      options_(options),
      model_(settled(std::move(model), parameters_, "adafactor")),
      sums_(model_.parameters, numbers_of),
      scalars_(model_.parameters, [](const Slice&) { return 1; }),
      row_var_(parameters_.size()),
      col_var_(parameters_.size()),
      variance_(parameters_.size()),
      exp_avg_(parameters_.size()) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].tensor.requires_grad()) hold(i);
  }
}

void Adafactor::hold(size_t index) {
  if (options_.momentum != 0 && !exp_avg_[index].defined()) exp_avg_[index] = zeros_like_parameter(index);
  if (!is_factored(index)) {
    if (!variance_[index].defined()) variance_[index] = zeros_like_parameter(index);
    return;
  }
  if (row_var_[index].defined()) return;
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Optimizer);
  const auto options = at::TensorOptions(parameters_[index].tensor.device()).dtype(at::kFloat);
  row_var_[index] = at::zeros(held(index, -1).local_shape(), options);
  col_var_[index] = at::zeros(held(index, -2).local_shape(), options);
}

std::vector<StateTensor> Adafactor::state() const {
  auto state = named_state("exp_avg", exp_avg_);
  auto variances = named_state("variance", variance_);
  std::move(variances.begin(), variances.end(), std::back_inserter(state));
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!row_var_[i].defined()) continue;
    state.push_back({parameters_[i].name, "row_var", row_var_[i], held(i, -1)});
    state.push_back({parameters_[i].name, "col_var", col_var_[i], held(i, -2)});
  }
  return state;
}

Slice Adafactor::held(size_t index, int dim) const {
  Slice sums = Slice::whole(parameters_[index].name, sums_shape(slice(index).shape, dim));
  if (slice(index).numel() == 0 && slice(index).logical_numel() > 0) sums.boxes.clear();
  return sums;
}

double Adafactor::share_of_new(size_t index) const { return std::pow(static_cast<double>(counts_[index] + 1), kDecay); }

void Adafactor::add_squares(size_t index, const at::Tensor& gradient, const at::Tensor& sums) const {
  const auto first = [&](int64_t begin, const std::vector<int64_t>& shape) { return sums.narrow(0, begin, numel_of(shape)).view(shape); };
  sums.narrow(0, sums.numel() - 1, 1).add_(squares_of(parameters_[index].tensor.detach()).sum());
  if (!is_factored(index)) return;
  const auto rows = sums_shape(slice(index).shape, -1), columns = sums_shape(slice(index).shape, -2);
  for (size_t b = 0; b < slice(index).boxes.size(); ++b) {
    const at::Tensor squares = squares_of(box_of(gradient, slice(index), b));
    for (const int dim : {-1, -2}) {
      const at::Tensor all = dim == -1 ? first(0, rows) : first(numel_of(rows), columns);
      beside(all, slice(index).boxes[b], dim).add_(squares.sum(at::IntArrayRef{dim}, /*keepdim=*/true));
    }
  }
}

void Adafactor::take_squares(size_t index, const at::Tensor& gradient, const at::Tensor& sums) {
  const double share = share_of_new(index);
  if (!is_factored(index)) {
    const at::Tensor wide = gradient.to(variance_[index].scalar_type());
    variance_[index].lerp_(wide.square(), share);
    return;
  }
  const auto& shape = slice(index).shape;
  int64_t begin = 0;
  for (const int dim : {-1, -2}) {
    const auto sums_of = sums_shape(shape, dim);
    const at::Tensor mean = sums.narrow(0, begin, numel_of(sums_of)).view(sums_of).div(static_cast<double>(shape[shape.size() + static_cast<size_t>(dim)]));
    (dim == -1 ? row_var_ : col_var_)[index].lerp_(mean.to(at::kFloat), share);
    begin += numel_of(sums_of);
  }
}

at::Tensor Adafactor::direction(size_t index, size_t box, const at::Tensor& gradient) const {
  const Box& place = slice(index).boxes[box];
  at::Tensor estimate;
  if (is_factored(index)) {
    const at::Tensor mean = row_var_[index].mean(/*dim=*/-2, /*keepdim=*/true).clamp_min_(options_.eps);
    estimate = beside(row_var_[index].div(mean), place, -1).mul(beside(col_var_[index], place, -2));
  } else {
    estimate = box_of(variance_[index], slice(index), box).clone();
  }
  return estimate.clamp_min_(options_.eps * options_.eps).rsqrt_().mul_(box_of(gradient, slice(index), box));
}

void Adafactor::prepare(const std::vector<Batch>& batches) {
  if (parameters_.empty() && !model_.meets()) return;
  const at::Device device = parameters_.empty() ? at::Device(at::kCPU) : parameters_.front().tensor.device();
  const auto numbers = at::TensorOptions(device).dtype(at::kDouble);
  const auto for_each = [&](const auto& visit) {
    for (const Batch& batch : batches) {
      for (size_t k = 0; k < batch.indices.size(); ++k) {
        if (slice(batch.indices[k]).numel() > 0) visit(batch.indices[k], batch.gradients[k]);
      }
    }
  };
  // What several ranks hold alike is one rank's to add.
  const auto counts = [&](size_t index) { return !model_.meets() || !model_.held_elsewhere.contains(parameters_[index].name); };
  const auto of = [&](const at::Tensor& all, const Places& places, size_t index, int64_t count) {
    return all.narrow(0, places.of(parameters_[index].name), count);
  };
  const auto sums_of = [&](const at::Tensor& all, size_t index) { return of(all, sums_, index, numbers_of(Slice::whole("", slice(index).shape))); };

  const at::Tensor sums = at::zeros({sums_.size()}, numbers);
  for_each([&](size_t index, const at::Tensor& gradient) {
    if (counts(index)) add_squares(index, gradient, sums_of(sums, index));
  });
  if (model_.meets()) model_.meet(sums, Meeting::Sum);

  size_ = at::zeros({scalars_.size()}, numbers);
  excess_ = at::zeros({scalars_.size()}, numbers);
  for_each([&](size_t index, const at::Tensor& gradient) {
    const at::Tensor mine = sums_of(sums, index);
    take_squares(index, gradient, mine);
    const auto elements = static_cast<double>(slice(index).logical_numel());
    of(size_, scalars_, index, 1).copy_(mine.narrow(0, mine.numel() - 1, 1).div(elements).sqrt_().clamp_min_(options_.least_scale));
    if (!counts(index)) return;
    for (size_t b = 0; b < slice(index).boxes.size(); ++b) of(excess_, scalars_, index, 1).add_(squares_of(direction(index, b, gradient)).sum().div_(elements));
  });
  if (model_.meets()) model_.meet(excess_, Meeting::Sum);
  excess_.sqrt_().clamp_min_(1);
}

void Adafactor::update(const Batch& batch) {
  for (size_t k = 0; k < batch.indices.size(); ++k) {
    const size_t index = batch.indices[k];
    if (slice(index).numel() == 0) continue;
    const int64_t place = scalars_.of(parameters_[index].name);
    const double share = std::min(batch.lr, 1 / std::sqrt(static_cast<double>(counts_[index])));
    const at::Tensor step = size_[place].mul(share).to(at::kFloat), less = excess_[place].reciprocal().to(at::kFloat);
    const at::Tensor parameter = batch.parameters[k].detach();  // which in a forward of the plain loop would be a use of it
    if (batch.weight_decay != 0) parameter.mul_(1 - batch.lr * batch.weight_decay);
    for (size_t b = 0; b < slice(index).boxes.size(); ++b) {
      at::Tensor moved = direction(index, b, batch.gradients[k]).mul_(less);
      if (exp_avg_[index].defined()) {
        at::Tensor average = box_of(exp_avg_[index], slice(index), b);
        moved = average.mul_(options_.momentum).add_(moved, 1 - options_.momentum);
      }
      box_of(parameter, slice(index), b).sub_(moved.mul(step));
    }
  }
}

}  // namespace tessera::optim
