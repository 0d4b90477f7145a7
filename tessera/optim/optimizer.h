#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/parameter.h"

namespace tessera::optim {

/// Parameters that share a weight decay. What is updated is each tensor's own memory, so a tensor may be a whole parameter or one rank's slice of it.
struct ParameterGroup {
  std::vector<nn::NamedParameter> parameters;
  double weight_decay = 0;
};

/// Deals parameters into groups: `matrices` decays those whose logical tensor has two dimensions or more (embeddings and heads are matrices; biases and
/// norms are not) and leaves the rest undecayed; `all` decays every one. Decided by the logical shape, so a flat shard of a matrix decays as well.
std::vector<ParameterGroup> decay_groups(const std::vector<nn::NamedParameter>& parameters, const std::string& decay_on, double weight_decay);

/// One tensor of optimizer state; it lies over its parameter element by element, so it has the parameter's slice.
struct StateTensor {
  std::string parameter;  ///< logical name of the parameter
  std::string state;      ///< libtorch's name for it: exp_avg, exp_avg_sq, momentum_buffer
  at::Tensor tensor;      ///< rank-local, shaped like the rank-local parameter
  Slice slice;            ///< the parameter's slice
};

/// Updates parameters in place from their `grad()`; parameters without a gradient are left alone, state included, as torch.optim does.
/// State is allocated at construction, under MemoryCategory::Optimizer, so that a plan sees it before the first step; that of a parameter that requires no
/// gradient by then (a frozen one) at its first update. Works on meta tensors.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// torch.optim's name in lower case: "adamw", "sgd".
  virtual std::string kind() const = 0;

  /// One update with learning rate `lr`. Gradients are read, never changed. Where `skip` (not_finite(), on the parameters' device) is given and holds 1,
  /// parameters and state stay as they are. On a device the host does not know which it was, and goes on: whoever learns of it calls take_back_count().
  void step(double lr, const at::Tensor& skip = {});

  /// The last step was skipped: it does not count.
  void take_back_count();

  /// Every state tensor that there is, parameter by parameter in the order of construction. The tensors are the live ones: copy into them to load.
  virtual std::vector<StateTensor> state() const = 0;

  /// Allocates the state of parameters that have had updates elsewhere, as `counts` of another optimizer's update_counts() say, before state() is loaded.
  virtual void hold_state(const std::map<std::string, int64_t>& counts);

  /// How many updates each parameter has had, by logical name; it sets AdamW's bias correction. Equal to the number of steps unless a parameter sat some out.
  std::map<std::string, int64_t> update_counts() const;

  /// Restores what update_counts() gave. Throws ConfigError with the full list of parameters that are missing or unknown.
  void set_update_counts(const std::map<std::string, int64_t>& counts);

  const std::vector<ParameterGroup>& groups() const { return groups_; }

 protected:
  /// What a step updates: parameters of one group that have a gradient, by position in construction order.
  struct Batch {
    double weight_decay = 0;
    std::vector<size_t> indices;
    std::vector<at::Tensor> parameters, gradients;
    at::Tensor skip{};  ///< undefined: the update is made; else a device that the host does not read decides (AdamW, Sgd; others refuse accelerators)
  };

  explicit Optimizer(std::vector<ParameterGroup> groups);

  virtual void update(const Batch& batch, double lr) = 0;
  virtual void counts_changed() {}        ///< after set_update_counts
  virtual void hold(size_t /*index*/) {}  ///< makes the state of this parameter, unless it is there

  /// Zeros like each parameter that requires a gradient, in construction order, allocated as optimizer state; undefined for the others.
  std::vector<at::Tensor> zeros_like_parameters() const;
  at::Tensor zeros_like_parameter(size_t index) const;
  /// Of those that are there.
  std::vector<StateTensor> named_state(const std::string& state, const std::vector<at::Tensor>& tensors) const;

  std::vector<ParameterGroup> groups_;
  std::vector<nn::NamedParameter> parameters_;  ///< of all groups, one after another
  std::vector<int64_t> counts_;                 ///< updates of each of parameters_
  std::vector<int64_t> counts_before_;          ///< the last step
};

/// Whether an update has to be skipped: fp32 [1], 1 where `norm` is not finite, else 0; on its device, without a read.
at::Tensor not_finite(const at::Tensor& norm);

/// Builds what `optim.name` names, for parameters that appear once each (nn::unique_parameters). Throws ConfigError on a name that is not available.
std::unique_ptr<Optimizer> make_optimizer(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters);

}  // namespace tessera::optim
