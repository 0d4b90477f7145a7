#include "tessera/optim/muon.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include <ATen/ops/addmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "tessera/core/error.h"
#include "tessera/core/events.h"

// Matrices are sorted by size and dealt one to each rank in turn, so that ranks which stand in one round have matrices of about one size, to send as to
// multiply. Each rank writes what it has of every matrix of a round where the matrix's rank will find it, zeros elsewhere; a sum puts the matrices together
// without a word of who holds what. That all ranks deal alike follows from WholeModel::parameters, which are the same on all of them; which of these are frozen
// each asks its own model, for of one that is updated elsewhere it has no gradient to tell it by.

namespace tessera::optim {

namespace {

constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;  // Keller Jordan's, which lift small singular values fastest
constexpr double kLeastNorm = 1e-7;

}  // namespace

at::Tensor orthogonal(const at::Tensor& matrix, int steps) {
  const bool tall = matrix.size(0) > matrix.size(1);
  const BesidePasses update;
  at::Tensor x = matrix.div(matrix.square().sum().sqrt_().clamp_min_(kLeastNorm));  // no singular value above 1
  for (int step = 0; step < steps; ++step) {
    // On the smaller side, and never on a transposed x, which libtorch's kernels copy through memory that no plan knows of.
    const at::Tensor gram = tall ? at::mm(x.t(), x) : at::mm(x, x.t());
    const at::Tensor odd = at::addmm(gram, gram, gram, kB, kC);
    x = tall ? at::addmm(x, x, odd, kA, 1) : at::addmm(x, odd, x, kA, 1);
  }
  return x;
}

Muon::Muon(std::vector<ParameterGroup> groups, MuonOptions options, WholeModel model)
    : Optimizer(std::move(groups)),
      options_(options),
      model_(settled(std::move(model), parameters_, "muon")),
      frozen_(model_.frozen),
      momentum_buffer_(zeros_like_parameters()) {
  for (size_t i = 0; i < parameters_.size(); ++i) index_of_[parameters_[i].name] = i;
  for (const Slice& whole : model_.parameters) {
    require(whole.shape.size() == 2, "optim.name = muon: '", whole.name, "' has ", whole.shape.size(),
            " dimensions, and it is for matrices; update it by adamw");
    require(whole.shape[0] % matrices_in(whole.name) == 0, "optim.name = muon: the ", whole.shape[0], " rows of '", whole.name, "' are not ",
            matrices_in(whole.name), " matrices of as many rows");
  }
  rounds_ = deal_rounds();
}

int64_t Muon::matrices_in(const std::string& parameter) const {
  const auto found = model_.stacks.find(parameter);
  return found == model_.stacks.end() ? 1 : found->second;
}

std::vector<Muon::Round> Muon::deal_rounds() const {
  std::set<std::string> frozen;
  for (const auto& parameter : frozen_) frozen.insert(parameter.name);
  std::vector<Matrix> matrices;
  for (const Slice& whole : model_.parameters) {
    if (frozen.contains(whole.name)) continue;
    const int64_t count = matrices_in(whole.name), rows = whole.shape[0] / count;
    for (int64_t i = 0; i < count && whole.logical_numel() > 0; ++i) matrices.push_back({whole.name, i * rows, rows, whole.shape[1]});
  }
  std::ranges::stable_sort(matrices, [](const Matrix& a, const Matrix& b) { return a.numel() > b.numel(); });
  const int64_t ranks = model_.ranks.size(), most = options_.round_bytes / static_cast<int64_t>(sizeof(float));
  std::vector<Round> rounds;
  for (int64_t begin = 0; begin < std::ssize(matrices); begin += ranks) {
    const int64_t size = matrices[static_cast<size_t>(begin)].numel();  // the largest of those that are dealt together
    if (rounds.empty() || rounds.back().length + size > most) rounds.emplace_back();
    for (int64_t i = begin; i < std::min(begin + ranks, std::ssize(matrices)); ++i) {
      rounds.back().matrices.push_back({matrices[static_cast<size_t>(i)], i - begin, rounds.back().length});
    }
    rounds.back().length += size;
  }
  return rounds;
}

bool Muon::has_direction(const std::string& parameter) const {
  const auto found = index_of_.find(parameter);
  return found != index_of_.end() && direction_[found->second].defined();
}

void Muon::take_in_unfrozen() {
  const size_t unfrozen = std::erase_if(frozen_, [&](const nn::NamedParameter& parameter) {
    if (parameter.tensor.requires_grad()) return true;
    const bool updated = has_direction(parameter.name);
    require(
        !updated || !model_.meets(), "optim.name = muon: '", parameter.name,
        "' has a gradient and requires none, and other ranks, which hold parts of it, would leave it out; let it require one until the step is made, or clear "
        "its gradient");
    return updated;
  });
  if (unfrozen > 0) rounds_ = deal_rounds();
}

void Muon::meet_nobody() {
  model_.ranks = {};
  rounds_ = deal_rounds();
}

void Muon::exchange(const Matrix& matrix, const at::Tensor& whole, bool out) const {
  if (!has_direction(matrix.parameter)) return;
  if (out && model_.meets() && model_.held_elsewhere.contains(matrix.parameter)) return;  // what several ranks hold alike is one rank's to add
  const size_t index = index_of_.at(matrix.parameter);
  const Slice& slice = nn::slice_of(parameters_[index].tensor);
  for (size_t b = 0; b < slice.boxes.size(); ++b) {
    const Box& box = slice.boxes[b];
    const Box shared = intersect(box, {{matrix.first, 0}, {matrix.rows, matrix.columns}});
    if (shared.empty()) continue;
    at::Tensor here = box_of(direction_[index], slice, b).narrow(0, shared.offset[0] - box.offset[0], shared.size[0]);
    at::Tensor there = whole.narrow(0, shared.offset[0] - matrix.first, shared.size[0]).narrow(1, shared.offset[1], shared.size[1]);
    out ? there.copy_(here) : here.copy_(there);
  }
}

void Muon::prepare(const std::vector<Batch>& batches) {
  direction_.assign(parameters_.size(), {});
  const double fresh = 1 - options_.momentum;
  for (const Batch& batch : batches) {
    for (size_t k = 0; k < batch.indices.size(); ++k) {
      const at::Tensor& average = momentum_buffer_[batch.indices[k]];
      const at::Tensor gradient = batch.gradients[k].to(average.scalar_type());
      average.lerp_(gradient, fresh);
      direction_[batch.indices[k]] = gradient.lerp(average, options_.momentum).to(at::kFloat);
    }
  }
  take_in_unfrozen();
  const at::Device device = parameters_.empty() ? model_.device.value_or(at::kCPU) : parameters_.front().tensor.device();
  const auto numbers = at::TensorOptions(device).dtype(at::kFloat);
  // A rank alone knows what has no gradient.
  const auto is_idle = [&](const Placed& placed) { return !model_.meets() && !has_direction(placed.matrix.parameter); };
  for (const Round& round : rounds_) {
    if (std::ranges::all_of(round.matrices, is_idle)) continue;
    const at::Tensor all = at::zeros({model_.ranks.size(), round.length}, numbers);
    const at::Tensor mine = model_.meets() ? at::empty({round.length}, numbers) : all[0];
    const auto at_place = [](const at::Tensor& row, const Placed& placed) {
      return row.narrow(0, placed.offset, placed.matrix.numel()).view({placed.matrix.rows, placed.matrix.columns});
    };
    for (const Placed& placed : round.matrices) exchange(placed.matrix, at_place(all[placed.rank], placed), /*out=*/true);
    if (model_.meets()) model_.collect(all, mine);
    for (const Placed& placed : round.matrices) {
      if (placed.rank == model_.ranks.rank() && !is_idle(placed)) at_place(mine, placed).copy_(orthogonal(at_place(mine, placed), options_.steps));
    }
    if (model_.meets()) model_.spread(mine, all);
    for (const Placed& placed : round.matrices) exchange(placed.matrix, at_place(all[placed.rank], placed), /*out=*/false);
  }
}

void Muon::update(const Batch& batch) {
  for (size_t k = 0; k < batch.indices.size(); ++k) {
    const size_t index = batch.indices[k];
    at::Tensor direction = std::exchange(direction_[index], {});
    invariant(direction.defined(), "muon: '", parameters_[index].name, "' has a gradient that it had not when the step began");
    const auto& shape = nn::slice_of(parameters_[index].tensor).shape;
    const auto larger = static_cast<double>(std::max(shape[0] / matrices_in(parameters_[index].name), shape[1]));
    const at::Tensor parameter = batch.parameters[k].detach();  // which in a forward of the plain loop would be a use of it
    parameter.mul_(1 - batch.lr * batch.weight_decay).sub_(direction.mul_(batch.lr * 0.2 * std::sqrt(larger)));
  }
}

void Muon::hold(size_t index) {
  if (!momentum_buffer_[index].defined()) momentum_buffer_[index] = zeros_like_parameter(index);
}

}  // namespace tessera::optim
