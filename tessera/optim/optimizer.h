#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"
#include "tessera/layout/slice.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/whole_model.h"

namespace tessera::optim {

/// Parameters that share a weight decay and a learning rate. What is updated is each tensor's own memory, so a tensor may be a whole parameter or one rank's
/// slice of it.
struct ParameterGroup {
  std::vector<nn::NamedParameter> parameters;
  double weight_decay = 0;
  double lr_factor = 1;  ///< of the learning rate that a step is made with
};

/// Deals parameters into groups: `matrices` decays those whose logical tensor has two dimensions or more (embeddings and heads are matrices; biases and
/// norms are not) and leaves the rest undecayed; `all` decays every one. Decided by the logical shape, so a flat shard of a matrix decays as well.
std::vector<ParameterGroup> decay_groups(const std::vector<nn::NamedParameter>& parameters, const std::string& decay_on, double weight_decay);

/// One tensor of optimizer state. Most lie over their parameter element by element, and have its slice; sums of rows and scales of blocks are logical tensors
/// of their own, of which a rank has what its elements need.
struct StateTensor {
  std::string parameter;  ///< logical name of the parameter
  std::string state;      ///< libtorch's name for it: exp_avg, exp_avg_sq, momentum_buffer
  at::Tensor tensor;      ///< rank-local
  Slice slice;            ///< what it is of the logical tensor
  /// Of one that waits elsewhere (state_to_save): brings a copy of it, for as long as the caller holds that; `tensor` then has its form alone, and no memory.
  std::function<at::Tensor()> read = {};
};

/// A state that lies over its parameter and is what a delayed update has made of it (HostOptimizer): where there is one, the weights are one update behind.
inline constexpr std::string_view kNextState = "next";

/// 16-bit weights that an update writes along with the fp32 masters that it is of, by master.
using RoundedWeights = std::unordered_map<const c10::TensorImpl*, at::Tensor>;

/// What an update is made with.
struct UpdateTerms {
  double lr = 0;
  at::Tensor skip{};                        ///< undefined: it is made; else a device that the host does not read decides
  double gradient_scale = 1;                ///< gradients are read times this (updates_in_one_pass())
  const RoundedWeights* rounded = nullptr;  ///< written besides (writes_rounded())
};

/// Updates parameters in place from their `grad()`; parameters without a gradient are left alone, state included, as torch.optim does.
/// State is allocated at construction, under MemoryCategory::Optimizer, so that a plan sees it before the first step; that of a parameter that requires no
/// gradient by then (a frozen one) at its first update. Works on meta tensors.
class Optimizer {
 public:
  virtual ~Optimizer() = default;

  /// What `optim.name` calls it: "adamw", "sgd".
  virtual std::string kind() const = 0;

  /// The kind that updates each parameter, by logical name: with optim.groups another than kind() for some.
  virtual std::map<std::string, std::string> kinds() const;

  /// One update with learning rate `lr`. Collective over WholeModel::meet's ranks where the optimizer has such.
  /// Gradients are read, never changed, unless `scale` is given (clip_factor(), fp64 []): the update is of gradients times it, by which they are multiplied in
  /// place where the update does not do that as it reads them (updates_in_one_pass(), of what lies on the host), in a pass of 8 bytes an fp32 element.
  /// Where `skip` (not_finite(), on the parameters' device) is given and holds 1, parameters and state stay as they are. On a device the host does not know
  /// which it was, and goes on (skips_on_device()): whoever learns of it calls take_back_count().
  /// Throws ConfigError where a gradient is one term of a sum over ranks and nn::sum_terms has never been called for its parameter.
  void step(double lr, const at::Tensor& skip = {}, const at::Tensor& scale = {});

  /// The last step was skipped: it does not count.
  virtual void take_back_count();

  /// step() in two: what has to be known of all gradients together (sums over a matrix, scales of blocks), on every rank and once a step; then the update of
  /// the parameters that have a gradient by now, which may be called for some of them at a time.
  virtual void begin(double lr);
  virtual void apply(const UpdateTerms& terms);
  /// What take_back_count() goes back to; step() calls it.
  virtual void remember_counts();
  /// Whether begin() has anything to do.
  virtual bool needs_begin() const { return false; }
  /// Whether begin() may give parameters that have no gradient an update of the step before (HostOptimizer, delayed).
  virtual bool updates_late() const { return false; }
  /// The parameters, by logical name, whose update is not made element by element, so that of one that is cut its ranks have to meet.
  virtual std::set<std::string> needs_wholes() const;
  /// All that needs_wholes() names is whole here: other ranks are asked nothing from now on, whatever WholeModel says of them.
  virtual void meet_nobody() {}
  /// Whether its operators leave everything alone where a number on the device says so; otherwise the host reads it first, and waits.
  virtual bool skips_on_device() const { return false; }

  /// Whether its update on the host scales gradients as it reads them, and takes those of fp32 parameters in 16 bits.
  virtual bool updates_in_one_pass() const { return false; }
  /// Whether that pass also follows and writes UpdateTerms::rounded. Who hands updates on to another optimizer says so only where it hands these on as well.
  virtual bool writes_rounded() const { return false; }

  /// Every state tensor that there is, parameter by parameter in the order of construction. The tensors are the live ones: copy into them to load.
  virtual std::vector<StateTensor> state() const = 0;

  /// The same to be read, one after the other, and not to be kept: what waits elsewhere stays there (StateTensor::read). Until the next step.
  virtual std::vector<StateTensor> state_to_save() const { return state(); }

  /// Those of them that lie where they are updated between steps; the rest waits elsewhere, and state() would bring it.
  virtual std::vector<StateTensor> state_at_hand() const { return state(); }

  /// Allocates the state of parameters that have had updates elsewhere, as `counts` of another optimizer's update_counts() say, before state() is loaded.
  virtual void hold_state(const std::map<std::string, int64_t>& counts);

  /// Parameters were loaded: copies of them that are kept elsewhere take their values of now, but for those of trained parameters of these names, whose copies
  /// were loaded one update ahead (kNextState). What is under way is lost.
  virtual void follow_all_but(const std::set<std::string>& /*ahead*/) {}

  /// How many updates each parameter has had, by logical name; it sets AdamW's bias correction. Equal to the number of steps unless a parameter sat some out.
  virtual std::map<std::string, int64_t> update_counts() const;

  /// Restores what update_counts() gave. Throws ConfigError with the full list of parameters that are missing or unknown.
  virtual void set_update_counts(const std::map<std::string, int64_t>& counts);

  const std::vector<ParameterGroup>& groups() const { return groups_; }

 protected:
  /// What a step updates: parameters of one group that have a gradient, by position in construction order.
  struct Batch {
    double lr = 0, weight_decay = 0;
    std::vector<size_t> indices;
    std::vector<at::Tensor> parameters, gradients;
    at::Tensor skip{};                  ///< UpdateTerms
    double gradient_scale = 1;          ///< UpdateTerms
    std::vector<at::Tensor> rounded{};  ///< of UpdateTerms, one for each parameter or undefined; empty where there are none

    /// The gradients in their parameters' types, for operators that take one type alone: a wrapper may have reduced those of 16-bit weights in fp32.
    std::vector<at::Tensor> gradients_as_parameters() const;

    /// One past the last of the parameters from `begin` on that together have at most `bytes`; at least one of them.
    size_t piece_end(size_t begin, int64_t bytes) const;
  };

  explicit Optimizer(std::vector<ParameterGroup> groups);

  virtual void update(const Batch& batch) = 0;
  /// Of all groups, before any is updated; update number counts_ + 1 of each. Called on every rank, where needs_begin().
  virtual void prepare(const std::vector<Batch>& /*batches*/) {}
  /// Whether what is updated has to be contiguous, not only without gaps: where memory is read by rows.
  virtual bool by_rows() const { return false; }
  /// Throws ConfigError with the list of parameters that `counts` lacks, or that are not here.
  void require_counts_of_all(const std::map<std::string, int64_t>& counts) const;
  /// Whether update() writes parameters by pointers, which no operator shows.
  virtual bool writes_memory() const { return false; }
  void announce_writes() const;
  /// libtorch's fused operators write and count nothing: a graph from before the update has to see that its parameters are others.
  static void count_writes(const std::vector<at::Tensor>& written);
  /// A program may give a parameter memory of other strides (set_data, torch::load): state that kernels walk beside it is laid as `updated` lies.
  virtual void lay_state_like(size_t /*index*/, const at::Tensor& /*updated*/) {}
  static void lay_like(at::Tensor& state, const at::Tensor& updated);
  virtual void counts_changed() {}        ///< after set_update_counts
  virtual void hold(size_t /*index*/) {}  ///< makes the state of this parameter, unless it is there

  /// Zeros like each parameter that requires a gradient, in construction order, allocated as optimizer state; undefined for the others.
  std::vector<at::Tensor> zeros_like_parameters() const;
  at::Tensor zeros_like_parameter(size_t index) const;
  /// Of those that are there.
  std::vector<StateTensor> named_state(const std::string& state, const std::vector<at::Tensor>& tensors) const;

  /// Of these parameters, as of now: what has a gradient, by groups; `apart`: parameters with gaps, and what is updated in their place.
  std::vector<Batch> batches(double lr, std::vector<std::pair<at::Tensor, at::Tensor>>& apart);

  std::vector<ParameterGroup> groups_;
  std::vector<nn::NamedParameter> parameters_;  ///< of all groups, one after another
  std::vector<int64_t> counts_;                 ///< updates of each of parameters_
  std::vector<int64_t> counts_before_;          ///< the last step
  std::vector<std::vector<int64_t>> shapes_;    ///< of each of parameters_, for which its state is
  bool terms_summed_ = false;                   ///< every parameter has had a gradient, and none of these was a rank's term
};

/// Whether an update has to be skipped: fp32 [1], 1 where `norm` is not finite, else 0; on its device, without a read.
at::Tensor not_finite(const at::Tensor& norm);

/// Builds what `optim.name` and `optim.groups` say (groups.h), for parameters that appear once each (nn::unique_parameters); `model` says which of them are
/// embeddings, heads and stacks of experts, and who holds the rest, where they are parts; `seed` draws what rounds state in 16 bits. Throws ConfigError on a
/// name that is not available, on numbers out of range (check_optimizers), on a group that is of no parameter (check_groups), unless `model` is of more, and
/// on matrices for Muon or Adam in 8 bits of which `model` says nothing.
std::unique_ptr<Optimizer> make_optimizer(const OptimConfig& config, const std::vector<nn::NamedParameter>& parameters, WholeModel model = {},
                                          uint64_t seed = 0);

}  // namespace tessera::optim
