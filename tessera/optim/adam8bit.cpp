#include "tessera/optim/adam8bit.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/optim/element_runs.h"

// Scales come before what they scale: begin() finds the largest magnitudes of the new averages in each block that this rank holds a part of, ranks take the
// largest of theirs, and apply() makes the averages once more, updates, and keeps them in 8 bits. So a block that ends on another rank has the numbers that
// it has on one.

namespace tessera::optim {

namespace {

int64_t blocks_of(const Slice& whole) { return (whole.logical_numel() + kernels::kAdam8bitBlock - 1) / kernels::kAdam8bitBlock; }

/// The blocks that runs of elements lie in, in runs of their own, and where each run's first scale lies among those.
std::vector<Box> blocks_held(const std::vector<kernels::ElementRun>& elements, std::vector<kernels::QuantizedRun>& runs) {
  std::vector<std::pair<int64_t, int64_t>> intervals;
  for (const auto& run : elements) {
    const auto index = static_cast<int64_t>(run.first_index);
    intervals.emplace_back(index / kernels::kAdam8bitBlock, (index + run.count - 1) / kernels::kAdam8bitBlock + 1);
  }
  std::vector<std::pair<int64_t, int64_t>> sorted = intervals, held;
  std::sort(sorted.begin(), sorted.end());
  for (const auto& [begin, end] : sorted) {
    if (!held.empty() && begin <= held.back().second) {
      held.back().second = std::max(held.back().second, end);
    } else {
      held.emplace_back(begin, end);
    }
  }
  std::vector<Box> boxes;
  std::vector<int64_t> first;
  int64_t scales = 0;
  for (const auto& [begin, end] : held) {
    boxes.push_back({{begin}, {end - begin}});
    first.push_back(scales);
    scales += end - begin;
  }
  for (size_t r = 0; r < elements.size(); ++r) {
    const auto interval = std::upper_bound(held.begin(), held.end(), intervals[r].first, [](int64_t block, const auto& one) { return block < one.first; }) - 1;
    runs.push_back({elements[r], first[static_cast<size_t>(interval - held.begin())] + intervals[r].first - interval->first});
  }
  return boxes;
}

}  // namespace

Adam8bit::Adam8bit(std::vector<ParameterGroup> groups, AdamWOptions options, WholeModel model)
    : Optimizer(std::move(groups)),
      options_(options),
      model_(settled(std::move(model), parameters_, "adam8bit")),
      places_(model_.parameters, blocks_of),
      quantized_(parameters_.size()),
      exp_avg_(parameters_.size()),
      exp_avg_sq_(parameters_.size()) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, tensor, aliases] = parameters_[i];
    const Slice& slice = nn::slice_of(tensor);
    if (quantizes(name, slice.logical_numel(), model_)) {
      Quantized& mine = quantized_[i];
      mine.scales = {name, {blocks_of(slice)}, {}};
      mine.scales.boxes = blocks_held(element_runs(slice), mine.runs);
    }
    if (tensor.requires_grad()) hold(i);
  }
}

/// Only here it matters what a weight is: for a master that comes with its first update, as those of frozen weights and of paged state do, the weight stands.
void Adam8bit::hold(size_t index) {
  if (exp_avg_[index].defined() || quantized_[index].state.exp_avg.defined()) return;
  const at::Tensor& parameter = parameters_[index].tensor;
  require(parameter.scalar_type() == at::kFloat, "optim.name = adam8bit: '", parameters_[index].name, "' is ", parameter.scalar_type(),
          ", and it updates fp32; set precision.master = fp32 (in a program: precision::make_optimizer), or keep it in fp32");
  if (!is_quantized(index)) {
    exp_avg_[index] = zeros_like_parameter(index);
    exp_avg_sq_[index] = zeros_like_parameter(index);
    return;
  }
  auto& [state, runs, scales] = quantized_[index];
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Optimizer);
  const auto make = [&](at::IntArrayRef sizes, at::ScalarType dtype) { return at::zeros(sizes, parameter.options().dtype(dtype).requires_grad(false)); };
  state = {.exp_avg = make(parameter.sizes(), at::kByte),  // of scale 0: nothing, whatever the code
           .exp_avg_sq = make(parameter.sizes(), at::kByte),
           .exp_avg_scale = make({scales.numel()}, at::kFloat),
           .exp_avg_sq_scale = make({scales.numel()}, at::kFloat)};
}

std::vector<StateTensor> Adam8bit::state() const {
  std::vector<StateTensor> state;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, tensor, aliases] = parameters_[i];
    const Slice& slice = nn::slice_of(tensor);
    const auto& [quantized, runs, scales] = quantized_[i];
    if (exp_avg_[i].defined()) {
      state.push_back({name, "exp_avg", exp_avg_[i], slice});
      state.push_back({name, "exp_avg_sq", exp_avg_sq_[i], slice});
    } else if (quantized.exp_avg.defined()) {
      state.push_back({name, "exp_avg", quantized.exp_avg, slice});
      state.push_back({name, "exp_avg_sq", quantized.exp_avg_sq, slice});
      state.push_back({name, "exp_avg_scale", quantized.exp_avg_scale, scales});
      state.push_back({name, "exp_avg_sq_scale", quantized.exp_avg_sq_scale, scales});
    }
  }
  return state;
}

kernels::Adam8bitStep Adam8bit::step_of(const Batch& batch, int64_t update) const {
  return {.lr = batch.lr, .beta1 = options_.beta1, .beta2 = options_.beta2, .eps = options_.eps, .weight_decay = batch.weight_decay, .step = update};
}

void Adam8bit::prepare(const std::vector<Batch>& batches) {
  const at::Device device = parameters_.empty() ? at::Device(at::kCPU) : parameters_.front().tensor.device();
  // One tensor for all blocks of the model, whichever of them are held here: what ranks meet over has to be of one form.
  std::vector<at::Tensor> all;
  if (model_.meets()) all = at::zeros({2, places_.size()}, at::TensorOptions(device).dtype(at::kFloat)).unbind();
  fresh_.assign(parameters_.size(), {});
  for (const Batch& batch : batches) {
    for (size_t k = 0; k < batch.indices.size(); ++k) {
      const size_t index = batch.indices[k];
      if (!is_quantized(index)) continue;
      const auto& [state, runs, scales] = quantized_[index];
      const int64_t blocks = scales.shape[0];
      for (size_t kind = 0; kind < 2; ++kind) {
        fresh_[index][kind] = model_.meets() ? all[kind].narrow(0, places_.of(scales.name), blocks) : at::zeros({blocks}, state.exp_avg_scale.options());
      }
      kernels::adam8bit_scales(batch.gradients[k].to(at::kFloat), state, runs, step_of(batch, counts_[index] + 1), fresh_[index][0], fresh_[index][1]);
    }
  }
  for (const at::Tensor& scales : all) model_.meet(scales, Meeting::Max);
}

void Adam8bit::update(const Batch& batch) {
  std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
  for (size_t k = 0; k < batch.indices.size(); ++k) {
    const size_t index = batch.indices[k];
    const at::Tensor gradient = batch.gradients[k].to(at::kFloat);  // a wrapper may have sent it in 16 bits
    if (is_quantized(index)) {
      const auto& [state, runs, scales] = quantized_[index];
      auto& [average, square] = fresh_[index];
      invariant(average.defined(), "adam8bit: '", parameters_[index].name, "' has a gradient that it had not when the step began");
      kernels::adam8bit_update_(batch.parameters[k], gradient, state, runs, step_of(batch, counts_[index]), average, square);
      fresh_[index] = {};
      continue;
    }
    parameters.push_back(batch.parameters[k]);
    gradients.push_back(gradient);
    averages.push_back(exp_avg_[index]);
    squares.push_back(exp_avg_sq_[index]);
    steps.push_back(at::full({}, static_cast<double>(counts_[index]), parameters.back().options().requires_grad(false)));
  }
  if (parameters.empty()) return;
  at::_fused_adamw_(parameters, gradients, averages, squares, /*max_exp_avg_sqs=*/{}, steps, batch.lr, options_.beta1, options_.beta2, batch.weight_decay,
                    options_.eps, /*amsgrad=*/false, /*maximize=*/false);
}

}  // namespace tessera::optim
