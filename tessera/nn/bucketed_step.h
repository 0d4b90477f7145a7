#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_relay.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/late_parameters.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/replicas.h"
#include "tessera/nn/step_protocol.h"
#include "tessera/nn/write_watch.h"

/// What data-parallel techniques share. Not part of the public surface.
namespace tessera {

struct BucketedStepOptions {
  std::string technique;                             ///< as errors name it
  std::string site;                                  ///< the beginning of its collectives' call sites: "ddp"
  std::vector<comm::Group> groups;                   ///< over which gradients are summed, one after the other; those of one rank are left out
  nn::ParameterFilter only = {};                     ///< which of the module's parameters
  bool average = false;                              ///< divide the sums by the number of ranks
  bool find_unused_parameters = false;               ///< those without a gradient contribute zeros; otherwise they are refused
  BufferBroadcast buffers = BufferBroadcast::Never;  ///< from rank 0
  std::optional<at::ScalarType> reduce_dtype = {};   ///< in which buckets hold gradients; unset, and of complex ones: in each parameter's own
  std::shared_ptr<const nn::StepPhase> phase = {};   ///< of an engine; unset: kept here
  bool each_micro_batch = false;                     ///< all buckets are reduced after each of an engine's actions that brings gradients, not once a step
  bool one_at_a_time = false;                        ///< a bucket's reduction begins when that of the one before is done, or goes on elsewhere
  std::shared_ptr<GradientRelay> relay = {};         ///< takes gradients away: those of micro-batches before they are reduced, and sums as they come
  bool gives_way = false;                            ///< a bucket leaves memory in which a gradient is still computed; otherwise that must not come any more
};

/// The life of gradients in a step of a technique that reduces them by buckets, from arrival to the parameters' new gradients.
///
/// A gradient that arrives is brought into its bucket, or was computed there (nn/gradient_dispatcher.h); the last of a bucket starts its reduction, while
/// backward goes on. Buckets start in one order on every rank, whatever order gradients come in. When the last pass is done the rest of them start, and those
/// that are under way are completed in rounds, so that one's next collective runs while the results of others are worked on. What a parameter has from before
/// the step is set aside, and added to the sum. A pass that ended by an exception takes its step with it: nothing is waited for, what was there before is
/// there again.
///
/// How buckets lie in memory and are reduced, and what becomes of the sums, is the technique's own.
class BucketedStep {
 public:
  BucketedStep(const BucketedStep&) = delete;
  BucketedStep& operator=(const BucketedStep&) = delete;

  void begin_step() { protocol_.begin_step(); }
  void before(ActionKind action, const MicroBatchPosition& position);
  void after(ActionKind action);
  void finish() { protocol_.finish(); }
  void after_update() const { protocol_.after_update(); }
  /// Throws ConfigError, by name, after nothing but passes under no_sync() in the plain loop.
  void refuse_gradients_that_wait(const std::string& who) const;
  const SynchronizationStatistics& statistics() const { return statistics_; }
  const std::vector<nn::NamedParameter>& parameters() const { return parameters_; }

 protected:
  using Options = BucketedStepOptions;

  /// Claims the parameters of `module` for `self`, and listens to their gradients where more than one rank has them.
  BucketedStep(GradientSynchronizer& self, nn::Holds holds, torch::nn::Module& module, Options options);
  virtual ~BucketedStep() = default;

  /// A step opens: trained_ says what it is of. Buckets have memory when this returns, and carried_ what the step adds to of gradients that were reduced
  /// before.
  virtual void prepare() = 0;
  /// Where the gradient of parameter `i` belongs. It may have no memory before.
  virtual at::Tensor place(size_t i) = 0;
  /// Brings it there: zeros where there is none.
  virtual void take(size_t i) = 0;
  /// What the parameter shows before its first gradient of the step is set aside (carried_); what was and has been cleared since goes.
  virtual void settle(size_t i) = 0;
  /// Starts to reduce a bucket whose gradients are all in place. Whether something is under way.
  virtual bool start(size_t bucket) = 0;
  /// Which parameters any rank used, where that is found out: before the last `advance` of each bucket.
  virtual void learn_used(const std::vector<bool>& /*used*/) {}
  /// Waits for what is under way, and says whether that was all; otherwise the next has started, and it will be called again.
  virtual bool advance(size_t bucket) = 0;
  /// Lets go of it without waiting.
  virtual void drop(size_t bucket) = 0;
  /// Whether terms that are divided come out as a sum that is.
  virtual bool is_linear() const { return true; }
  /// Where a bucket's sum lies, or this rank's part of it.
  virtual at::Tensor sum(size_t bucket) const = 0;
  /// Makes the sum of parameter `i` its gradient, and says where that is; none where it is to have none.
  virtual at::Tensor hand_over(size_t i, bool has_gradient) = 0;
  /// What an optimizer updates of parameter `i`.
  virtual const at::Tensor& updated(size_t i) const { return parameters_[i].tensor; }
  /// Of a bucket whose sum was handed over and relayed, the memory goes.
  virtual void release(size_t /*bucket*/) {}
  /// The last pass is done, and what has not started before starts after this.
  virtual void begin_completion() {}
  /// Gradients are there.
  virtual void complete_step() {}
  /// Whether parameters were written, as far as this rank sees, since gradients of it alone were left.
  virtual bool were_written() const { return false; }
  /// How often they were: nn::WriteCounts, over the last of the groups.
  virtual uint64_t count_writes() { return 0; }
  /// Of the plain loop, when its words have been told: whether any rank saw such writes, and whether some wrote more often than others. All ranks come here, or
  /// none.
  virtual void compare(bool /*written*/, bool /*unlike*/) {}
  /// Undoes what a step that failed has left of parameter `i`. Must not throw.
  virtual void restore(size_t i) = 0;
  virtual void begin_pass(bool last);
  virtual void end_pass(bool last, bool complete);
  /// Of the parameters and of what stands for them.
  virtual void clear_gradients();

  /// Parameters of each bucket, in the order of reduction. Between steps, or in `prepare`.
  void set_slots(std::vector<std::vector<size_t>> slots);

  bool active() const { return !options_.groups.empty(); }
  GradientRelay* relay() const { return options_.relay.get(); }
  bool is_trained(size_t bucket) const;
  /// Whether what starts now is the last reduction of its bucket in this step.
  bool is_last_round() const;
  bool is_first_round() const { return round_ == 0; }
  /// Whether buckets of this step may start while backward runs: from `prepare` on its collectives then come at one place on every rank.
  bool starts_early() const { return starts_early_; }
  /// Whether no newer wrapper has it.
  bool synchronizes(size_t i) const;
  /// Drops what is carried of a parameter whose gradient the program has cleared since, and says whether it did.
  bool drop_cleared(size_t i);

  /// Throws ConfigError, by name, where the parameter has another shape, dtype or device than when it was wrapped: places in buckets follow from these.
  void require_same_form(size_t i) const { forms_.require_same(options_.technique, i, parameters_[i]); }

  /// `gradient` is what the step adds to of parameter `i`. Where no step of this object has left it so, the program has put it there, and when the step is
  /// complete ranks compare it.
  void note_given(size_t i, const at::Tensor& gradient);

  /// Says anew which parameters are trained.
  void follow_trained();
  bool equalize(ReplicaStart start);  ///< whether the parameters lie in memory alike on all ranks (equalize_replicas)
  /// Those that are nobody else's since they were wrapped.
  std::vector<nn::NamedParameter> own_parameters() const { return nn::owned_by(self_); }
  void share_buffers();  ///< from the first rank of all, unless they never are
  void let_go();         ///< of what is under way, and on offer
  std::string site(const char* name) const { return options_.site + "." + name; }
  at::Device device() const { return parameters_.front().tensor.device(); }

  const std::vector<nn::NamedParameter> parameters_;  ///< also those that are frozen
  std::vector<bool> trained_;                         ///< which of them want a gradient in this step
  std::vector<std::vector<size_t>> slots_;            ///< by bucket, in the order of reduction: the parameters in it
  std::string bucket_site_;

  bool plain_ = false;  ///< the step is one of the plain loop
  LeftGradients left_;
  std::shared_ptr<const void> drops_apart_;
  std::vector<at::Tensor> carried_;  ///< by parameter: what this step adds to, set aside
  std::vector<bool> arrived_;        ///< parameters that got a gradient in this step
  std::vector<int64_t> finals_;      ///< parameters in the order in which their gradients became final
  nn::GradientWrites gradient_writes_;
  nn::GradientWrites left_writes_;  ///< since a step was complete, or undone
  std::vector<at::Tensor> given_;   ///< by parameter: of carried_, what the program has put there
  SynchronizationStatistics statistics_;

 private:
  void refuse_slices() const;
  void listen();
  std::optional<at::ScalarType> taken_up_alone_in(const at::Tensor& parameter) const;
  void relay_alone();
  void open(bool plain);
  void begin_round();
  void offer_places();
  void withdraw_places();
  bool divides_terms(size_t bucket) const;
  bool is_awaited(size_t i) { return is_place_awaited(parameters_[i].tensor, place(i)); }

  void arriving(size_t i);
  void accumulated(size_t i);
  void final(size_t i);
  void bring(size_t i);
  void give_away(size_t i);
  void pass_on(size_t bucket);
  bool advance_on(size_t bucket);
  void launch_next();
  void launch_rest();
  void collect(size_t i);
  void advance_newest();
  void complete_earlier_round();
  void complete();
  void complete_reductions();
  StepWords own_words();
  void refuse_given_apart();
  void see_left();
  std::vector<bool> used_anywhere(StepWords& words);
  void share_buffers_of_step(const std::optional<StepWords>& told);
  void tell_of_failure() noexcept;
  void undo();
  void undo_all();
  void drop_reductions();
  void abandon();

  GradientSynchronizer& self_;
  torch::nn::Module& module_;
  Options options_;
  nn::ParameterForms forms_;  ///< as they were wrapped
  nn::LateParameters late_;
  int num_ranks_ = 1;                         ///< that share a batch
  int ranks_of_mean_ = 1;                     ///< by which `average` divides
  std::vector<size_t> bucket_of_;             ///< by parameter
  std::shared_ptr<nn::StepPhase> own_phase_;  ///< null where an engine's is followed
  UsedParameters used_;
  bool starts_early_ = false;      ///< buckets, while backward runs; else when it is done, for another wrapper's start on the same engine
  bool last_pass_ = false;         ///< the pass that runs, or ran, starts reductions
  bool waits_ = false;             ///< gradients of this rank's passes under no_sync() alone
  bool in_action_ = false;         ///< an engine's, which brings gradients
  int64_t round_ = 0;              ///< of reductions of every bucket, in this step
  std::vector<size_t> missing_;    ///< per bucket: gradients that are not final in this round
  std::vector<bool> overtaken_;    ///< gradients that went without the one that was to be computed in place, which must not come any more
  size_t launched_ = 0;            ///< buckets of this round
  std::vector<size_t> under_way_;  ///< buckets, as they were launched
  StepProtocol protocol_;
  Attachment hooks_;
};

}  // namespace tessera
