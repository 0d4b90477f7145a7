#include "tessera/fsdp/fully_shard.h"

#include <algorithm>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "tessera/comm/call_site.h"
#include "tessera/comm/leave_in_order.h"
#include "tessera/core/error.h"
#include "tessera/fsdp/call_trigger.h"
#include "tessera/fsdp/initialize.h"
#include "tessera/fsdp/operator_trigger.h"
#include "tessera/fsdp/orphans.h"
#include "tessera/fsdp/sharded_step.h"
#include "tessera/fsdp/sharded_units.h"
#include "tessera/fsdp/unit_plan.h"
#include "tessera/fsdp/unit_tensors.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/explicit_calls.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/late_parameters.h"
#include "tessera/nn/module.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/shared_memory.h"
#include "tessera/nn/sharing.h"
#include "tessera/nn/write_watch.h"

// Here the parts meet: the plan says which parameters form a unit, units hold memory and make the collectives, the step says what is whole and what is due, and
// a trigger, by calls or by operators, tells it which unit is used. None knows the one above it. A slice looks like any other tensor: who is cut already is
// kept in a table for the process, or a second wrapper would cut slices once more.

namespace tessera {
namespace {

void check_dtype(const char* option, const std::optional<at::ScalarType>& dtype) {
  if (!dtype) return;
  require(at::isFloatingType(*dtype), "fully_shard: ", option, " = ", *dtype, " is no floating-point type; use Float, BFloat16 or Half");
}

void check_dtypes(const FullyShardOptions& options) {
  check_dtype("param_dtype", options.param_dtype);
  check_dtype("reduce_dtype", options.reduce_dtype);
  check_dtype("gradient_dtype", options.gradient_dtype);
}

void check_unit_sizes(const UnitPlan& plan, const FullyShardOptions& options) {
  if (options.unit_bytes_limit <= 0) return;
  std::vector<int64_t> bytes;
  for (const auto& unit : plan.units) bytes.push_back(gathered_bytes(unit, options));
  const auto largest = std::ranges::max_element(bytes);
  const auto& unit = plan.units[largest - bytes.begin()];
  const auto parameter = std::ranges::max_element(unit.parameters, {}, [](const nn::NamedParameter& p) { return p.tensor.numel(); });
  require(*largest <= options.unit_bytes_limit, "fully_shard: unit '", unit.name, "' (with '", parameter->name, "') alone takes ", *largest,
          " bytes while it is gathered, more than unit_bytes_limit (run.memory_limit_bytes) = ", options.unit_bytes_limit,
          "; wrap smaller modules (wrap, policy; zero.wrap), gather in a smaller type (param_dtype; precision.compute), or raise the limit");
}

/// How a module comes to calls that can be intercepted, libtorch's own layers too, which nobody derives anew.
constexpr const char* kIntercepted =
    "derive it from tessera::nn::Module, or, where it is libtorch's own, let a module that is derived so hold it and be a unit (wrap, policy), or take the "
    "layer of that name that tessera has (tessera::nn::Linear)";

/// The first of those whose calls would be needed and cannot be intercepted.
std::string uninterceptable(const UnitPlan& plan) {
  for (const auto& owner : plan.owners) {
    if (!owner.units.empty() && dynamic_cast<const nn::Module*>(owner.module.get()) == nullptr) return owner.path.empty() ? "(root)" : owner.path;
  }
  return "";
}

/// Parameters that are slices of somebody, alive or gone.
class CutParameters {
 public:
  void check_none(const UnitPlan& plan) {
    const std::lock_guard lock(mutex_);
    for (const auto& unit : plan.units) {
      for (const auto& parameter : unit.parameters) {
        const auto found = cut_.find(parameter.tensor.unsafeGetTensorImpl());
        require(found == cut_.end() || found->second.expired(), "fully_shard: '", parameter.name,
                "' is a slice already, of a module that was wrapped before; call unshard(model) first, while what fully_shard returned is alive");
      }
    }
  }
  void add(const UnitPlan& plan) {
    const std::lock_guard lock(mutex_);
    std::erase_if(cut_, [](const auto& item) { return item.second.expired(); });
    for (const auto& unit : plan.units) {
      for (const auto& parameter : unit.parameters) cut_.emplace(parameter.tensor.unsafeGetTensorImpl(), parameter.tensor.getIntrusivePtr());
    }
  }
  void remove(const ShardedUnits& units) {
    const std::lock_guard lock(mutex_);
    for (size_t unit = 0; unit < units.size(); ++unit) {
      for (const FlatParameters& flat : units.flats(unit)) {
        for (const auto& parameter : flat.parameters()) cut_.erase(parameter.tensor.unsafeGetTensorImpl());
      }
    }
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const c10::TensorImpl*, c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> cut_;
};

CutParameters& cut_parameters() {
  static CutParameters parameters;
  return parameters;
}

std::vector<nn::NamedParameter> parameters_of(const UnitPlan& plan) {
  std::vector<nn::NamedParameter> parameters;
  for (const auto& unit : plan.units) parameters.insert(parameters.end(), unit.parameters.begin(), unit.parameters.end());
  return parameters;
}

bool has_values(const std::vector<nn::NamedParameter>& parameters) {
  return std::ranges::none_of(parameters, [](const nn::NamedParameter& parameter) { return parameter.tensor.is_meta(); });
}

/// Whether a parameter is computed with, or its gradient kept, in another type than its own: then one rank has to do what several do.
bool changes_dtypes(const std::vector<nn::NamedParameter>& parameters, const FullyShardOptions& options) {
  return std::ranges::any_of(parameters, [&](const nn::NamedParameter& parameter) {
    const at::ScalarType own = parameter.tensor.scalar_type();
    if (!at::isFloatingType(own)) return false;
    const bool computes = options.param_dtype.value_or(own) != own && (!options.cast || options.cast(parameter));
    const at::ScalarType reduced = options.reduce_dtype ? at::promote_types(own, *options.reduce_dtype) : own;
    return computes || (parameter.tensor.requires_grad() && options.gradient_dtype.value_or(reduced) != own);
  });
}

}  // namespace

class FullyShardedDataParallel::Impl {
 public:
  Impl(torch::nn::Module& module, comm::Group group, FullyShardOptions options, nn::Holds holds, GradientSynchronizer* owner)
      : module_(module), group_(std::move(group)), options_(std::move(options)), holds_(std::move(holds)) {
    check_dtypes(options_);
    require_disjoint("fully_shard", group_, options_.replicate);
    nn::assign_paths(module_);
    drops_apart_ = nn::drop_apart(module_, options_.replicate.rank() * group_.size() + group_.rank(), options_.replicate.size() * group_.size());
    UnitPlan plan = plan_units(module_, options_);  // refuses what it refuses in a group of one, too
    check_unit_sizes(plan, options_);
    active_ = group_.size() > 1 || options_.replicate.size() > 1 || options_.offloads() || changes_dtypes(parameters_of(plan), options_);
    const int ranks = group_.size() * options_.replicate.size();
    const int ranks_of_mean = options_.average ? nn::ranks_of_mean("fully_shard", module_, parameters_of(plan), ranks, active()) : 1;
    if (!active()) {
      if (options_.init) initialize_whole(plan);
      claim(owner);
      return;
    }
    cut_parameters().check_none(plan);
    choose_calls(plan);  // refuses before anything is cut, which nobody would make whole again
    nn::require_same_parts("fully_shard", parameters_of(plan), {group_, options_.replicate});
    nn::refuse_shared_memory("fully_shard", module_, parameters_of(plan));
    nn::FormerMemory former("fully_shard", parameters_of(plan));
    const comm::CallSite site("fsdp.start");
    if (has_values(own_parameters())) {
      equalize_replicas(module_, group_, options_.replicas, options_.only);
      equalize_replicas(module_, options_.replicate, options_.replicas, options_.only);
      if (options_.buffers != BufferBroadcast::Never) share_buffers();
    }
    units_.emplace(plan, group_, options_, ranks_of_mean);
    if (options_.init) initialize_units(module_, plan, *units_, options_);
    cut_parameters().add(plan);
    tensors_.emplace(*units_);
    step_.emplace(*units_, group_, options_, owner,
                  ShardedStep::Callbacks{.held = [this] { return holds_.any(); },
                                         .words = [this] { return own_words(); },
                                         .complete = [this](const std::optional<StepWords>& told) { complete(told); },
                                         .done = [this] { late_->refuse("fully_shard"); }});
    choose_trigger(std::move(plan));
    late_.emplace(module_, options_.only);
    (void)count_writes();
    write_counts_.settle(/*unlike=*/false);
    former.refuse_use();
  }

  /// Leaves slices. Nothing is waited for, and nothing thrown: a true exception may be on its way.
  ~Impl() {
    if (!active() || unsharded_ || !step_) return;
    const comm::LeaveInOrder leaving;
    try {
      watch_.reset();
      attached_.detach();
      step_->abandon();
      refuse_orphans(*units_);
      step_.reset();
      tensors_.reset();
      units_.reset();
    } catch (...) {
    }
  }

  void begin_step() {
    check_sharded("begin_step");
    explicit_calls_.begin_step(/*restarts=*/!active() || !step_->awaits_finish() || explicit_calls_.in(ActionKind::Weights));
    if (!active()) {
      for (const auto& parameter : own_parameters()) set_gradient(parameter.tensor, {});
      return;
    }
    if (calls_) watch_->sleep();  // an engine's calls are known
    step_->begin(Drive::Engine);
  }

  void before(ActionKind action, const MicroBatchPosition& position) {
    explicit_calls_.before(action, position);
    if (active()) step_->before(action, position);
  }

  void after(ActionKind action) {
    explicit_calls_.after(action);
    if (active()) step_->after(action);
  }

  void expect(ActionKind action) {
    if (active()) step_->expect(action);
  }

  void drain() {
    if (active()) step_->drain();
  }

  void finish() {
    explicit_calls_.finish();
    if (active()) step_->finish();
  }

  void after_update() {
    explicit_calls_.after_update();
    if (!active()) return;
    if (!step_->running()) units_->release_all();  // what a forward has left for its backward is of the values before
    units_->let_go();
  }

  void unshard() {
    if (!active() || unsharded_) return;
    check_sharded("unshard");
    step_->recover();  // of a pass that ended by an exception
    require(!step_->in_backward() || step_->aborted(), "fully_shard: unshard() was called in a backward pass; call it between steps");
    take_in();  // what it refuses is refused while the wrapper is whole
    watch_.reset();
    attached_.detach();
    step_->leave();
    step_->let_go();
    const comm::CallSite site("fsdp.unshard");
    cut_parameters().remove(*units_);
    units_->unshard();
    unsharded_ = true;
    drops_apart_.reset();
    explicit_calls_.leave();
  }

  /// For whoever is about to read slices: what the program has put in the place of parameters is taken in. Within a step they are whole, and refused by that.
  void take_in() {
    if (!active() || unsharded_ || step_->running() || (depth_ && *depth_ > 0)) return;
    for (size_t unit = 0; unit < units_->size(); ++unit) units_->take_in(unit);
  }

  torch::nn::Module& module() const { return module_; }
  std::vector<nn::NamedParameter> own_parameters() const { return nn::unique_parameters(module_, options_.only); }
  void check_no_gradients_wait() const {
    refuse_whole_gradients();
    // Also within a forward that one replica alone may have made, for a line of a log.
    if (active() && !unsharded_ && !step_->driven()) step_->refuse_given_apart();
  }
  void refuse_whole_gradients() const {
    require(!step_ || !step_->holds_gradients(),
            "fully_shard: whole gradients wait on this rank, where no_sync() left them (reduce_each_micro_batch = false); call backward once without no_sync() "
            "before they are clipped, or the optimizer steps");
    for (size_t unit = 0; active() && !unsharded_ && !step_->running() && unit < units_->size(); ++unit) {
      for (const FlatParameters& flat : std::as_const(*units_).flats(unit)) {
        for (size_t i = 0; i < flat.parameters().size(); ++i) {
          refuse_whole_gradient(flat.parameters()[i], flat.parameters()[i].tensor.grad(), flat.slice_sizes(i));
        }
      }
    }
  }
  bool is_whole() const { return !active() || unsharded_; }
  const SynchronizationStatistics& statistics() const { return active() ? units_->statistics() : none_; }
  const comm::Group& group() const { return group_; }

  std::vector<int64_t> held_elements(int rank) const {
    std::vector<int64_t> held;
    for (size_t unit = 0; active() && unit < units_->size(); ++unit) {
      for (const FlatParameters& flat : std::as_const(*units_).flats(unit)) {
        for (size_t i = 0; i < flat.parameters().size(); ++i) held.push_back(elements_of(flat.layout(), i, rank));
      }
    }
    return held;
  }

  Slice slice_on(int rank, const at::Tensor& updated) const {
    for (size_t unit = 0; active() && unit < units_->size(); ++unit) {
      for (const FlatParameters& flat : std::as_const(*units_).flats(unit)) {
        for (size_t i = 0; i < flat.parameters().size(); ++i) {
          if (flat.parameters()[i].tensor.is_same(updated)) return flat.slice_on(rank, i);
        }
      }
    }
    return nn::slice_of(updated);
  }

  std::pair<const UnitLayout*, size_t> layout_of(const at::Tensor& parameter) const {
    const UnitPlace* const place = tensors_ ? tensors_->parameter(parameter) : nullptr;
    if (place == nullptr || unsharded_ || !tensors_->are_cut()) return {nullptr, 0};
    return {&tensors_->flat(*place).layout(), place->index};
  }

  std::vector<ShardUnit> units() const {
    std::vector<ShardUnit> described;
    if (!active()) return described;
    for (size_t unit = 0; unit < units_->size(); ++unit) {
      ShardUnit& one = described.emplace_back();
      one.name = units_->name(unit);
      one.place = units_->place(unit);
      for (const FlatParameters& flat : units_->flats(unit)) {
        for (const auto& parameter : flat.parameters()) one.parameters.push_back(parameter.name);
        one.numel += flat.layout().numel();
        one.gathered_bytes += flat.gathered_bytes();
        one.local_bytes += flat.local_bytes();
      }
    }
    return described;
  }

 private:
  bool active() const { return active_; }

  void check_sharded(const char* call) const {
    require(!unsharded_, "fully_shard: ", call, "() was called after unshard(): the module is whole, and nothing is sharded any more; wrap it anew");
  }

  void share_buffers() {
    const comm::CallSite site("fsdp.buffers");
    const nn::Unwatched quietly;
    broadcast_buffers(module_, options_.replicate);
    broadcast_buffers(module_, group_);
  }

  StepWords own_words() { return {.writes = count_writes(), .buffers = options_.buffers == BufferBroadcast::EachStep ? hash_of_buffers(module_) : 0}; }

  /// Of slices, whatever parameters show.
  uint64_t count_writes() {
    if (!step_->looped() || options_.replicate.size() == 1 || options_.replicas == ReplicaStart::Trust) return 0;
    std::vector<nn::WriteCounts::Seen> now;
    for (size_t unit = 0; unit < units_->size(); ++unit) {
      for (const FlatParameters& flat : std::as_const(*units_).flats(unit)) {
        for (size_t i = 0; i < flat.parameters().size(); ++i) {
          now.push_back({.version = nn::WriteCounts::of(flat.parameters()[i].tensor).version, .memory = flat.slice_storage(i)});
        }
      }
    }
    return write_counts_.take(std::move(now));
  }

  void complete(const std::optional<StepWords>& told) {
    if (step_->looped()) compare(told && told->unlike_writes);
    if (options_.buffers != BufferBroadcast::EachStep) return;
    if (!told || told->unlike_buffers) {
      const comm::CallSite site("fsdp.buffers");
      const nn::Unwatched quietly;
      require_same_buffers(module_, {group_, options_.replicate}, /*found=*/told.has_value());
    }
    share_buffers();
  }

  /// Weights may be loaded between the wrapping and the first step, and by some ranks alone (`unlike`). Ranks of a shard hold other rows each, and nobody can
  /// tell whose values those are; replicas of one slice can be compared.
  void compare(bool unlike) {
    if (options_.replicas == ReplicaStart::Trust) return;
    const comm::CallSite site("fsdp.start");
    const nn::Unwatched quietly;
    if (unlike) {
      write_counts_.compare(own_parameters(), was_compared_ ? nn::kUnlikeWrites : "");
    } else if (!was_compared_) {
      compare_replicas(own_parameters(), options_.replicate, "fully_shard");
    }
    was_compared_ = true;
    write_counts_.settle(unlike);
  }

  void choose_calls(const UnitPlan& plan) {
    const std::string plain = uninterceptable(plan);
    require(plain.empty() || options_.trigger != ShardTrigger::Calls, "fully_shard: calls of '", plain,
            "' cannot be intercepted, for it is a plain torch::nn::Module; ", kIntercepted, ", or let operators trigger the gathers (ShardTrigger::Operators)");
    calls_ = plain.empty() && options_.trigger != ShardTrigger::Operators;
    require(calls_ || options_.reshard_after_forward, "fully_shard: reshard_after_forward = false needs calls that can be intercepted; '",
            plain.empty() ? "the module" : plain, "' is watched by its operators, which do not tell where forward ends; leave it true, or ", kIntercepted);
  }

  void choose_trigger(UnitPlan plan) {
    // A dtype for all parameters is one for what is computed with them.
    const std::optional<at::ScalarType> inputs = options_.cast ? std::nullopt : options_.param_dtype;
    const auto role = calls_ ? OperatorTrigger::Role::Fallback : OperatorTrigger::Role::Trigger;
    const auto operators = std::make_shared<OperatorTrigger>(module_, *units_, *step_, role, inputs);
    watch_.emplace(operators);
    if (calls_) {
      nn::check_no_bypass(module_);
      // Where ranks may take different paths, what is gathered waits for backward: one may make more calls from outside than another.
      const auto trigger = std::make_shared<CallTrigger>(
          std::move(plan), *units_, *step_,
          CallTrigger::Options{.reshard_after_forward = options_.reshard_after_forward && !options_.find_unused_parameters, .inputs = inputs, .unseen = [this] {
                                 watch_->wake();
                               }});
      depth_ = trigger->depth();
      operators->follow_calls(depth_);
      attached_ = CallTrigger::attach(trigger);
    } else {
      step_->retire_when_complete();
    }
    watch_->wake();
  }

  /// One rank has an owner of its parameters as many have.
  void claim(GradientSynchronizer* owner) {
    for (const auto& parameter : own_parameters()) {
      const bool has_gradients = parameter.tensor.is_floating_point() || parameter.tensor.is_complex();
      if (has_gradients && parameter.tensor.is_leaf()) attached_.add(nn::GradientDispatcher::of(parameter.tensor).claim(owner));
    }
  }

  void initialize_whole(const UnitPlan& plan) {
    const at::NoGradGuard no_grad;
    give_memory(module_, options_.device);
    for (const auto& holder : plan.holders) options_.init(*holder.module, holder.path);
  }

  torch::nn::Module& module_;
  std::shared_ptr<const void> drops_apart_;
  comm::Group group_;
  FullyShardOptions options_;
  bool active_ = false;  ///< false: a group of one, that changes nothing
  nn::Holds holds_;
  std::optional<ShardedUnits> units_;
  std::optional<UnitTensors> tensors_;  ///< of units_
  std::optional<ShardedStep> step_;
  Attachment attached_;
  std::optional<nn::LateParameters> late_;
  std::optional<nn::OperatorWatch> watch_;
  std::shared_ptr<const int> depth_;  ///< of calls that trigger
  bool calls_ = false;                ///< trigger the gathers
  bool unsharded_ = false;            ///< for good
  bool was_compared_ = false;         ///< what replicas hold, when the first step of the plain loop was complete
  nn::WriteCounts write_counts_{"fully_shard", options_.replicate, group_};
  SynchronizationStatistics none_;
  ExplicitCalls explicit_calls_{"fully_shard"};
};

namespace {

/// Who shards which module, in the order in which they came: what unshard(module) looks up.
class Wrappers {
 public:
  void add(torch::nn::Module& module, FullyShardedDataParallel& wrapper) {
    const std::lock_guard lock(mutex_);
    of_[&module].push_back(&wrapper);
  }
  void remove(torch::nn::Module& module, FullyShardedDataParallel& wrapper) {
    const std::lock_guard lock(mutex_);
    std::erase(of_[&module], &wrapper);
    if (of_[&module].empty()) of_.erase(&module);
  }
  std::vector<FullyShardedDataParallel*> of(torch::nn::Module& module) {
    const std::lock_guard lock(mutex_);
    const auto found = of_.find(&module);
    return found == of_.end() ? std::vector<FullyShardedDataParallel*>() : found->second;
  }

 private:
  std::mutex mutex_;
  std::unordered_map<torch::nn::Module*, std::vector<FullyShardedDataParallel*>> of_;
};

Wrappers& wrappers() {
  static Wrappers wrappers;
  return wrappers;
}

}  // namespace

FullyShardedDataParallel::FullyShardedDataParallel(torch::nn::Module& module, comm::Group group, FullyShardOptions options)
    : impl_(std::make_unique<Impl>(module, std::move(group), std::move(options), holds(), this)) {
  wrappers().add(module, *this);
}
FullyShardedDataParallel::~FullyShardedDataParallel() { wrappers().remove(impl_->module(), *this); }

void FullyShardedDataParallel::begin_step() { impl_->begin_step(); }
void FullyShardedDataParallel::before(ActionKind action, const MicroBatchPosition& position) { impl_->before(action, position); }
void FullyShardedDataParallel::after(ActionKind action, const MicroBatchPosition&) { impl_->after(action); }
void FullyShardedDataParallel::expect(ActionKind action) { impl_->expect(action); }
void FullyShardedDataParallel::drain() { impl_->drain(); }
void FullyShardedDataParallel::finish() { impl_->finish(); }
void FullyShardedDataParallel::after_update() { impl_->after_update(); }
void FullyShardedDataParallel::unshard() { impl_->unshard(); }
const SynchronizationStatistics& FullyShardedDataParallel::statistics() const { return impl_->statistics(); }
std::vector<int64_t> FullyShardedDataParallel::held_elements(int rank) const { return impl_->held_elements(rank); }
Slice FullyShardedDataParallel::slice_on(int rank, const at::Tensor& updated) const { return impl_->slice_on(rank, updated); }
std::vector<nn::NamedParameter> FullyShardedDataParallel::updated() const {
  impl_->take_in();
  return impl_->own_parameters();
}
comm::Group FullyShardedDataParallel::norm_group() const {
  impl_->refuse_whole_gradients();
  return impl_->is_whole() ? comm::Group::self() : impl_->group();
}
void FullyShardedDataParallel::refuse_gradients_that_wait(const std::string&) const { impl_->check_no_gradients_wait(); }
std::vector<ShardUnit> FullyShardedDataParallel::units() const { return impl_->units(); }
const comm::Group& FullyShardedDataParallel::group() const { return impl_->group(); }
std::pair<const UnitLayout*, size_t> FullyShardedDataParallel::layout_of(const at::Tensor& parameter) const { return impl_->layout_of(parameter); }

void unshard(torch::nn::Module& module) {
  const auto sharding = wrappers().of(module);
  require(!sharding.empty(), "unshard: '", module.name(),
          "' is not what fully_shard was given, or was moved since (std::move, a vector that grew), or what it returned is gone; pass the module that was "
          "wrapped, at the place where it was wrapped, while its wrapper lives");
  for (FullyShardedDataParallel* const wrapper : sharding) wrapper->unshard();
}

std::unique_ptr<FullyShardedDataParallel> fully_shard(torch::nn::Module& module, comm::Group group, FullyShardOptions options) {
  return std::make_unique<FullyShardedDataParallel>(module, std::move(group), std::move(options));
}

}  // namespace tessera
