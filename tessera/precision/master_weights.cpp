#include "tessera/precision/master_weights.h"

#include <utility>

#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/precision/stochastic_rounding.h"

// The optimizer inside knows nothing of 16 bits: it is handed masters as its parameters, and a gradient each. All gradients in fp32 at once would be a second
// set of masters; instead its step is called several times, with the gradients of a few parameters each and none for the others, which it leaves alone. That is
// the same update, since it goes element by element and counts updates for each parameter.

namespace tessera::precision {

MasterWeights::MasterWeights(std::vector<optim::ParameterGroup> groups, const Build& build) : Optimizer(std::move(groups)) {
  const c10::NoGradGuard no_grad;
  const MemoryScope scope(MemoryCategory::Optimizer);
  for (const auto& weight : parameters_) {
    const at::Tensor master = at::empty_like(weight.tensor, weight.tensor.options().dtype(at::kFloat).requires_grad(false));
    master.copy_(weight.tensor);
    master.set_requires_grad(weight.tensor.requires_grad());  // what says whether the optimizer inside keeps state of it from the start
    nn::set_slice(master, nn::slice_of(weight.tensor));
    masters_.push_back({weight.name, master, weight.aliases});
  }
  inner_ = build(masters_);
}

std::vector<optim::StateTensor> MasterWeights::state() const {
  auto state = inner_->state();
  for (const auto& master : masters_) state.push_back({master.name, "master", master.tensor.detach(), nn::slice_of(master.tensor)});
  return state;
}

/// One past the last of the batch's parameters whose copied gradients fit the staging, from `begin` on.
size_t MasterWeights::staged_end(const Batch& batch, size_t begin) const {
  int64_t bytes = 0;
  size_t end = begin;
  for (; end < batch.indices.size(); ++end) {
    const at::Tensor& gradient = batch.gradients[end];
    if (gradient.scalar_type() != at::kFloat) bytes += gradient.numel() * static_cast<int64_t>(sizeof(float));
    if (end > begin && bytes > kStagingBytes) break;
  }
  return end;
}

void MasterWeights::update(const Batch& batch, double lr) {
  for (size_t begin = 0; begin < batch.indices.size();) {
    const size_t end = staged_end(batch, begin);
    {
      const MemoryScope staging(MemoryCategory::Other);
      for (size_t i = begin; i < end; ++i) masters_[batch.indices[i]].tensor.mutable_grad() = batch.gradients[i].to(at::kFloat);
    }
    inner_->step(lr, batch.skip);  // parameters without a gradient, all others, are left alone
    for (size_t i = begin; i < end; ++i) {
      const at::Tensor& master = masters_[batch.indices[i]].tensor;
      batch.parameters[i].copy_(master);
      master.mutable_grad() = at::Tensor();
    }
    begin = end;
  }
}

void MasterWeights::counts_changed() { inner_->set_update_counts(update_counts()); }

std::unique_ptr<optim::Optimizer> make_optimizer(const OptimConfig& config, const Policy& policy, uint64_t seed,
                                                 const std::vector<nn::NamedParameter>& parameters) {
  if (policy.rounds_stochastically()) return make_stochastic_rounding(config, seed, parameters);
  if (!policy.has_masters()) return optim::make_optimizer(config, parameters);
  return std::make_unique<MasterWeights>(optim::decay_groups(parameters, config.decay_on, config.weight_decay),
                                         [&](const std::vector<nn::NamedParameter>& masters) { return optim::make_optimizer(config, masters); });
}

}  // namespace tessera::precision
