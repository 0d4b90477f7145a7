#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/fsdp/sharded_units.h"
#include "tessera/fsdp/use_order.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// Who says where a step begins and ends.
enum class Drive {
  Loop,   ///< nobody: it begins with a forward, or with a backward, and is complete when that backward pass is, or, under no_sync(), a later one
  Engine  ///< begin_step and finish
};

/// Throws ConfigError where the program has put a gradient of the whole shape on a parameter of which this rank has a slice: of torch::autograd::grad, say.
void refuse_whole_gradient(const nn::NamedParameter& parameter, const at::Tensor& gradient, at::IntArrayRef slice);

/// A step over sharded units: when parameters are whole and when slices, where gradients go, when a unit is reduced. A trigger tells it which unit is used, and
/// which one backward has left.
///
///   pass   a forward and its backward; ends when the backward pass does, which libtorch's engine tells
///
/// Under Drive::Loop `grad()` of a slice is the program's: what is there when backward begins is put aside, and what backward brings is added to it in the end.
/// So a second backward adds, and one after zero_grad, wherever in the loop that stands, does not.
class ShardedStep {
 public:
  struct Callbacks {
    std::function<bool()> held;        ///< whether no_sync() is in force
    std::function<StepWords()> words;  ///< what this rank has to tell the others when a step is complete
    /// Collective work of a step that is complete; with what the ranks have told each other, where they did.
    std::function<void(const std::optional<StepWords>& told)> complete;
    std::function<void()> done;  ///< behind the last collective of it
  };

  ShardedStep(ShardedUnits& units, const comm::Group& group, const FullyShardOptions& options, GradientSynchronizer* owner, Callbacks callbacks);
  ShardedStep(const ShardedStep&) = delete;
  ShardedStep& operator=(const ShardedStep&) = delete;

  void begin(Drive drive);
  void before(ActionKind action, const MicroBatchPosition& position);  ///< of an engine's step
  void after(ActionKind action);
  void expect(ActionKind action);  ///< as GradientSynchronizer::expect
  void drain() { units_.drain(); }
  void finish();  ///< of an engine's step

  bool running() const { return running_; }
  bool looped() const { return drive_ == Drive::Loop; }  ///< nobody says where steps begin and end
  /// Whether whole gradients wait on this rank under no_sync(), which the program has not cleared.
  bool holds_gradients() const;
  /// With one shard, whose slice is the whole, throws ConfigError, by name and on every rank, where the program has put gradients on parameters that are not
  /// the same on all replicas. Collective there.
  void refuse_given_apart() const;
  bool driven() const { return running_ && drive_ == Drive::Engine; }
  bool in_backward() const { return in_backward_; }
  /// Whether an engine's step has seen its last backward pass, and waits for finish.
  bool awaits_finish() const { return driven() && !in_backward_ && last_done_; }
  int64_t pass() const { return pass_; }  ///< grows with every pass
  /// Which pass's forward the backward at hand, or the next, belongs to: an engine's come in the order of its forwards.
  int64_t backward_of() const { return alive_forwards_.empty() ? pass_ : alive_forwards_.front(); }

  /// Whether the backward of the pass at hand ended by an exception.
  bool aborted() const;
  /// Then forgets the pass, and with it a loop's step; an engine begins anew. To be called where a forward begins.
  void recover();
  /// A loop's forward is over, as far as anybody knows: until its backward comes parameters are slices again, for whoever looks at them or writes them.
  /// `stays`: what is gathered waits for that backward; whoever meets a slice meanwhile lets go of it (ShardedUnits::release_all), since it may be written.
  void pause(bool stays);
  /// It goes on.
  void resume();
  /// Whether a loop's forward has recorded gradients and goes on, as far as anybody knows, though parameters are slices for now: its calls have ended, or a
  /// pass for other gradients (torch::autograd::grad), and neither its backward has come nor has anybody written a slice.
  bool is_open() const { return open_; }
  void close() { open_ = false; }
  /// Another forward of a loop begins before the backward of the one before has come.
  void restart_order();
  /// The step is no more: what is written to slices from here on will be gathered anew, by a forward or a backward. Parameters are slices.
  void leave();
  /// Gradients are others' from here on: what they bring begins nothing.
  void let_go() { hooks_.detach(); }
  /// The same for good, whatever is under way, which is not waited for.
  void abandon() noexcept;

  /// Whether a unit's reduction may start as soon as all its gradients are there, for a trigger that is not told when backward leaves a unit.
  void retire_when_complete() { retire_when_complete_ = true; }

  /// Called at the end of each backward pass, to retire what is left in the trigger's own order.
  void before_backward_ends(std::function<void()> last_call) { last_call_ = std::move(last_call); }

  /// The unit is needed now. Counts as a use in `order`, which prefetch follows: in forward each time, in backward where it has to be gathered (what is held
  /// may be met again on some ranks and not on others).
  void use(size_t unit, UseOrder& order);
  /// Before that: the ranks tell each other of a use that `order` did not foretell, but for an engine's, whose ranks run one list of actions over one model,
  /// and in backward for units that are held, which some ranks may meet again and others not.
  void agree_on(size_t unit, const UseOrder& order);
  /// The same where no pass is known: of a unit that followed another one the last time.
  void agree_on(size_t unit);
  /// Backward is in the graph of this pass, or in that of one before, which then is a step of its own. From the first call on, until the pass ends.
  void begin_backward();
  /// The same for a pass that brings several gradients of one parameter, for who sees the first operator of it: once some are added up, in 16 bits, it is too
  /// late. No effect for any other pass, of whatever graph.
  void foresee_sums();
  /// Behind the last use of a unit in the action at hand: whether it stays gathered for one of an engine's that comes.
  bool leaves_gathered(size_t unit);
  bool retired(size_t unit) const { return retired_[unit]; }
  /// Backward needs the unit no more: frees it, and reduces its gradients where this pass does.
  void retire(size_t unit);

  UseOrder& order() { return order_; }
  const UseOrder& order() const { return order_; }

 private:
  FlatParameters& flat_of(const UnitPlace& place) { return units_.flats(place.unit)[place.flat]; }
  void follow_requires_grad(bool too);
  void listen(GradientSynchronizer* owner);
  void offer_places();
  void withdraw_places();
  std::vector<size_t> summed_too_narrow() const;
  void widen_sums();
  void leave_sums_as_they_were();
  void accumulated(size_t parameter);
  void put_aside();
  void put_back();
  void end_backward();
  void pass_failed() noexcept;
  void end_pass(bool stays = false);
  void end_step(bool stays);
  bool accumulates() const;
  bool may_start_early() const;
  void give_back_held();
  void reduce_what_is_due();
  void reduce(size_t unit);
  void complete_pass();
  void hold();
  void land(std::optional<StepWords>& told);
  void refuse_frozen_that_wait() const;
  void forgive_frozen();
  std::vector<bool> used_parameters(std::optional<StepWords>& told);
  StepWords own_words();
  bool is_given(size_t i) const;
  void note_brought(size_t i);
  void compare_given(const std::vector<at::Tensor>& given) const;
  bool completes() const { return last_ && complete_; }
  void take_up(size_t parameter);

  ShardedUnits& units_;
  comm::Group group_, replicas_;
  bool reduce_each_, find_unused_;
  bool misses_unused_;  ///< a step refuses parameters that no rank used; otherwise they have no gradient
  Callbacks callbacks_;
  bool retire_when_complete_ = false;
  std::function<void()> last_call_;
  std::vector<UnitPlace> places_;               ///< of parameters_
  std::vector<nn::NamedParameter> parameters_;  ///< all
  LeftGradients left_;
  nn::Turn turn_;
  std::vector<bool> trained_;                         ///< of those: since the step began
  std::vector<nn::GradientDispatcher*> dispatchers_;  ///< theirs, where they can have gradients; live as long as the tensors
  UsedParameters used_;
  /// Per parameter: in what autograd adds up what several uses in one pass bring, where the whole parameter is narrower.
  std::vector<std::optional<at::ScalarType>> several_in_;
  std::shared_ptr<std::vector<bool>> were_widened_;                        ///< in any pass
  std::vector<std::pair<size_t, std::optional<at::ScalarType>>> widened_;  ///< for the pass at hand, and their grad_dtype() of before

  bool running_ = false, in_backward_ = false, open_ = false;
  Drive drive_ = Drive::Loop;
  bool engine_last_ = true;                ///< what an engine said of the pass that comes
  bool last_ = true;                       ///< the pass at hand completes its step
  bool complete_ = true;                   ///< no gradients of its micro-batch, or, where it is the last, of any, come in another action of an engine
  int64_t awaited_weights_ = 0;            ///< backwards of an engine's step that have left some for later
  bool last_done_ = false;                 ///< of an engine's step: the last pass is over
  bool in_weights_ = false;                ///< an engine brings gradients that backward has left for later
  bool foretold_ = false, stays_ = false;  ///< an engine's action: what comes behind it is known; what it has gathered stays
  std::deque<int64_t> alive_forwards_;     ///< of an engine's step: passes whose backward has not ended
  bool accumulates_ = false;               ///< this backward brings gradients of ours, on some rank at least
  bool adds_within_step_ = false;          ///< a pass before this one was of the same step (no_sync), and is reduced
  bool waits_for_end_ = false;             ///< its reductions do, where ranks may use different parameters
  int64_t pass_ = 0;
  UseOrder order_;
  std::vector<bool> retired_;    ///< per unit, in this backward
  std::vector<bool> final_;      ///< per unit: reduced for the last time in this step
  std::vector<size_t> awaited_;  ///< per unit: gradients that have not come in this backward
  std::vector<size_t> due_;      ///< units whose reduction has to wait for its turn
  bool told_of_tied_ = false;
  std::optional<size_t> last_used_;
  std::map<std::optional<size_t>, size_t> followers_;  ///< of uses outside of passes
  size_t next_ = 0;                                    ///< with find_unused: units from this one on are reduced, the last first
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> brought_;  ///< by parameter: the gradient that a pass has left
  std::vector<at::Tensor> given_;  ///< by parameter: of what was put aside, what the program has put there; with one shard, whose slice is the whole
  std::vector<at::Tensor> aside_;  ///< per parameter, in a loop's backward: what grad() held
  std::vector<bool> zeroed_;       ///< per parameter: zero_grad has left zeros of what was held, so optimizers go on, though nobody uses it

  /// Under no_sync, where whole gradients wait.
  struct Held {
    at::Tensor guard;  ///< stands in grad() meanwhile: zero_grad is seen, and whoever would step or clip is refused
    at::Tensor own;    ///< what grad() held before
  };
  std::vector<Held> held_;

  nn::PassWatch backward_;  // goes before the others, which what it calls uses
  Attachment hooks_;
};

}  // namespace tessera
