#include "tessera/nn/bucketed_step.h"

#include <algorithm>
#include <optional>
#include <ranges>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/leave_in_order.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/sharing.h"

// Collectives of a group meet by their order, and ranks may come by their gradients in different orders. So the order is the plan's and never that of arrival:
// a bucket that is complete waits until all before it have started. For the same reason a rank never stops in the middle of a step: what is wrong with its
// gradients is told once all collectives of the step have been made, to all ranks alike where the plain loop cannot know that they would find out themselves.
// Three moments of the dispatcher drive it: what a gradient adds to is set aside before it arrives, it is brought into its bucket when it has accumulated, and
// counted when it is final.

namespace tessera {

BucketedStep::BucketedStep(GradientSynchronizer& self, nn::Holds holds, torch::nn::Module& module, Options options)
    : parameters_(floating_parameters(options.technique, module, options.only)),
      trained_(parameters_.size(), true),
      bucket_site_(options.site + ".bucket"),
      carried_(parameters_.size()),
      arrived_(parameters_.size(), false),
      gradient_writes_(parameters_.size()),
      left_writes_(parameters_.size()),
      given_(parameters_.size()),
      self_(self),
      module_(module),
      options_(std::move(options)),
      forms_(parameters_),
      late_(module, options_.only),
      bucket_of_(parameters_.size()),
      used_(options_.technique, parameters_),
      protocol_(options_.technique, std::move(holds), nn::Turn(parameters_.front().name),
                {.open = [this](bool plain) { open(plain); },
                 .begin_pass = [this](bool last) { begin_pass(last); },
                 .end_pass = [this](bool last, bool complete) { end_pass(last, complete); },
                 .complete = [this] { complete(); },
                 .abandon = [this] { abandon(); },
                 .plain_loop_refusal = options_.phase   ? "the engine whose phase it follows (DdpOptions::phase) calls begin_step before"
                                       : options_.relay ? "who relays its gradients (HostGradients) calls begin_step before"
                                                        : ""}) {
  require(!options_.relay || (!options_.average && !options_.find_unused_parameters), options_.technique,
          ": relay: gradients that leave as they come are sums that every parameter has a term in; leave out average and find_unused_parameters");
  require(!options_.reduce_dtype || *options_.reduce_dtype == at::kFloat || *options_.reduce_dtype == at::kDouble, options_.technique,
          ": reduce_dtype = ", *options_.reduce_dtype, ": gradients are summed in fp32 or fp64, or (unset) in each parameter's own dtype");
  nn::assign_paths(module_);
  int place = 0;  // among those that share a batch
  for (const comm::Group& group : options_.groups) place += std::exchange(num_ranks_, num_ranks_ * group.size()) * group.rank();
  drops_apart_ = nn::drop_apart(module_, place, num_ranks_);
  std::erase_if(options_.groups, [](const comm::Group& group) { return group.size() == 1; });
  refuse_slices();
  nn::require_same_parts(options_.technique, parameters_, options_.groups);
  if (options_.average) ranks_of_mean_ = nn::ranks_of_mean(options_.technique, module_, parameters_, num_ranks_, active());
  for (const nn::NamedParameter& parameter : parameters_) {
    const auto taken_up_in = active() ? std::nullopt : taken_up_alone_in(parameter.tensor);
    hooks_.add(nn::GradientDispatcher::of(parameter.tensor).claim(&self_, taken_up_in ? std::optional(nn::TakenUp{taken_up_in}) : std::nullopt));
  }
  if (active()) {
    refuse_renormalized(options_.technique, module_, parameters_);
    left_ = LeftGradients(parameters_);
    listen();
    return;
  }
  if (options_.relay) relay_alone();
}

/// Gradients that meet no other rank's have no bucket: reduce_dtype is what micro-batches are added up in on one rank, too.
std::optional<at::ScalarType> BucketedStep::taken_up_alone_in(const at::Tensor& parameter) const {
  const at::ScalarType dtype = summed_dtype(parameter, options_.reduce_dtype);
  return dtype == parameter.scalar_type() || !parameter.is_leaf() ? std::nullopt : std::optional(dtype);
}

/// Where gradients meet no other rank's, they go as they come.
void BucketedStep::relay_alone() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    hooks_.add(nn::GradientDispatcher::of(parameters_[i].tensor).listen([this, i](const at::Tensor&) {
      if (!synchronizes(i)) return;
      protocol_.require_stated_step(parameters_[i].name);
      give_away(i);
    }));
  }
}

/// What fully_shard holds is not whole: ranks would not even agree on its sizes.
void BucketedStep::refuse_slices() const {
  const nn::NamedParameter& first = parameters_.front();
  const GradientSynchronizer* const owner = nn::owner_of(first.tensor);
  if (owner == nullptr || owner->norm_group().size() == 1) return;
  require(std::ranges::none_of(owner->updated(), [&](const auto& updated) { return updated.tensor.is_same(first.tensor); }), options_.technique, ": '",
          first.name, "' is a slice, of a module that fully_shard holds; call unshard(model) first, while what fully_shard returned is alive");
}

void BucketedStep::listen() {
  for (const comm::Group& group : options_.groups) hooks_.add(group.synchronize_in_backward());
  if (!options_.phase) options_.phase = own_phase_ = std::make_shared<nn::StepPhase>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    nn::GradientDispatcher& dispatcher = nn::GradientDispatcher::of(parameters_[i].tensor);
    hooks_.add(Attachment([tensor = parameters_[i].tensor, own = own_phase_] {
      if (auto* const found = nn::GradientDispatcher::find(tensor); found && own) found->unfollow(own);
    }));
    const auto mine = [this, i](auto listener) {
      return [this, i, listener](const at::Tensor&) {
        if (synchronizes(i)) (this->*listener)(i);
      };
    };
    hooks_.add(dispatcher.listen_arriving(mine(&BucketedStep::arriving)));
    hooks_.add(dispatcher.listen(mine(&BucketedStep::accumulated)));
    hooks_.add(dispatcher.listen_final(mine(&BucketedStep::final)));
  }
}

bool BucketedStep::synchronizes(size_t i) const {
  const auto* const dispatcher = nn::GradientDispatcher::find(parameters_[i].tensor);
  return dispatcher != nullptr && dispatcher->owner() == &self_;
}

void BucketedStep::set_slots(std::vector<std::vector<size_t>> slots) {
  slots_ = std::move(slots);
  for (size_t b = 0; b < slots_.size(); ++b) {
    for (const size_t i : slots_[b]) bucket_of_[i] = b;
  }
}

bool BucketedStep::is_trained(size_t bucket) const {
  return std::ranges::any_of(slots_[bucket], [&](size_t i) { return trained_[i]; });
}

bool BucketedStep::is_last_round() const { return !options_.each_micro_batch || (protocol_.calls().is_last() && protocol_.calls().is_complete()); }

void BucketedStep::before(ActionKind action, const MicroBatchPosition& position) {
  protocol_.before(action, position);
  in_action_ = action != ActionKind::Forward;
  // Also where an action brings gradients by no pass at all: those of weights that were left for later.
  if (in_action_ && own_phase_) own_phase_->last_micro_batch = protocol_.calls().is_last() || options_.each_micro_batch;
}

void BucketedStep::after(ActionKind action) {
  protocol_.after(action);
  in_action_ = false;
}

void BucketedStep::follow_trained() {
  trained_ = trained_parameters(parameters_, &self_);
  used_.want(trained_);
}

void BucketedStep::open(bool plain) {
  const at::NoGradGuard no_grad;
  plain_ = plain;
  if (!plain) clear_gradients();
  if (!active()) return;
  drop_reductions();
  forms_.require_same(options_.technique, parameters_);
  follow_trained();
  starts_early_ = std::ranges::all_of(options_.groups, [&](const comm::Group& group) {
    return group.in_backward().may_start_early(/*ordered=*/!plain, /*same_graph=*/!options_.find_unused_parameters);
  });
  used_.clear();
  arrived_.assign(parameters_.size(), false);
  carried_.assign(parameters_.size(), {});
  given_.assign(parameters_.size(), {});
  waits_ = false;
  statistics_ = {};
  in_action_ = false;
  prepare();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (trained_[i]) nn::GradientDispatcher::of(parameters_[i].tensor).follow(options_.phase);
  }
  round_ = 0;
  begin_round();
}

/// A round ends with a reduction of every bucket: a micro-batch, or a step. To the dispatchers, which announce a gradient once a step, each is a step.
void BucketedStep::begin_round() {
  if (own_phase_) {
    ++own_phase_->step;
    own_phase_->last_micro_batch = true;
  }
  launched_ = 0;
  finals_.clear();
  overtaken_.assign(parameters_.size(), false);
  missing_.clear();
  for (const auto& slots : slots_) missing_.push_back(std::ranges::count_if(slots, [&](size_t i) { return trained_[i]; }));
  if (!plain_) offer_places();  // in the plain loop only within a backward pass: a forward pass may be one whose gradients come in another step, or twice
}

void BucketedStep::begin_pass(bool last) {
  left_.refuse(options_.technique, parameters_);
  last_pass_ = last;
  forms_.require_same(options_.technique, parameters_);
  if (own_phase_) own_phase_->last_micro_batch = last || (in_action_ && options_.each_micro_batch);
  if (plain_) offer_places();
}

void BucketedStep::end_pass(bool last, bool complete) {
  if (!active()) return;
  if (plain_) withdraw_places();
  waits_ = plain_ && !last;
  if (!in_action_ || !options_.each_micro_batch || (last && complete)) return;
  launch_rest();
  ++round_;
  begin_round();
}

/// Lets gradients be computed where they are reduced.
void BucketedStep::offer_places() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const auto& [name, tensor, aliases] = parameters_[i];
    if (!trained_[i] || summed_dtype(tensor, options_.reduce_dtype) != tensor.scalar_type()) continue;
    // Two users' gradients are summed elsewhere, and come to a bucket that the one with the place may still hold: one that gives way would be made twice.
    if (options_.gives_way && !aliases.empty()) continue;
    nn::GradientDispatcher::of(tensor).offer_place([this, i] {
      complete_earlier_round();
      if (!options_.relay) return place(i);
      const MemoryScope scope(MemoryCategory::Gradients);
      return at::empty_like(parameters_[i].tensor.detach());  // who computes in place may round otherwise than who does not
    });
  }
}

void BucketedStep::withdraw_places() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (trained_[i]) nn::GradientDispatcher::of(parameters_[i].tensor).withdraw_place();
  }
}

void BucketedStep::arriving(size_t i) {
  const std::string& name = parameters_[i].name;
  protocol_.arriving(name);
  require(trained_[i], options_.technique, ": '", name, "' was unfrozen within a step; change requires_grad between steps");
  require(launched_ <= bucket_of_[i] && !overtaken_[i], options_.technique, ": '", name,
          "' got another gradient after its bucket was reduced; run each backward pass of a step but the last under no_sync(), or put before_micro_batch and "
          "after_micro_batch around each micro-batch of a step, and begin_step before each step");
  complete_earlier_round();  // before there is a gradient: handing over a sum sets grad()
  settle(i);
  arrived_[i] = true;
}

bool BucketedStep::drop_cleared(size_t i) {
  if (!carried_[i].defined() || !gradient_writes_.cleared(i, parameters_[i], options_.technique)) return false;
  carried_[i].reset();
  given_[i].reset();
  return true;
}

void BucketedStep::note_given(size_t i, const at::Tensor& gradient) {
  if (plain_ && gradient.defined() && !gradient.is_meta() && !left_writes_.is(i, gradient)) given_[i] = gradient;
}

/// What is in their place now is no program's.
void BucketedStep::see_left() {
  for (size_t i = 0; plain_ && i < parameters_.size(); ++i) left_writes_.see(i, parameters_[i].tensor.grad());
}

void BucketedStep::refuse_gradients_that_wait(const std::string& who) const {
  for (size_t i = 0; waits_ && i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    const bool waits = arrived_[i] && gradient.defined() && !gradient_writes_.zeroed(i, gradient);
    require(!waits, gradient_that_waits(who, parameters_[i].name));
  }
}

void BucketedStep::refuse_given_apart() {
  const std::string name = site("given");
  const comm::CallSite scope(name);
  tessera::refuse_given_apart(options_.technique, parameters_, given_, options_.groups);
  given_.assign(parameters_.size(), {});
}

void BucketedStep::accumulated(size_t i) {
  require_summable(options_.technique, parameters_[i]);
  if (options_.relay) {
    if (!options_.phase->last_micro_batch) give_away(i);
  } else if (!is_awaited(i)) {
    take(i);
  }
  if (plain_) gradient_writes_.see(i, parameters_[i].tensor.grad());
  used_.mark(i);
}

/// Of a micro-batch that is not reduced, or of one rank alone.
void BucketedStep::give_away(size_t i) {
  const at::Tensor gradient = std::exchange(parameters_[i].tensor.mutable_grad(), at::Tensor());
  if (gradient.defined()) options_.relay->keep(parameters_[i].tensor, gradient);
}

/// Into its bucket, with what was given away before.
void BucketedStep::bring(size_t i) {
  take(i);
  if (options_.relay) options_.relay->add_kept(parameters_[i].tensor, parameters_[i].tensor.grad());
}

/// Sums leave as they come.
void BucketedStep::pass_on(size_t bucket) {
  for (const size_t i : slots_[bucket]) {
    if (!trained_[i]) continue;
    options_.relay->keep(updated(i), hand_over(i, /*has_gradient=*/true));
    for (const at::Tensor& tensor : {updated(i), parameters_[i].tensor}) set_gradient(tensor, {});
  }
  release(bucket);
}

bool BucketedStep::advance_on(size_t bucket) {
  if (!advance(bucket)) return false;
  if (options_.relay) pass_on(bucket);
  return true;
}

void BucketedStep::final(size_t i) {
  overtaken_[i] = !options_.relay && !options_.gives_way && is_awaited(i);
  bring(i);
  if (plain_) gradient_writes_.see(i, parameters_[i].tensor.grad());
  finals_.push_back(static_cast<int64_t>(i));
  --missing_[bucket_of_[i]];
  while (starts_early_ && launched_ < missing_.size() && missing_[launched_] == 0) launch_next();
}

/// Starts the first bucket that has not been. On every rank in the same order, whatever order its gradients came in.
void BucketedStep::launch_next() {
  const size_t bucket = launched_;
  if (is_trained(bucket)) {
    const comm::CallSite site(bucket_site_);
    const at::NoGradGuard no_grad;
    if (options_.one_at_a_time) advance_newest();
    for (const size_t i : slots_[bucket]) {
      if (trained_[i]) collect(i);
    }
    if (divides_terms(bucket)) {
      for (const size_t i : slots_[bucket]) {
        if (trained_[i]) place(i).data().div_(ranks_of_mean_);  // past the version, by which a clear of the program's is known (gradient_writes_)
      }
    }
    if (start(bucket)) {
      under_way_.push_back(bucket);
    } else if (options_.relay) {
      pass_on(bucket);
    }
  }
  ++launched_;
}

/// For a mean, before they meet: a sum of fp16 may be beyond its range where the mean is not.
bool BucketedStep::divides_terms(size_t bucket) const {
  return options_.average && is_linear() && summed_dtype(parameters_[slots_[bucket].front()].tensor, options_.reduce_dtype) == at::kHalf;
}

/// Also of gradients that were not announced as final: they came in an earlier micro-batch, or not at all.
void BucketedStep::collect(size_t i) {
  if (missing_[bucket_of_[i]] > 0) {
    const bool given_away = options_.relay != nullptr;
    if (!given_away && arrived_[i] && is_first_round() && !parameters_[i].tensor.grad().defined()) used_.mark(i, false);  // cleared since
    settle(i);
  }
  bring(i);
}

void BucketedStep::launch_rest() {
  while (launched_ < slots_.size()) launch_next();
}

void BucketedStep::advance_newest() {
  if (under_way_.empty()) return;
  const comm::CallSite site(bucket_site_);
  const comm::ExposedTime::Scope exposed(statistics_.exposed, device());
  if (advance_on(under_way_.back())) under_way_.pop_back();
}

/// Reductions of the round before went on under this one's forward.
void BucketedStep::complete_earlier_round() {
  if (launched_ == 0) advance_newest();
}

void BucketedStep::complete() {
  if (!active()) return;
  withdraw_places();
  const at::NoGradGuard no_grad;
  std::optional<comm::ExposedTime::Scope> exposed(std::in_place, statistics_.exposed, device());
  statistics_.num_early = statistics_.num_collectives;
  begin_completion();
  // All of the step's collectives are made even where a gradient is missing, so that no other rank waits for one that refuses to go on.
  launch_rest();
  std::vector<bool> used = trained_;
  std::optional<StepWords> told;
  if (options_.find_unused_parameters) {
    told = own_words();
    used = used_anywhere(*told);
    if (told->failed) {
      undo_all();
      throw Error(options_.technique +
                  ": the backward pass of another rank ended by an exception, and the sums of this one lack its gradients; they were dropped");
    }
    learn_used(used);
  }
  complete_reductions();
  exposed.reset();
  for (size_t b = 0; options_.average && b < slots_.size(); ++b) {
    if (is_trained(b) && !divides_terms(b)) sum(b).div_(ranks_of_mean_);
  }
  for (size_t i = 0; !options_.relay && i < parameters_.size(); ++i) {
    if (!trained_[i]) continue;
    const at::Tensor before = std::exchange(carried_[i], {});
    at::Tensor gradient = hand_over(i, used[i] || before.defined());
    if (!before.defined()) continue;
    gradient.add_(before);
    used_.mark(i);
  }
  complete_step();
  if (plain_ && !options_.find_unused_parameters) {
    const std::string name = site("unused");
    const comm::CallSite scope(name);
    told = used_.refuse_unused_anywhere(options_.groups, own_words());
  }
  if (plain_ && told->given) refuse_given_apart();
  if (plain_) compare(told->written, told->unlike_writes);
  see_left();
  if (options_.buffers == BufferBroadcast::EachStep) share_buffers_of_step(told);
  if (!told) used_.refuse_unused(options_.groups.front());
  late_.refuse(options_.technique);
}

StepWords BucketedStep::own_words() {
  const bool shares = options_.buffers == BufferBroadcast::EachStep;
  return {.written = were_written(), .given = drop_zeros(given_), .writes = plain_ ? count_writes() : 0, .buffers = shares ? hash_of_buffers(module_) : 0};
}

/// Ranks whose buffers differ in size would bring messages of their own. Without words of the step they ask.
void BucketedStep::share_buffers_of_step(const std::optional<StepWords>& told) {
  if (!told || told->unlike_buffers) {
    const std::string name = site("buffers");
    const comm::CallSite scope(name);
    require_same_buffers(module_, options_.groups, /*found=*/told.has_value());
  }
  share_buffers();
}

/// In rounds over the buckets, so that a bucket's next collective runs while the others' results are worked on.
void BucketedStep::complete_reductions() {
  const comm::CallSite site(bucket_site_);
  while (!under_way_.empty()) {
    std::vector<size_t> going_on;
    for (const size_t bucket : under_way_) {
      if (!advance_on(bucket)) going_on.push_back(bucket);
    }
    under_way_ = std::move(going_on);
  }
}

std::vector<bool> BucketedStep::used_anywhere(StepWords& words) {
  const std::string name = site("unused");
  const comm::CallSite scope(name);
  std::vector<bool> used = used_.anywhere(options_.groups, &words);
  for (size_t i = 0; i < used.size(); ++i) {
    if (used[i]) used_.mark(i);
  }
  return used;
}

void BucketedStep::drop_reductions() {
  const comm::LeaveInOrder leaving;
  for (const size_t bucket : std::exchange(under_way_, {})) drop(bucket);
}

/// The other ranks have failed at the same place, or will not get there. Those that may use other parameters have started other reductions by then, which what
/// comes next would meet.
void BucketedStep::abandon() {
  if (!active()) return;
  if (!options_.find_unused_parameters || !plain_ || !last_pass_ || !starts_early_) return undo();
  tell_of_failure();
  undo_all();
}

/// All of the step's collectives are started, for nothing; a rank whose pass did not fail hears of it where it asks what the others used.
void BucketedStep::tell_of_failure() noexcept {
  try {
    const at::NoGradGuard no_grad;
    launch_rest();
    StepWords words = own_words();
    words.failed = true;
    used_anywhere(words);
  } catch (...) {  // who has failed is known; that others cannot hear of it, they will notice
  }
}

/// Where all were brought into their buckets: zeros of what had not come are ours, and no zero_grad of the program's.
void BucketedStep::undo_all() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!trained_[i] || arrived_[i] || bucket_of_[i] >= launched_) continue;
    gradient_writes_.see(i, parameters_[i].tensor.grad());
    arrived_[i] = true;
  }
  undo();
}

void BucketedStep::undo() {
  waits_ = false;
  drop_reductions();
  withdraw_places();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!trained_[i]) continue;
    restore(i);
    if (plain_ && !given_[i].defined()) left_writes_.see(i, parameters_[i].tensor.grad());
  }
}

void BucketedStep::let_go() {
  drop_reductions();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (synchronizes(i)) nn::GradientDispatcher::of(parameters_[i].tensor).withdraw_place();
  }
}

void BucketedStep::clear_gradients() {
  for (const nn::NamedParameter& parameter : parameters_) set_gradient(parameter.tensor, {});
}

bool BucketedStep::equalize(ReplicaStart start) {
  const std::string name = site("start");
  const comm::CallSite scope(name);
  bool lie_alike = true;
  for (const comm::Group& group : options_.groups | std::views::reverse) lie_alike &= equalize_replicas(module_, group, start, options_.only);
  return lie_alike;
}

/// From the first rank of all: first to its peers in the last group, then by each of those within the group before.
void BucketedStep::share_buffers() {
  if (options_.buffers == BufferBroadcast::Never) return;
  const std::string name = site("buffers");
  const comm::CallSite scope(name);
  for (const comm::Group& group : options_.groups | std::views::reverse) broadcast_buffers(module_, group);
}

}  // namespace tessera
