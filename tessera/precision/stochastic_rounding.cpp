#include "tessera/precision/stochastic_rounding.h"

#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/kernels/stochastic_update.h"
#include "tessera/optim/element_runs.h"

// The random number that rounds an element belongs to the element, not to the rank or the loop that happens to update it: it is drawn from the element's
// logical index. A loop over a rank's memory therefore goes by stretches that are consecutive in memory and in the logical tensor at once. The number of the
// update is in the generator's name, so a resumed run draws what it would have drawn.

namespace tessera::precision {

namespace {

using kernels::ElementRun;

/// What the optimizers share: the runs of each parameter, and its random numbers of each update.
class StochasticRounding : public optim::Optimizer {
 public:
  StochasticRounding(std::vector<optim::ParameterGroup> groups, uint64_t seed) : Optimizer(std::move(groups)), seed_(seed) {
    for (const auto& parameter : parameters_) {
      invariant(parameter.tensor.scalar_type() == at::kBFloat16 && parameter.tensor.is_contiguous(), "stochastic rounding: '", parameter.name,
                "' must be bf16 and contiguous");
      runs_.push_back(optim::element_runs(nn::slice_of(parameter.tensor)));
    }
  }

 protected:
  CounterRng rng_of(size_t index) const { return CounterRng(seed_, detail::concat("stochastic rounding ", counts_[index], " ", parameters_[index].name)); }

  uint64_t seed_;
  std::vector<std::vector<ElementRun>> runs_;  ///< of each of parameters_
};

class StochasticAdamW final : public StochasticRounding {
 public:
  StochasticAdamW(std::vector<optim::ParameterGroup> groups, uint64_t seed, const OptimConfig& config)
      : StochasticRounding(std::move(groups), seed),
        options_{.beta1 = config.betas[0], .beta2 = config.betas[1], .eps = config.eps},
        exp_avg_(zeros_like_parameters()),
        exp_avg_sq_(zeros_like_parameters()) {}

  std::string kind() const override { return "adamw"; }
  std::vector<optim::StateTensor> state() const override {
    auto state = named_state("exp_avg", exp_avg_);
    auto squares = named_state("exp_avg_sq", exp_avg_sq_);
    std::move(squares.begin(), squares.end(), std::back_inserter(state));
    return state;
  }

 private:
  void update(const Batch& batch, double lr) override {
    auto options = options_;
    options.lr = lr;
    options.weight_decay = batch.weight_decay;
    for (size_t i = 0; i < batch.indices.size(); ++i) {
      const size_t index = batch.indices[i];
      options.step = counts_[index];
      const CounterRng rng = rng_of(index);
      for (const auto& run : runs_[index]) {
        kernels::stochastic_adamw_(batch.parameters[i], batch.gradients[i], exp_avg_[index], exp_avg_sq_[index], run, options, rng);
      }
    }
  }

  void hold(size_t index) override {
    if (exp_avg_[index].defined()) return;
    exp_avg_[index] = zeros_like_parameter(index);
    exp_avg_sq_[index] = zeros_like_parameter(index);
  }

  kernels::StochasticAdamW options_;
  std::vector<at::Tensor> exp_avg_, exp_avg_sq_;
};

class StochasticSgd final : public StochasticRounding {
 public:
  StochasticSgd(std::vector<optim::ParameterGroup> groups, uint64_t seed, const OptimConfig& config)
      : StochasticRounding(std::move(groups), seed), momentum_(config.momentum) {
    if (momentum_ != 0) momentum_buffer_ = zeros_like_parameters();
  }

  std::string kind() const override { return "sgd"; }
  std::vector<optim::StateTensor> state() const override { return named_state("momentum_buffer", momentum_buffer_); }

 private:
  void update(const Batch& batch, double lr) override {
    const kernels::StochasticSgd options{.lr = lr, .momentum = momentum_, .weight_decay = batch.weight_decay};
    for (size_t i = 0; i < batch.indices.size(); ++i) {
      const size_t index = batch.indices[i];
      const CounterRng rng = rng_of(index);
      const at::Tensor buffer = momentum_buffer_.empty() ? at::Tensor() : momentum_buffer_[index];
      for (const auto& run : runs_[index]) kernels::stochastic_sgd_(batch.parameters[i], batch.gradients[i], buffer, run, options, rng);
    }
  }

  void hold(size_t index) override {
    if (!momentum_buffer_.empty() && !momentum_buffer_[index].defined()) momentum_buffer_[index] = zeros_like_parameter(index);
  }

  double momentum_;
  std::vector<at::Tensor> momentum_buffer_;  ///< empty without momentum
};

}  // namespace

std::unique_ptr<optim::Optimizer> make_stochastic_rounding(const OptimConfig& config, uint64_t seed, const std::vector<nn::NamedParameter>& parameters) {
  auto groups = optim::decay_groups(parameters, config.decay_on, config.weight_decay);
  if (config.name == "adamw") return std::make_unique<StochasticAdamW>(std::move(groups), seed, config);
  require(config.name == "sgd", "precision.master = bf16: optim.name = ", config.name,
          " has no update with stochastic rounding; set optim.name = adamw or sgd, or precision.master = fp32");
  return std::make_unique<StochasticSgd>(std::move(groups), seed, config);
}

}  // namespace tessera::precision
