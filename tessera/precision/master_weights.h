#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tessera/optim/optimizer.h"
#include "tessera/precision/policy.h"

namespace tessera::precision {

/// An optimizer of fp32 masters around 16-bit weights (Mixed Precision Training, arXiv:1710.03740): an update that 16 bits would round away gathers in the
/// master until the working weight can show it. Per step: each gradient, whatever its dtype -> the master's update in fp32 -> the weight, rounded to nearest.
///
/// It knows tensors and their slices alone: given a rank's shards, it holds the masters of the shards. Works on meta.
///   state     that of the optimizer inside, on the masters, and "master": fp32, the weights' slices. A checkpoint keeps both
/// On the host an inner optimizer that writes weights along (AdamW; none that hands its update on, as those of offload do) follows and rounds in that pass, and
/// reads 16-bit gradients as they are:
///   traffic   4 bytes an element and step beyond the inner update, 2 with 16-bit gradients
/// Elsewhere, and of other optimizers,
///   traffic   18 bytes beyond it; 26 with 16-bit gradients
///   memory    while it steps, fp32 copies of 16-bit gradients, kStagingBytes or one parameter at a time; on a device, to follow, 5 bytes for each of at most
///             32 million elements
/// In all cases
///   memory    4 bytes an element beyond the inner state, once
/// Masters begin as the weights are at construction. Who writes weights later (a checkpoint without masters, clamping, an average that is swapped in) is
/// followed: a master that does not round to its weight when a step begins takes the weight's value. Around a delayed HostOptimizer weights are rounded from
/// masters that show an update one step later, and what is written beside an update is refused by that; a HostOptimizer around masters keeps these on the host.
class MasterWeights final : public optim::Optimizer {
 public:
  /// Makes the optimizer inside, of the masters that it is handed.
  using Build = std::function<std::unique_ptr<optim::Optimizer>(const std::vector<nn::NamedParameter>& masters)>;

  /// fp32 copies of gradients that are made together.
  static constexpr int64_t kStagingBytes = int64_t{64} << 20;

  /// Weights that are fp32 already get a master all the same.
  MasterWeights(const std::vector<nn::NamedParameter>& weights, const Build& build);

  std::string kind() const override { return inner_->kind(); }
  std::map<std::string, std::string> kinds() const override { return inner_->kinds(); }
  std::vector<optim::StateTensor> state() const override { return with_masters(inner_->state()); }
  std::vector<optim::StateTensor> state_to_save() const override { return with_masters(inner_->state_to_save()); }
  std::vector<optim::StateTensor> state_at_hand() const override { return with_masters(inner_->state_at_hand()); }
  bool needs_begin() const override { return true; }
  bool updates_late() const override { return inner_->updates_late(); }
  std::set<std::string> needs_wholes() const override { return inner_->needs_wholes(); }
  void meet_nobody() override { inner_->meet_nobody(); }
  bool skips_on_device() const override { return inner_->skips_on_device(); }
  bool updates_in_one_pass() const override { return inner_->updates_in_one_pass(); }
  void hold_state(const std::map<std::string, int64_t>& counts) override;
  void follow_all_but(const std::set<std::string>& ahead) override { inner_->follow_all_but(ahead); }

 private:
  void update(const Batch& batch) override;
  void prepare(const std::vector<Batch>& batches) override;
  void counts_changed() override;
  std::vector<optim::StateTensor> with_masters(std::vector<optim::StateTensor> state) const;
  void follow_weights(const std::vector<Batch>& batches);
  void begin_inner(const std::vector<Batch>& batches);
  size_t staged_end(const Batch& batch, size_t begin) const;
  /// Whether the optimizer inside follows and writes this weight along with its master.
  bool goes_in_one_pass(const Batch& batch) const;
  bool is_written_along(size_t index) const;
  void update_in_one_pass(const Batch& batch);

  /// Gives the weight a master that has none, for it was frozen.
  void make_master(size_t index);

  std::vector<nn::NamedParameter>
      masters_;  ///< one for each of parameters_; of those that are frozen from the start, until they are updated, the weight itself
  std::unique_ptr<optim::Optimizer> inner_;
};

/// The optimizer that `config` names, as `policy` wants its numbers kept: plain for fp32 weights, MasterWeights, or weights and state in bf16, rounded
/// stochastically (optim/rounded.h, drawn from `seed`).
/// `parameters` appear once each and have their values; they may be whole or a rank's slices (`model`: optim::make_optimizer). Throws ConfigError on what is
/// not available.
std::unique_ptr<optim::Optimizer> make_optimizer(const OptimConfig& config, const Policy& policy, uint64_t seed,
                                                 const std::vector<nn::NamedParameter>& parameters, optim::WholeModel model = {});

}  // namespace tessera::precision
