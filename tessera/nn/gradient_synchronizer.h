#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/comm/exposed_time.h"
#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// What a schedule lets a model, or a part (stage) of one, do with a micro-batch.
enum class ActionKind {
  Forward,
  Backward,
  Weights  ///< computes the weight gradients that the micro-batch's backward has left for later (nn/weight_gradients.h)
};

/// The next action on this rank that computes with parameters.
struct ComingAction {
  ActionKind kind = ActionKind::Forward;  ///< never Weights, which need no parameters
  int part = 0;                           ///< of the model, as in MicroBatchPosition
};

/// Where a micro-batch stands in its step.
struct MicroBatchPosition {
  int64_t index = 0;  ///< in the global batch, counted over all ranks; a padding micro-batch's index means nothing
  /// No action of the same kind follows in this step. Gradients are final after the last Backward; with weights_later, after the last Weights. That needs
  /// backwards of one form: all whole, or all with weights_later. In a mixture a whole Backward may follow the last Weights, and the other way round, so an
  /// engine makes the backwards of a stage alike first (schedules::with_backwards_alike).
  bool last = false;
  bool padding = false;                  ///< has weight 0: a rank with fewer micro-batches than the others fills up with it
  bool weights_later = false;            ///< of a Backward: a Weights action brings the gradients of the weights, on every rank
  int part = 0;                          ///< which of this rank's parts of the model; each has a synchronizer of its own, which may ignore this
  std::optional<ComingAction> coming{};  ///< follows this action; unset: none, or not known
  bool stays = false;                    ///< whole parameters of the part stay whole after the action, for a later one
};

/// What the last finished step cost this rank.
struct SynchronizationStatistics {
  comm::ExposedTime exposed{};  ///< time spent waiting for communication: what backward did not hide
  int64_t bytes = 0;            ///< gradient bytes handed to collectives or sent
  int64_t num_collectives = 0;  ///< collectives and messages that carried them
  int64_t num_early = 0;        ///< of those, begun while backward still ran
};

namespace nn {

/// Counts who holds something back. Copies share one count: each of them, and what hold() returns, may outlive the others.
class Holds {
 public:
  [[nodiscard]] Attachment hold() const {
    ++*count_;
    return Attachment([count = count_] { --*count; });
  }
  bool any() const { return *count_ > 0; }

 private:
  std::shared_ptr<int> count_ = std::make_shared<int>(0);
};

}  // namespace nn

/// Turns the gradients of each rank's micro-batches into the gradient of the global batch: the base of all data-parallel wrappers.
///
/// Plain loop: zero_grad, forward, backward, step, as on one device. A step begins with its first forward or gradient. Each backward pass completes its step,
///   unless it runs under no_sync(); a pass without a zero_grad before it adds.
/// Explicit calls, of an engine that knows its micro-batches: begin_step, which clears gradients; before(kind, position), the action, after(kind, position) for
///   each action of its schedule; finish; the optimizer's step; after_update. An engine of one micro-batch at a time has before_ and after_micro_batch.
/// Requires: of each micro-batch a forward, a backward and then its weight gradients, if left; backwards in the order of forwards, which may run ahead (1F1B,
///   arXiv:2104.04473). One rank, one thread.
/// Guarantees: when a step is complete, grad() of each parameter (of this rank's part, where it is sharded) is that of the global batch, with the same bits on
///   every rank that holds it. By explicit calls it stays until the next begin_step.
/// Collective when: a backward pass brings gradients that it reduces, a step is complete, after_update. Ranks make the same calls in the same order.
/// Throws ConfigError at the next call for one that is missing or out of order. Memory, traffic: of the derived class. Rare cases: docs/sharding-contract.md.
class GradientSynchronizer {
 public:
  virtual ~GradientSynchronizer() = default;

  /// While the returned object lives, backward passes only accumulate on this rank; the first pass without one completes the step. The objects nest, and each
  /// may outlive this one.
  [[nodiscard]] Attachment no_sync() { return holds_.hold(); }

  virtual void begin_step() = 0;
  virtual void before(ActionKind action, const MicroBatchPosition& position) = 0;
  virtual void after(ActionKind action, const MicroBatchPosition& position) = 0;

  /// Another part's action begins, and an action of this kind follows it: its first parameters may be gathered ahead.
  virtual void expect(ActionKind /*action*/) {}

  /// Another part's actions run now: waits for this part's communication under way that holds memory.
  virtual void drain() {}

  /// A forward, and its backward right behind it.
  void before_micro_batch(const MicroBatchPosition& position) {
    before(ActionKind::Forward, position);
    after(ActionKind::Forward, position);
    before(ActionKind::Backward, position);
  }
  void after_micro_batch(const MicroBatchPosition& position) { after(ActionKind::Backward, position); }

  /// Waits for the communication under way. Throws ConfigError naming parameters that got no gradient, CommError where a peer failed.
  virtual void finish() = 0;

  /// To be called when the optimizer has updated what this rank holds of the parameters: where updates are sharded, gathers the parts of all ranks.
  virtual void after_update() {}

  virtual const SynchronizationStatistics& statistics() const = 0;

  /// What an optimizer updates on this rank, and what a norm is taken of: the parameters, or, where updates are sharded, this rank's part of each, whose grad()
  /// is its part of the gradient. A part may be empty. Tied parameters are listed once, frozen ones too, without a gradient.
  virtual std::vector<nn::NamedParameter> updated() const = 0;

  /// Throws ConfigError, by name, where gradients wait whole on this rank, as passes under no_sync() leave them, and have met no other rank's: for `who` is
  /// about to take them for those of the global batch.
  virtual void refuse_gradients_that_wait(const std::string& /*who*/) const {}

  /// Clears all gradients, as zero_grad does: of the parameters and of the parts that are updated in their place.
  virtual void clear_gradients() {
    for (const auto& [name, tensor, aliases] : updated()) tensor.mutable_grad() = at::Tensor();
  }

  /// The synchronizer that holds this one and is stepped in its place (HostGradients), or this one.
  GradientSynchronizer& outermost() { return holder_ == nullptr ? *this : holder_->outermost(); }

  /// Expires when this object goes: for whoever refers to it, and may be used later than that.
  std::weak_ptr<const void> lifetime() const { return lifetime_; }

  /// The ranks over which updated() is cut: a norm sums over them. A group of one where each rank holds the whole.
  virtual comm::Group norm_group() const { return comm::Group::self(); }

  /// How many elements of each of updated() rank `rank` of the sharding group holds; every rank computes the same list. Empty where all ranks hold the same.
  virtual std::vector<int64_t> held_elements(int /*rank*/) const { return {}; }

  /// The slice that rank `rank` of the sharding group updates, of the parameter of which this rank updates `updated`.
  virtual Slice slice_on(int /*rank*/, const at::Tensor& updated) const { return nn::slice_of(updated); }

 protected:
  /// The count of live no_sync() objects: gradients are reduced in passes that run while it is 0.
  const nn::Holds& holds() const { return holds_; }
  void hold(GradientSynchronizer& inner) { inner.holder_ = this; }

 private:
  GradientSynchronizer* holder_ = nullptr;
  nn::Holds holds_;
  std::shared_ptr<const void> lifetime_ = std::make_shared<bool>(true);
};

}  // namespace tessera
