#include "tessera/optim/rounded.h"

#include <string>
#include <utility>

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "tessera/config/optim_groups.h"
#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/kernels/stochastic_update.h"
#include "tessera/memory/memory.h"
#include "tessera/optim/element_runs.h"

// The random number that rounds an element belongs to the element, not to the rank or the loop that happens to update it: it is drawn from the element's
// logical index. A loop over a rank's memory therefore goes by stretches that are consecutive in memory and in the logical tensor at once. The number of the
// update is in the generator's name, so a resumed run draws what it would have drawn.

namespace tessera::optim {

namespace {

using kernels::ElementRun;

/// What the optimizers share: tensors of state by name, the runs of each parameter, and its random numbers of each update.
class Rounded final : public Optimizer {
 public:
  Rounded(std::vector<ParameterGroup> groups, OptimConfig settings, std::vector<std::string> kept, uint64_t seed)
      : Optimizer(std::move(groups)), settings_(std::move(settings)), kept_(std::move(kept)), seed_(seed), state_(kept_.size()) {
    for (auto& tensors : state_) tensors.resize(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto& [name, tensor, aliases] = parameters_[i];
      runs_.push_back(element_runs(nn::slice_of(tensor)));
      if (tensor.requires_grad()) hold(i);
    }
  }

  std::string kind() const override { return settings_.name; }

  std::vector<StateTensor> state() const override {
    std::vector<StateTensor> all;
    for (size_t s = 0; s < kept_.size(); ++s) {
      for (auto& tensor : named_state(kept_[s], state_[s])) all.push_back(std::move(tensor));
    }
    return all;
  }

 private:
  void update(const Batch& batch) override {
    for (size_t k = 0; k < batch.indices.size(); ++k) {
      const size_t index = batch.indices[k];
      const CounterRng rng(seed_, detail::concat("stochastic rounding ", counts_[index], " ", parameters_[index].name));
      for (const auto& run : runs_[index]) update(batch, k, run, rng);
    }
  }

  void update(const Batch& batch, size_t k, const ElementRun& run, const CounterRng& rng) const {
    const at::Tensor &parameter = batch.parameters[k], &gradient = batch.gradients[k];
    const size_t index = batch.indices[k];
    const auto [beta1, beta2] = settings_.betas;
    if (settings_.name == "adamw") {
      const kernels::StochasticAdamW step{
          .lr = batch.lr, .beta1 = beta1, .beta2 = beta2, .eps = settings_.eps, .weight_decay = batch.weight_decay, .step = counts_[index]};
      kernels::stochastic_adamw_(parameter, gradient, state_[0][index], state_[1][index], run, step, rng);
    } else if (settings_.name == "lion") {
      const kernels::LionStep step{.lr = batch.lr, .beta1 = beta1, .beta2 = beta2, .weight_decay = batch.weight_decay};
      kernels::stochastic_lion_(parameter, gradient, state_[0][index], run, step, rng);
    } else {
      const kernels::StochasticSgd step{.lr = batch.lr, .momentum = momentum_of(settings_), .weight_decay = batch.weight_decay};
      kernels::stochastic_sgd_(parameter, gradient, kept_.empty() ? at::Tensor() : state_[0][index], run, step, rng);
    }
  }

  bool by_rows() const override { return true; }
  bool writes_memory() const override { return true; }

  /// Only here it matters what a weight is: for a master that comes with its first update, as those of frozen weights and of paged state do, the weight stands.
  void hold(size_t index) override {
    const c10::NoGradGuard no_grad;
    const MemoryScope scope(MemoryCategory::Optimizer);
    const at::Tensor& parameter = parameters_[index].tensor;
    require(parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kFloat, "stochastic rounding: '", parameters_[index].name, "' is ",
            parameter.scalar_type(), ", and state in bf16 is for weights in bf16 or fp32; set optim.state_dtype = fp32");
    for (auto& tensors : state_) {
      if (tensors[index].defined()) continue;
      tensors[index] = at::zeros(parameter.sizes(), parameter.options().dtype(at::kBFloat16).requires_grad(false));
    }
  }

  OptimConfig settings_;
  std::vector<std::string> kept_;  ///< names of the tensors of state
  uint64_t seed_;
  std::vector<std::vector<at::Tensor>> state_;  ///< of each of kept_, of each of parameters_
  std::vector<std::vector<ElementRun>> runs_;   ///< of each of parameters_
};

}  // namespace

std::unique_ptr<Optimizer> make_rounded(const OptimConfig& settings, std::vector<ParameterGroup> groups, uint64_t seed) {
  std::vector<std::string> kept;
  if (settings.name == "adamw") {
    kept = {"exp_avg", "exp_avg_sq"};
  } else if (settings.name == "lion") {
    kept = {"exp_avg"};
  } else {
    require(settings.name == "sgd", "optim.name = ", settings.name,
            " has no update with stochastic rounding; set optim.name = adamw, lion or sgd, or optim.state_dtype and precision.master to fp32");
    if (momentum_of(settings) != 0) kept = {"momentum_buffer"};
  }
  return std::make_unique<Rounded>(std::move(groups), settings, std::move(kept), seed);
}

}  // namespace tessera::optim
