#include "tessera/optim/adamw.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/zeros.h>

#include "tessera/memory/memory.h"
#include "tessera/memory/on_host.h"

// libtorch's fused operator, so that whoever watches operators knows the update by its name: one pass over all tensors of a batch. Update counts are one tensor
// and its views, since parameters may begin at different steps and the operator wants a count for each.

namespace tessera::optim {

AdamW::AdamW(std::vector<ParameterGroup> groups, AdamWOptions options)
    : Optimizer(std::move(groups)), options_(options), exp_avg_(zeros_like_parameters()), exp_avg_sq_(zeros_like_parameters()) {
  if (parameters_.empty()) return;
  const MemoryScope scope(MemoryCategory::Optimizer);
  steps_ = at::zeros({static_cast<int64_t>(parameters_.size())}, parameters_.front().tensor.options().dtype(at::kFloat));
  step_views_ = steps_.unbind();
}

std::vector<StateTensor> AdamW::state() const {
  auto state = named_state("exp_avg", exp_avg_);
  auto squares = named_state("exp_avg_sq", exp_avg_sq_);
  std::move(squares.begin(), squares.end(), std::back_inserter(state));
  return state;
}

std::pair<std::vector<at::Tensor>, kernels::UpdatesByElement::Besides> AdamW::in_one_pass(const Batch& batch) {
  const auto is_known = [](const at::Tensor& p) { return is_on_host(p) && (p.scalar_type() == at::kFloat || p.scalar_type() == at::kDouble); };
  if (!std::ranges::all_of(batch.parameters, is_known)) {
    for (const at::Tensor& gradient : batch.gradients) {
      if (batch.gradient_scale != 1) gradient.mul_(batch.gradient_scale);
    }
    return {batch.gradients_as_parameters(), {}};
  }
  std::vector<at::Tensor> gradients = batch.gradients;
  for (size_t k = 0; k < gradients.size(); ++k) {
    const at::ScalarType type = batch.parameters[k].scalar_type(), of_gradient = gradients[k].scalar_type();
    const bool is_read_narrow = type == at::kFloat && (of_gradient == at::kBFloat16 || of_gradient == at::kHalf);
    if (!is_read_narrow) gradients[k] = gradients[k].to(type);
  }
  return {std::move(gradients), {.gradient_scale = batch.gradient_scale, .copies = batch.rounded.empty() ? nullptr : &batch.rounded}};
}

void AdamW::update(const Batch& batch) {
  std::vector<at::Tensor> averages, squares, steps;
  for (const size_t i : batch.indices) {
    averages.push_back(exp_avg_[i]);
    squares.push_back(exp_avg_sq_[i]);
    steps.push_back(step_views_[i]);
  }
  const auto [gradients, besides] = in_one_pass(batch);
  const kernels::UpdatesByElement by_element(besides);
  const auto skip = batch.skip.defined() ? std::optional(batch.skip) : std::nullopt;
  at::_foreach_add_(steps, 1);
  at::_fused_adamw_(batch.parameters, gradients, averages, squares, /*max_exp_avg_sqs=*/{}, steps, batch.lr, options_.beta1, options_.beta2, batch.weight_decay,
                    options_.eps, /*amsgrad=*/false, /*maximize=*/false, /*grad_scale=*/{}, skip);
  count_writes(batch.parameters);
  if (skip) at::_foreach_sub_(steps, std::vector<at::Tensor>(steps.size(), skip->squeeze(0)));  // the operator left all else alone
}

void AdamW::hold(size_t index) {
  if (exp_avg_[index].defined()) return;
  exp_avg_[index] = zeros_like_parameter(index);
  exp_avg_sq_[index] = zeros_like_parameter(index);
}

void AdamW::counts_changed() {
  for (size_t i = 0; i < counts_.size(); ++i) step_views_[i].fill_(static_cast<double>(counts_[i]));
}

}  // namespace tessera::optim
