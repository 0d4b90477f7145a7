#include "tessera/fsdp/sharded_step.h"

#include <algorithm>

#include "tessera/comm/call_site.h"
#include "tessera/core/error.h"
#include "tessera/nn/backward_pass.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/operator_watch.h"

// Between steps grad() is the program's and has the slice's shape; autograd would add a whole gradient to it. So what the program has is put aside when
// backward begins, whole gradients go to their unit's buffer and vanish from grad() one by one, and in the end what was reduced is added to what was put aside.
// A backward pass that fails ends nothing: the engine lets go of the object that it was to call, and by that the step learns of it before the program does.
// Which collectives a pass makes follows from its kind and from the order of units, never from which gradients came: those may differ from rank to rank.

namespace tessera {
namespace {

std::vector<UnitPlace> places_of(const ShardedUnits& units) {
  std::vector<UnitPlace> places;
  for (size_t unit = 0; unit < units.size(); ++unit) {
    for (size_t flat = 0; flat < units.flats(unit).size(); ++flat) {
      for (size_t index = 0; index < units.flats(unit)[flat].parameters().size(); ++index) places.push_back({unit, flat, index});
    }
  }
  return places;
}

std::vector<nn::NamedParameter> parameters_at(const ShardedUnits& units, const std::vector<UnitPlace>& places) {
  std::vector<nn::NamedParameter> parameters;
  for (const UnitPlace& place : places) parameters.push_back(units.flats(place.unit)[place.flat].parameters()[place.index]);
  return parameters;
}

/// No types are promoted with those of 8 bits.
bool is_wider(at::ScalarType dtype, at::ScalarType than) {
  return dtype != than && c10::elementSize(than) > 1 && c10::elementSize(dtype) > 1 && at::promote_types(dtype, than) == dtype;
}

std::string held_message(const std::string& name) {
  return detail::concat(
      "fully_shard: the gradient of '", name,
      "' waits whole on this rank, where no_sync() left it (reduce_each_micro_batch = false), and has met no other rank's; call backward once "
      "without no_sync() before the optimizer steps, gradients are clipped or read, or give it up by zero_grad()");
}

}  // namespace

void refuse_whole_gradient(const nn::NamedParameter& parameter, const at::Tensor& gradient, at::IntArrayRef slice) {
  require(
      !gradient.defined() || gradient.sizes() == slice, "fully_shard: the gradient of '", parameter.name, "' was made ",
      gradient.defined() ? gradient.sizes() : at::IntArrayRef(),
      " by the program (before fully_shard, by mutable_grad(), or of torch::autograd::grad), where this rank has the slice ", slice,
      ": it is of this rank's samples alone, and has met no other rank's; clear what was there before by zero_grad(), let backward bring gradients, or sum it "
      "over the ranks and put its rows (nn::slice_of) there");
}

ShardedStep::ShardedStep(ShardedUnits& units, const comm::Group& group, const FullyShardOptions& options, GradientSynchronizer* owner, Callbacks callbacks)
    : units_(units),
      group_(group),
      replicas_(options.replicate),
      reduce_each_(options.reduce_each_micro_batch),
      find_unused_(options.find_unused_parameters),
      misses_unused_(!find_unused_ && group_.size() * replicas_.size() > 1),  // one rank has nobody who would wait
      callbacks_(std::move(callbacks)),
      places_(places_of(units)),
      parameters_(parameters_at(units, places_)),
      turn_(parameters_.front().name),
      trained_(parameters_.size()),
      dispatchers_(parameters_.size()),
      used_("fully_shard", parameters_),
      several_in_(parameters_.size()),
      were_widened_(std::make_shared<std::vector<bool>>(parameters_.size(), false)),
      retired_(units.size()),
      final_(units.size()),
      awaited_(units.size()),
      given_(parameters_.size()),
      aside_(parameters_.size()),
      zeroed_(parameters_.size()) {
  if (group_.size() == 1 && replicas_.size() > 1) left_ = LeftGradients(parameters_);  // of several shards the shape tells
  listen(owner);
  follow_requires_grad(/*too=*/false);
}

/// What is frozen or trained may change from step to step, and `too` within the forwards of one: a critic is frozen for its actor's term of a loss alone.
void ShardedStep::follow_requires_grad(bool too) {
  units_.follow_requires_grad(too);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    trained_[i] = (too && trained_[i]) || (dispatchers_[i] != nullptr && parameters_[i].tensor.requires_grad());
  }
  used_.want(trained_);
}

void ShardedStep::listen(GradientSynchronizer* owner) {
  // Gathers and reductions follow calls; a wrapper beside this one, whose reductions would follow gradients, starts them when backward is done.
  for (const comm::Group& group : {group_, replicas_}) {
    if (group.size() > 1) hooks_.add(group.synchronize_in_backward());
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    if (!tensor.is_floating_point() && !tensor.is_complex()) continue;
    auto& dispatcher = nn::GradientDispatcher::of(tensor);
    dispatchers_[i] = &dispatcher;
    // Autograd's leaf is the whole parameter: each gradient would be rounded to its type, and several added up in it, before the wider sum sees them. So each
    // is left as it came, and who knows that a pass brings several has it widen them (widen_sums).
    const FlatParameters::Dtypes& dtypes = flat_of(places_[i]).dtypes();
    const bool sums_wider = is_wider(dtypes.summed, dtypes.gathered);
    hooks_.add(dispatcher.claim(owner, sums_wider ? std::optional(nn::TakenUp{}) : std::nullopt));
    const at::ScalarType widest = is_wider(dtypes.kept, dtypes.summed) ? dtypes.kept : dtypes.summed;
    if (is_wider(widest, dtypes.gathered)) {
      several_in_[i] = widest;
      // What libtorch takes by itself follows a tensor's type; what was once set stays, also where the tensor is a whole of another type again.
      hooks_.add(Attachment([tensor, own = tensor.grad_dtype(), widened = were_widened_, i] {
        if ((*widened)[i]) tensor.set_grad_dtype(own);
      }));
    }
    // What zero_grad left in grad() has the slice's shape: it has to be gone before autograd adds a whole gradient to it.
    hooks_.add(dispatcher.listen_arriving([this](const at::Tensor&) {
      if (nn::backward_pass() >= 0) begin_backward();
    }));
    hooks_.add(dispatcher.listen([this, i](const at::Tensor&) { accumulated(i); }));
    hooks_.add(Attachment([tensor, &dispatcher] { dispatcher.withdraw_place(); }));
  }
}

/// Lets gradients be computed where they are reduced. A unit's buffer is made when the first of its places is taken.
void ShardedStep::offer_places() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!trained_[i]) continue;
    if (flat_of(places_[i]).offers_place(places_[i].index)) {
      dispatchers_[i]->offer_place([this, i] { return flat_of(places_[i]).place(places_[i].index); });
    } else {
      dispatchers_[i]->withdraw_place();
    }
  }
}

/// Which parameters the pass at hand may bring several gradients of, that autograd would add up in fewer bits than they are kept in.
std::vector<size_t> ShardedStep::summed_too_narrow() const {
  std::vector<size_t> narrow;
  std::vector<at::Tensor> leaves;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& tensor = parameters_[i].tensor;
    if (!several_in_[i] || !tensor.requires_grad() || tensor.grad_dtype() == several_in_[i] || !nn::accumulates_into(tensor)) continue;
    narrow.push_back(i);
    leaves.push_back(tensor);
  }
  if (leaves.empty()) return {};
  const std::vector<bool> several = nn::met_several_times(leaves);
  std::vector<size_t> summed;
  for (size_t k = 0; k < narrow.size(); ++k) {
    if (several[k]) summed.push_back(narrow[k]);
  }
  return summed;
}

/// A layer that is used several times in a pass brings as many gradients, of which nobody sees more than autograd's sum.
void ShardedStep::widen_sums() {
  for (const size_t i : summed_too_narrow()) {
    if (!trained_[i]) continue;
    const at::Tensor& leaf = parameters_[i].tensor;
    widened_.emplace_back(i, leaf.grad_dtype());
    (*were_widened_)[i] = true;
    leaf.set_grad_dtype(several_in_[i]);
    dispatchers_[i]->withdraw_place();  // which is narrower
  }
}

void ShardedStep::foresee_sums() {
  if (in_backward_ && !aborted()) return;  // a pass inside of another belongs to it
  if (!summed_too_narrow().empty()) begin_backward();
}

void ShardedStep::leave_sums_as_they_were() {
  for (const auto& [i, before] : std::exchange(widened_, {})) parameters_[i].tensor.set_grad_dtype(before);
}

void ShardedStep::withdraw_places() {
  for (auto* const dispatcher : dispatchers_) {
    if (dispatcher != nullptr) dispatcher->withdraw_place();
  }
}

void ShardedStep::begin(Drive drive) {
  const nn::Unwatched quietly;
  if (drive == Drive::Loop) refuse_frozen_that_wait();
  put_back();
  if (drive == Drive::Engine || held_.empty()) units_.clear_sums();
  const bool stays = drive == Drive::Loop;  // what a forward before has left for this backward
  units_.release_all(stays);                // what a step left that did not end
  follow_requires_grad(/*too=*/false);
  if (drive == Drive::Loop && group_.rank() + replicas_.rank() == 0 && !std::exchange(told_of_tied_, true)) warn_of_tied("fully_shard", parameters_);
  if (drive == Drive::Engine) {
    held_.clear();
    used_.clear();
    zeroed_.assign(parameters_.size(), false);
    for (const auto& parameter : parameters_) set_gradient(parameter.tensor, {});
  }
  for (size_t unit = 0; unit < units_.size(); ++unit) units_.take_in(unit);  // refuses before any is shown whole, which nobody would undo
  for (size_t unit = 0; unit < units_.size(); ++unit) units_.show_whole(unit);
  units_.statistics() = {};
  final_.assign(units_.size(), false);
  drive_ = drive;
  running_ = engine_last_ = last_ = complete_ = true;
  close();
  last_done_ = in_weights_ = foretold_ = stays_ = false;
  awaited_weights_ = 0;
  alive_forwards_.clear();
  end_pass(stays);
}

/// Forwards may run ahead: what one leaves gathered for a backward is there for whoever comes next.
void ShardedStep::before(ActionKind action, const MicroBatchPosition& position) {
  stays_ = position.stays && !find_unused_;
  foretold_ = stays_ || position.coming.has_value();
  order_.follow_with(!position.coming                               ? UseOrder::Follows::Unknown
                     : position.coming->part != position.part       ? UseOrder::Follows::Nothing
                     : position.coming->kind == ActionKind::Forward ? UseOrder::Follows::Forward
                                                                    : UseOrder::Follows::Backward);
  switch (action) {
    case ActionKind::Forward:
      order_.begin_forward();
      alive_forwards_.push_back(++pass_);
      return;
    case ActionKind::Backward:
      engine_last_ = last_ = position.last;
      awaited_weights_ += position.weights_later ? 1 : 0;
      complete_ = last_ ? awaited_weights_ == 0 : !position.weights_later;
      return;
    case ActionKind::Weights:
      --awaited_weights_;
      in_weights_ = complete_ = true;
      last_ = position.last;
      return;
  }
}

void ShardedStep::expect(ActionKind action) {
  if (!driven()) return;
  order_.follow_with(action == ActionKind::Forward ? UseOrder::Follows::Forward : UseOrder::Follows::Backward);
  units_.prefetch(order_);
}

void ShardedStep::after(ActionKind action) {
  if (action == ActionKind::Backward) alive_forwards_.pop_front();
  if (action == ActionKind::Forward && foretold_) {
    order_.end();
    for (size_t unit = 0; stays_ && unit < units_.size(); ++unit) units_.keep(unit);
  }
  if (action != ActionKind::Weights) return;
  in_weights_ = false;
  if (!reduce_each_ && !last_) return;
  for (size_t unit = units_.size(); unit-- > 0;) {
    if (!final_[unit]) reduce(unit);
  }
}

bool ShardedStep::aborted() const { return in_backward_ && backward_.is_over(); }

void ShardedStep::recover() {
  if (!aborted() || drive_ == Drive::Engine) return;
  if (accumulates_) {
    put_back();
    used_.clear();
    units_.clear_sums();
    adds_within_step_ = false;
  }
  leave();
}

/// Before the program sees the exception, the gradients of before come back.
void ShardedStep::pass_failed() noexcept {
  try {
    recover();
  } catch (...) {  // another exception is on its way; the next forward tries again
  }
}

void ShardedStep::pause(bool stays) {
  if (!running_ || driven() || in_backward_) return;
  units_.settle();
  for (size_t unit = 0; stays && unit < units_.size(); ++unit) units_.keep(unit);
  end_step(stays);
  open_ = true;
}

void ShardedStep::resume() {
  if (!running_ || driven()) return;
  for (size_t unit = 0; unit < units_.size(); ++unit) units_.show_whole(unit);
}

void ShardedStep::restart_order() {
  if (running_ && !driven() && !in_backward_) order_.begin_forward();
}

void ShardedStep::abandon() noexcept {
  try {
    backward_.forget();
    put_back();
    give_back_held();
    withdraw_places();
    for (size_t unit = 0; unit < units_.size(); ++unit) units_.show_slices(unit);
  } catch (...) {
  }
  running_ = false;
}

void ShardedStep::leave() { end_step(/*stays=*/false); }

void ShardedStep::end_step(bool stays) {
  const nn::Unwatched quietly;
  running_ = foretold_ = stays_ = false;
  withdraw_places();
  end_pass(stays);
  for (size_t unit = 0; unit < units_.size(); ++unit) units_.show_slices(unit);
}

void ShardedStep::use(size_t unit, UseOrder& order) {
  const bool noted = in_backward_ && units_.held(unit);
  agree_on(unit, order);
  units_.acquire(unit);
  if (noted) return;
  order.saw(unit);
  units_.prefetch(order);
}

void ShardedStep::agree_on(size_t unit, const UseOrder& order) {
  if (driven() || (in_backward_ && units_.held(unit))) return;
  const size_t* const foretold = order.next(0);
  const bool again = std::exchange(last_used_, unit) == unit;
  if (!again && (foretold == nullptr || *foretold != unit)) units_.agree_on(unit);
}

void ShardedStep::agree_on(size_t unit) {
  const std::optional<size_t> before = std::exchange(last_used_, unit);
  if (before == unit) return;
  const auto found = followers_.find(before);
  if (found == followers_.end() || found->second != unit) units_.agree_on(unit);
  followers_[before] = unit;
}

void ShardedStep::begin_backward() {
  if (aborted()) {
    require(drive_ == Drive::Loop, "fully_shard: a backward pass of this step ended by an exception; call begin_step and forward before the next");
    recover();
  }
  if (in_backward_) return;           // a pass inside of another belongs to it
  if (!running_) begin(Drive::Loop);  // over a graph that was kept
  in_backward_ = true;
  if (drive_ == Drive::Loop) follow_requires_grad(/*too=*/true);
  accumulates_ = accumulates();
  last_ = engine_last_ && !callbacks_.held();
  waits_for_end_ = !may_start_early();
  order_.begin_backward();
  retired_.assign(units_.size(), false);
  due_.clear();
  next_ = units_.size();
  std::ranges::fill(awaited_, 0);
  for (size_t i = 0; i < places_.size(); ++i) awaited_[places_[i].unit] += trained_[i] ? 1 : 0;
  for (size_t unit = 0; unit < units_.size(); ++unit) units_.show_whole(unit);
  if (drive_ == Drive::Loop && accumulates_) put_aside();
  if (accumulates_) widen_sums();
  backward_.begin(turn_, [this] { end_backward(); }, [this] { pass_failed(); });
}

/// Whether reductions come at one place among the collectives of others over the same ranks, though ranks use different parameters.
bool ShardedStep::may_start_early() const {
  const auto may = [this](const comm::Group& group) {
    return group.size() == 1 || group.in_backward().may_start_early(/*ordered=*/drive_ == Drive::Engine, /*same_graph=*/!find_unused_);
  };
  return may(group_) && may(replicas_);
}

/// Whether the pass is there for gradients of ours: backward() is, autograd::grad and backward() for other inputs are not. What arrives does not tell, for that
/// may differ from rank to rank.
bool ShardedStep::accumulates() const {
  bool trains = false;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (trained_[i] && nn::accumulates_into(parameters_[i].tensor)) return true;
    trains |= trained_[i];
  }
  return drive_ == Drive::Engine && !trains;
}

/// What the program has in grad() is a slice; what backward brings is whole. Passes before this one have used what it has not cleared since.
void ShardedStep::put_aside() {
  left_.refuse("fully_shard", parameters_);
  give_back_held();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!trained_[i]) continue;
    refuse_whole_gradient(parameters_[i], parameters_[i].tensor.grad(), flat_of(places_[i]).slice_sizes(places_[i].index));
    aside_[i] = parameters_[i].tensor.grad();
    given_[i] = is_given(i) ? aside_[i] : at::Tensor();
    if (reduce_each_ && !aside_[i].defined()) used_.mark(i, false);
    set_gradient(parameters_[i].tensor, {});
  }
}

/// The shape tells it of several shards.
bool ShardedStep::is_given(size_t i) const {
  const at::Tensor& gradient = parameters_[i].tensor.grad();
  return group_.size() == 1 && replicas_.size() > 1 && gradient.defined() && !nn::is_gradient_guard(gradient) &&
         (brought_.empty() || !brought_[i].lock() || brought_[i].lock().get() != gradient.unsafeGetTensorImpl());
}

void ShardedStep::note_brought(size_t i) {
  const at::Tensor& gradient = parameters_[i].tensor.grad();
  if (brought_.empty()) brought_.assign(parameters_.size(), decltype(brought_)::value_type(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>()));
  brought_[i] = decltype(brought_)::value_type(gradient.getIntrusivePtr());
}

void ShardedStep::compare_given(const std::vector<at::Tensor>& given) const {
  const comm::CallSite site("fsdp.given");
  const nn::Unwatched quietly;
  const at::NoGradGuard no_grad;
  tessera::refuse_given_apart("fully_shard", parameters_, given, {replicas_});
}

void ShardedStep::refuse_given_apart() const {
  if (group_.size() > 1 || replicas_.size() == 1) return;
  std::vector<at::Tensor> given(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (is_given(i)) given[i] = parameters_[i].tensor.grad();
  }
  drop_zeros(given);
  compare_given(given);
}

bool ShardedStep::holds_gradients() const {
  for (size_t i = 0; i < held_.size(); ++i) {
    const at::Tensor& guard = held_[i].guard;
    if (guard.defined() && parameters_[i].tensor.grad().is_same(guard) && !nn::is_cleared(guard)) return true;
  }
  return false;
}

/// grad() is the program's again. What it cleared meanwhile is forgotten.
void ShardedStep::give_back_held() {
  for (size_t i = 0; i < held_.size(); ++i) {
    const Held& held = held_[i];
    if (!held.guard.defined()) continue;
    const at::Tensor& tensor = parameters_[i].tensor;
    const bool shown = tensor.grad().is_same(held.guard), cleared = !shown || nn::is_cleared(held.guard);
    if (cleared) {
      flat_of(places_[i]).forget(places_[i].index);
      used_.mark(i, false);
      zeroed_[i] = shown;
    }
    if (shown) set_gradient(tensor, cleared ? at::Tensor() : held.own);
  }
  held_.clear();
}

void ShardedStep::put_back() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (aside_[i].defined()) set_gradient(parameters_[i].tensor, std::exchange(aside_[i], {}));
  }
  in_backward_ = false;
}

void ShardedStep::accumulated(size_t parameter) {
  const nn::Unwatched quietly;
  if (in_weights_) return take_up(parameter);
  begin_backward();
  take_up(parameter);
  const size_t unit = places_[parameter].unit;
  if (--awaited_[unit] == 0 && retire_when_complete_) retire(unit);
}

void ShardedStep::take_up(size_t parameter) {
  const auto& [name, tensor, aliases] = parameters_[parameter];
  const UnitPlace& place = places_[parameter];
  require_summable("fully_shard", parameters_[parameter]);
  const at::IntArrayRef whole = flat_of(place).layout().parameters[place.index].shape;
  require(tensor.grad().sizes() == whole, "fully_shard: '", name, "' got a gradient of shape ", tensor.grad().sizes(), " in place of ", whole,
          ": a torch::autograd::Function was given the parameter before any operator, when it was this rank's slice; let an operator use it, or the module's "
          "input with it, before. Or the forward ran in another thread than the one that called fully_shard, whose operators alone are seen; call fully_shard "
          "in the thread that runs the model");
  require(trained_[parameter], "fully_shard: '", name,
          "' was unfrozen for a part of a forward alone, and its gradient comes; let it require a gradient where backward begins, or change requires_grad "
          "between steps");
  require(!final_[place.unit], "fully_shard: '", name,
          "' got another gradient after its unit was reduced; hold no_sync(), or say before_micro_batch with last = false, for each backward pass of a step "
          "but the last, and call begin_step before each step");
  flat_of(place).take_up(place.index, tensor.grad());
  set_gradient(tensor, {});
  used_.mark(parameter);
}

/// What the next action begins with would only be gathered again.
bool ShardedStep::leaves_gathered(size_t unit) {
  const bool leaves = stays_ || (foretold_ && units_.is_due(order_, unit));
  if (leaves) units_.keep(unit);
  return leaves;
}

void ShardedStep::retire(size_t unit) {
  retired_[unit] = true;
  const bool frees = !find_unused_ || !retire_when_complete_;  // ranks that met different operators free theirs in the end
  if (frees && !leaves_gathered(unit)) units_.release(unit);
  if (!reduce_each_ && !completes()) return;
  due_.push_back(unit);
  reduce_what_is_due();
}

/// Ranks that use different parameters reduce in one order all the same, and where others have collectives in backward, behind theirs. A pass that is there for
/// gradients of something else reduces nothing.
void ShardedStep::reduce_what_is_due() {
  if (!accumulates_) return;
  if (!find_unused_) {
    for (const size_t unit : std::exchange(due_, {})) reduce(unit);
    return;
  }
  if (waits_for_end_) return;
  while (next_ > 0 && std::ranges::find(due_, next_ - 1) != due_.end()) reduce(--next_);
}

void ShardedStep::reduce(size_t unit) {
  if (!units_.trained(unit)) return;
  const bool last = completes() || drive_ == Drive::Loop;
  units_.reduce(unit, last);
  if (last) final_[unit] = true;
}

/// Units that backward did not leave by itself: those used throughout, and those that this rank did not use; the others may have.
void ShardedStep::end_backward() {
  if (last_call_) last_call_();
  for (size_t unit = units_.size(); unit-- > 0;) {
    if (!retired_[unit]) retire(unit);
  }
  if (std::exchange(waits_for_end_, false)) reduce_what_is_due();
  in_backward_ = false;
  units_.statistics().num_early = units_.statistics().num_collectives;
  if (drive_ == Drive::Loop) return complete_pass();
  if (accumulates_) last_done_ = last_;
  end_pass();
}

void ShardedStep::end_pass(bool stays) {
  in_backward_ = false;
  leave_sums_as_they_were();
  if (foretold_) {
    order_.end();
    for (size_t unit = 0; unit < units_.size(); ++unit) {
      if (!leaves_gathered(unit)) units_.release(unit);
    }
  } else {
    units_.release_all(stays);
    order_.begin_forward();
  }
  ++pass_;
  if (running_) offer_places();
}

void ShardedStep::complete_pass() {
  const nn::Unwatched quietly;
  const at::NoGradGuard no_grad;
  if (!accumulates_) {
    leave();
    open_ = true;
    return;
  }
  if (!reduce_each_ && !last_) {
    hold();
    return leave();
  }
  std::optional<StepWords> told;
  land(told);
  leave();
  adds_within_step_ = !last_;
  if (!last_) return;
  forgive_frozen();
  const UsedParameters used = used_;
  used_.clear();
  if (misses_unused_) {
    StepWords words = own_words();
    words.order = units_.take_made();
    told = used.refuse_unused_anywhere({group_, replicas_}, words);
  }
  std::vector<at::Tensor> given = std::exchange(given_, std::vector<at::Tensor>(parameters_.size()));
  if (told && told->given) compare_given(given);
  callbacks_.complete(told);
  callbacks_.done();
}

StepWords ShardedStep::own_words() {
  StepWords words = callbacks_.words();
  words.given = drop_zeros(given_);
  return words;
}

/// A unit is reduced by what is trained in it when a pass begins, so the gradient of what was frozen within a step would meet no other rank's.
void ShardedStep::refuse_frozen_that_wait() const {
  for (size_t i = 0; i < held_.size(); ++i) {
    const auto& [name, tensor, aliases] = parameters_[i];
    const at::Tensor& guard = held_[i].guard;
    const bool waits = guard.defined() && tensor.grad().is_same(guard) && !nn::is_cleared(guard);
    require(
        !waits || tensor.requires_grad(), "fully_shard: '", name, "' was frozen while its gradient waits whole on this rank, where no_sync() left it ",
        "(reduce_each_micro_batch = false); freeze between steps, behind a backward without no_sync() or a zero_grad(), or leave reduce_each_micro_batch true");
  }
}

/// Nobody misses the gradient of what was frozen since.
void ShardedStep::forgive_frozen() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i].tensor.requires_grad()) used_.mark(i);
  }
}

/// Whole gradients wait on this rank, and what stands in grad() says so to whoever takes it for a gradient.
void ShardedStep::hold() {
  held_.assign(parameters_.size(), {});
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!trained_[i]) continue;
    Held& held = held_[i];
    held.own = std::exchange(aside_[i], {});
    held.guard = nn::make_gradient_guard(flat_of(places_[i]).slice_view(places_[i].index), held_message(parameters_[i].name));
    set_gradient(parameters_[i].tensor, held.guard);
  }
}

/// Adds what was reduced to what the program had.
void ShardedStep::land(std::optional<StepWords>& told) {
  units_.finish_reductions();
  const std::vector<bool> used = used_parameters(told);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor before = std::exchange(aside_[i], {});
    const at::Tensor& tensor = parameters_[i].tensor;
    const bool zeroed = zeroed_[i];
    zeroed_[i] = false;
    const at::Tensor came = trained_[i] && (used[i] || zeroed) && tensor.requires_grad() ? flat_of(places_[i]).local_gradient(places_[i].index) : at::Tensor();
    // A pass that adds may leave a parameter out that an earlier one has used. Where it is one of the step's own, that is known; zeros that it left of what it
    // did not use say nothing.
    if ((before.defined() && !adds_within_step_) || zeroed) used_.forgive(i);
    if (before.defined() && came.defined()) before.add_(came);
    if (before.defined() || came.defined()) set_gradient(tensor, before.defined() ? before : came);
    if (!given_[i].defined()) note_brought(i);
  }
  units_.clear_sums();
  if (!misses_unused_) used_.clear();
}

/// On any rank, in the passes since used_ was cleared.
std::vector<bool> ShardedStep::used_parameters(std::optional<StepWords>& told) {
  if (misses_unused_) return std::vector<bool>(parameters_.size(), true);
  const comm::CallSite site("fsdp.unused");
  told = own_words();
  return used_.anywhere({group_, replicas_}, &*told);
}

void ShardedStep::finish() {
  const nn::Unwatched quietly;
  invariant(driven(), "ShardedStep::finish without a step of an engine's");
  const at::NoGradGuard no_grad;
  // All of the step's collectives are made even where a gradient is missing, so that no other rank waits for one that refuses to go on.
  for (size_t unit = units_.size(); unit-- > 0;) {
    if (units_.trained(unit) && !final_[unit]) units_.reduce(unit, /*last=*/true);
  }
  units_.finish_reductions();
  std::optional<StepWords> told;
  const std::vector<bool> used = used_parameters(told);
  leave();
  callbacks_.complete(told);
  forgive_frozen();
  if (misses_unused_) used_.refuse_unused(group_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (used[i] && trained_[i] && parameters_[i].tensor.requires_grad()) {
      set_gradient(parameters_[i].tensor, flat_of(places_[i]).local_gradient(places_[i].index));
      note_brought(i);
    }
  }
  callbacks_.done();
}

}  // namespace tessera
