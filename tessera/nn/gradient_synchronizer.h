#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "tessera/comm/exposed_time.h"
#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// What a schedule lets a model, or a part of one, do with a micro-batch.
enum class ActionKind {
  Forward,
  Backward,
  Weights  ///< the gradients of weights that its backward has left for later (nn/weight_gradients.h)
};

/// The action that computes with parameters next on this rank.
struct ComingAction {
  ActionKind kind = ActionKind::Forward;  ///< never Weights, which need none
  int part = 0;                           ///< of the model, as in MicroBatchPosition
};

/// Where a micro-batch stands in its step.
struct MicroBatchPosition {
  int64_t index = 0;  ///< in the global batch, counted over all ranks; a padding micro-batch's index means nothing
  /// The action is the last of its kind in this step: gradients are final after the last backward, or after those left for later. Where a step has whole
  /// backwards beside halves, the last of the weights' actions need not be the last that brings gradients: a whole backward may follow it, and the last
  /// backward may be whole with weights' gradients of others still to come. Engines make the backwards of a stage alike (schedules::with_backwards_alike).
  bool last = false;
  bool padding = false;                  ///< of weight 0: it keeps a rank with fewer micro-batches in step with the others
  bool weights_later = false;            ///< of a backward: an action of its own brings the weights' gradients, on every rank
  int part = 0;                          ///< which of the parts of the model that this rank holds; each has a synchronizer of its own, which need not look
  std::optional<ComingAction> coming{};  ///< behind this one; unset: none, or nobody knows
  bool stays = false;                    ///< sharded parameters of the part that are whole stay so behind the action, for one to come
};

/// What the last finished step cost this rank.
struct SynchronizationStatistics {
  comm::ExposedTime exposed{};  ///< for which communication was waited for: what backward did not hide
  int64_t bytes = 0;            ///< gradient bytes handed to collectives or sent
  int64_t num_collectives = 0;  ///< collectives and messages that carried them
  int64_t num_early = 0;        ///< of those, begun while backward still ran
};

/// Turns the gradients of each rank's micro-batches into the gradient of the global batch, the same bits on every rank.
///
/// The loop of a program on one device is enough: zero_grad, forward, backward, step. A step begins with its first forward or gradient and is complete when the
/// last backward pass returns: then `grad()` of each parameter (of what a rank holds of it, where it is sharded) is that of the global batch. Every backward
/// pass is the last of its step unless it runs under `no_sync()`; one that follows without a zero_grad adds to what is there, as on one device.
///
/// An engine that knows its micro-batches says so, and then in each step:
///   begin_step, then before(kind, position), the action itself, after(kind, position) for every action of its schedule, then finish;
/// `grad()` holds the result until the next begin_step, which clears it; after the optimizer's step, after_update. Forwards may run ahead of backwards, several
/// of them (1F1B, arXiv:2104.04473); each micro-batch has one of each, backwards come in the order of the forwards, and weight gradients after their backward.
/// An engine that runs one micro-batch after the other says before_micro_batch and after_micro_batch around both. A call that is missing or out of order is
/// refused by name at the next one. Not thread-safe: one rank, one thread.
class GradientSynchronizer {
 public:
  virtual ~GradientSynchronizer() = default;

  /// While it lives, backward passes only accumulate on this rank: the first one without it completes the step. They nest; each may outlive this object.
  [[nodiscard]] Attachment no_sync() {
    ++*holds_;
    return Attachment([holds = holds_] { --*holds; });
  }

  virtual void begin_step() = 0;
  virtual void before(ActionKind action, const MicroBatchPosition& position) = 0;
  virtual void after(ActionKind action, const MicroBatchPosition& position) = 0;

  /// An action of this kind is what comes behind another part's, which begins: what it needs first may be brought ahead of it.
  virtual void expect(ActionKind /*action*/) {}

  /// Another part's actions run by now: what of this one is still on its way is waited for, where it holds memory until then.
  virtual void drain() {}

  /// A forward, and its backward right behind it.
  void before_micro_batch(const MicroBatchPosition& position) {
    before(ActionKind::Forward, position);
    after(ActionKind::Forward, position);
    before(ActionKind::Backward, position);
  }
  void after_micro_batch(const MicroBatchPosition& position) { after(ActionKind::Backward, position); }

  /// Waits for what is under way. Throws ConfigError naming parameters that got no gradient, CommError where a peer failed.
  virtual void finish() = 0;

  /// The optimizer has updated what this rank holds of the parameters: whoever shards the update brings the parts together here.
  virtual void after_update() {}

  virtual const SynchronizationStatistics& statistics() const = 0;

  /// What an optimizer updates on this rank and a norm is taken of: the parameters, or, where updates are sharded, this rank's part of each (which may be
  /// empty), whose grad() is its part of the gradient. Tied ones once; frozen ones are among them, without a gradient.
  virtual std::vector<nn::NamedParameter> updated() const { return {}; }

  /// What zero_grad does, of all there is: of the parameters and of what is updated in their place.
  virtual void clear_gradients() {
    for (const auto& [name, tensor, aliases] : updated()) tensor.mutable_grad() = at::Tensor();
  }

  /// Who holds this one and is stepped in its place (HostGradients), or this one.
  GradientSynchronizer& outermost() { return holder_ == nullptr ? *this : holder_->outermost(); }

  /// Ranks over which these are cut: what a norm sums over. A group of one where each rank holds the whole.
  virtual comm::Group norm_group() const { return comm::Group::self(); }

  /// How many elements of each parameter that is updated `rank` of the sharding group holds, for every rank the same list; empty where all hold the same.
  virtual std::vector<int64_t> held_elements(int /*rank*/) const { return {}; }

  /// What `rank` of the sharding group updates of the parameter of which this rank updates `updated`.
  virtual Slice slice_on(int /*rank*/, const at::Tensor& updated) const { return nn::slice_of(updated); }

 protected:
  /// What no_sync() counts: gradients meet in passes that run while it is 0.
  const std::shared_ptr<int>& holds() const { return holds_; }
  void hold(GradientSynchronizer& inner) { inner.holder_ = this; }

 private:
  GradientSynchronizer* holder_ = nullptr;
  std::shared_ptr<int> holds_ = std::make_shared<int>(0);
};

}  // namespace tessera
