#include "tessera/data_parallel/distributed_data_parallel.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/core/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/step_protocol.h"
#include "tessera/nn/write_watch.h"

namespace tessera {
namespace {

/// The buffers of a plan, and for each parameter its view and its bucket.
struct GradientBuckets {
  std::vector<GradientBucket> buckets;
  std::vector<at::Tensor> views;
  std::vector<size_t> bucket_of;
  std::vector<size_t> references;  ///< per bucket: of our own to its memory
};

using IndexByName = std::unordered_map<std::string, size_t>;

/// Gives bucket `b` of the plan its memory: such as the group's engine can sum without staging it, where it has such memory.
void allocate(const BucketPlan& plan, size_t b, const std::vector<nn::NamedParameter>& parameters, const IndexByName& index_of, const comm::Group& group,
              GradientBuckets& buckets) {
  const MemoryScope scope(MemoryCategory::Gradients);
  const BucketPlan::Bucket& bucket = plan.buckets[b];
  const at::Tensor& first = parameters[index_of.at(bucket.slots.front().name)].tensor;
  const at::Tensor flat = comm::empty(group, {bucket.numel()}, first.options().dtype(bucket.dtype).requires_grad(false));
  buckets.buckets[b] = {.flat = flat, .gradients = {}};
  for (const BucketPlan::Slot& slot : bucket.slots) {
    const size_t index = index_of.at(slot.name);
    buckets.views[index] = gradient_view(flat, slot.offset, parameters[index].tensor);
    buckets.bucket_of[index] = b;
    buckets.buckets[b].gradients.push_back({.name = slot.name, .tensor = buckets.views[index]});
  }
  buckets.references[b] = flat.storage().use_count();
}

/// Parameters are expected in the reverse order of registration before anything was seen.
std::vector<int64_t> reverse_order(size_t parameters) {
  std::vector<int64_t> order(parameters);
  std::iota(order.rbegin(), order.rend(), int64_t{0});
  return order;
}

}  // namespace

class DistributedDataParallel::Impl {
 public:
  Impl(DistributedDataParallel& self, torch::nn::Module& module, comm::Group group, DdpOptions options)
      : self_(self),
        module_(module),
        group_(std::move(group)),
        options_(std::move(options)),
        parameters_(floating_parameters(module)),
        order_(reverse_order(parameters_.size())),
        used_(parameters_),
        arrived_(parameters_.size(), false),
        carried_(parameters_.size()),
        gradient_writes_(parameters_.size()),
        protocol_("data parallelism", self.holds(),
                  {.open = [this](bool plain) { open(plain); },
                   .begin_pass = [this](bool last) { begin_pass(last); },
                   .end_pass = [this](bool last, bool) { end_pass(last); },
                   .complete = [this] { complete(); },
                   .abandon = [this] { abandon(); },
                   .plain_loop_refusal = options_.phase ? "the engine whose phase it follows (DdpOptions::phase) calls begin_step before" : ""}) {
    require(!options_.reduce_dtype || *options_.reduce_dtype == at::kFloat || *options_.reduce_dtype == at::kDouble,
            "data parallelism: reduce_dtype = ", *options_.reduce_dtype, ": gradients are summed in fp32 or fp64, or (unset) in each parameter's own dtype");
    nn::assign_paths(module_);
    nn::drop_apart(module_, group_.rank());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      index_of_.emplace(parameters_[i].name, i);
      hooks_.add(nn::GradientDispatcher::of(parameters_[i].tensor).claim(&self_));
    }
    if (!active()) return;
    const comm::CallSite site("ddp.start");
    equalize_replicas(module_, group_, options_.replicas);
    if (options_.buffers != BufferBroadcast::Never) broadcast_buffers(module_, group_);
    if (!options_.hook) options_.hook = std::make_shared<AllReduceHook>();
    train(trained_parameters(parameters_, &self_));
    if (options_.plan) take_given_plan();
    hooks_.add(group_.synchronize_in_backward());
    listen();
  }

  ~Impl() {
    drop_reductions();
    for (const nn::NamedParameter& parameter : parameters_) {
      if (synchronizes(parameter)) nn::GradientDispatcher::of(parameter.tensor).withdraw_place();
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  StepProtocol& protocol() { return protocol_; }
  const SynchronizationStatistics& statistics() const { return statistics_; }
  const BucketPlan& plan() const { return plan_; }
  const std::vector<nn::NamedParameter>& parameters() const { return parameters_; }

 private:
  bool active() const { return group_.size() > 1; }
  bool synchronizes(const nn::NamedParameter& parameter) const {
    const auto* const dispatcher = nn::GradientDispatcher::find(parameter.tensor);
    return dispatcher != nullptr && dispatcher->owner() == &self_;
  }

  void open(bool plain) {
    const at::NoGradGuard no_grad;
    if (!plain) {
      for (const nn::NamedParameter& parameter : parameters_) set_gradient(parameter.tensor, {});
    }
    if (!active()) return;
    drop_reductions();
    if (auto trained = trained_parameters(parameters_, &self_); trained != trained_) train(std::move(trained));
    renew_buckets();
    if (own_phase_) {
      ++own_phase_->step;
      own_phase_->last_micro_batch = true;
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (trained_[i]) nn::GradientDispatcher::of(parameters_[i].tensor).follow(options_.phase);
    }
    plain_ = plain;
    starts_early_ = group_.in_backward().may_start_early(/*ordered=*/!plain, /*same_graph=*/!options_.find_unused_parameters);
    parameter_writes_.clear();
    missing_.clear();
    for (const BucketPlan::Bucket& bucket : plan_.buckets) missing_.push_back(bucket.slots.size());
    used_.clear();
    arrivals_.clear();
    arrived_.assign(parameters_.size(), false);
    carried_.assign(parameters_.size(), {});
    overtaken_.assign(parameters_.size(), false);
    statistics_ = {};
    options_.hook->begin_step();
    if (!plain) offer_places();  // in the plain loop only within a backward pass: a forward pass may be one whose gradients come in another step, or twice
  }

  void begin_pass(bool last) {
    if (own_phase_) own_phase_->last_micro_batch = last;
    if (!plain_) return;
    const std::string written = parameter_writes_.first_written(parameters_);
    require(
        written.empty(), "data parallelism: '", written,
        "' was written after a backward pass under no_sync(): an optimizer's step took gradients that were of this rank alone, and the replicas part; let a "
        "pass without no_sync() complete them before each step, the last of an epoch too (ReplicaStart::Trust: who writes parameters there vouches)");
    offer_places();
  }

  void end_pass(bool last) {
    if (!plain_) return;
    withdraw_places();
    if (active() && !last && options_.replicas != ReplicaStart::Trust) parameter_writes_.mark(parameters_, trained_);
  }

  void complete() {
    if (!active()) return;
    withdraw_places();
    const at::NoGradGuard no_grad;
    const auto start = std::chrono::steady_clock::now();
    statistics_.num_early = statistics_.num_collectives;
    // All of the step's collectives are made even where a gradient is missing, so that no other rank waits for one that refuses to go on.
    while (reductions_.size() < plan_.buckets.size()) launch_next();
    const std::vector<bool> used = options_.find_unused_parameters ? used_anywhere() : trained_;
    complete_reductions();
    if (std::exchange(adopts_order_, false)) adopt_observed_order();
    statistics_.exposed_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (options_.average) {
      for (const GradientBucket& bucket : buckets_->buckets) bucket.flat.div_(group_.size());
    }
    hand_over(used);
    if (options_.buffers == BufferBroadcast::EachStep) {
      const comm::CallSite site("ddp.buffers");
      broadcast_buffers(module_, group_);
    }
    if (options_.find_unused_parameters) return;
    const comm::CallSite site("ddp.unused");
    plain_ ? used_.refuse_unused_anywhere({group_}) : used_.refuse_unused(group_);
  }

  /// What a pass that failed, and those under no_sync() before it, have left: their part of a gradient goes, what was there before them comes back.
  void abandon() {
    if (!active()) return;
    drop_reductions();
    withdraw_places();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& gradient = parameters_[i].tensor.grad();
      if (!arrived_[i] || !gradient.defined()) continue;
      if (gradient_writes_.zeroed(i, gradient)) carried_[i].reset();  // by the program
      set_gradient(parameters_[i].tensor, carried_[i]);
    }
  }

  /// Lets go of what a step that failed has under way, and waits for none of it: the other ranks have failed at the same place, or will not get there. The
  /// engine keeps the memory in which it may still write; buckets get another.
  void drop_reductions() {
    stale_ |= std::ranges::any_of(reductions_, [](const auto& reduction) { return reduction != nullptr; });
    reductions_.clear();
  }

  /// From now on these have gradients: a plan of their own, from the order known of all.
  void train(std::vector<bool> trained) {
    std::vector<nn::NamedParameter> added;
    std::vector<at::ScalarType> dtypes;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained[i] || prepared_[i]) continue;
      prepared_[i] = true;
      added.push_back(parameters_[i]);
      dtypes.push_back(spec_of(i).dtype);
    }
    if (!added.empty()) options_.hook->prepare(added, dtypes, group_);
    trained_ = std::move(trained);
    used_.want(trained_);
    const auto count = std::ranges::count(trained_, true);
    bucket_site_ = "ddp.bucket";  // ranks that disagree show it under comm.check
    if (count < std::ssize(trained_)) bucket_site_ += detail::concat(", ", count, " of ", trained_.size(), " parameters trained");
    make_plan(/*observed=*/false);
    adopts_order_ = true;
  }

  void take_given_plan() {
    std::vector<GradientSpec> specs;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (trained_[i]) specs.push_back(spec_of(i));
    }
    check_bucket_plan(*options_.plan, specs, "given");
    plan_ = *options_.plan;
    adopts_order_ = false;
    std::vector<int64_t> order;
    for (const BucketPlan::Bucket& bucket : plan_.buckets) {
      for (const BucketPlan::Slot& slot : bucket.slots) order.push_back(static_cast<int64_t>(index_of_.at(slot.name)));
    }
    put_first(order);
  }

  GradientSpec spec_of(size_t i) const {
    const at::Tensor& tensor = parameters_[i].tensor;
    return {parameters_[i].name, tensor.numel(), options_.reduce_dtype.value_or(tensor.scalar_type())};
  }

  /// `first`, then the others as they were.
  void put_first(std::vector<int64_t> first) {
    std::vector<bool> there(parameters_.size(), false);
    for (const int64_t index : first) there[index] = true;
    for (const int64_t index : order_) {
      if (!there[index]) first.push_back(index);
    }
    order_ = std::move(first);
  }

  void make_plan(bool observed) {
    std::vector<GradientSpec> specs;
    std::vector<int64_t> order;
    for (const int64_t index : order_) {
      if (!trained_[index]) continue;
      order.push_back(static_cast<int64_t>(specs.size()));
      specs.push_back(spec_of(index));
    }
    plan_ = make_bucket_plan(specs, order, options_.sizes, observed);
    stale_ = true;
  }

  /// Buckets of the plan, in the memory of the step before. A bucket of which somebody still holds a gradient, or of whose memory (a detached alias, a view), a
  /// parameter that is added to or whoever kept it, is left to them, and gets new memory.
  void renew_buckets() {
    constexpr size_t own_handles = 2;  // in views and in the bucket's gradients
    if (!buckets_ || stale_) {
      buckets_.reset();  // the old ones go before the new ones come
      const size_t n = parameters_.size();
      buckets_ = GradientBuckets{.buckets = std::vector<GradientBucket>(plan_.buckets.size()),
                                 .views = std::vector<at::Tensor>(n),
                                 .bucket_of = std::vector<size_t>(n),
                                 .references = std::vector<size_t>(plan_.buckets.size())};
      for (size_t b = 0; b < plan_.buckets.size(); ++b) allocate(plan_, b, parameters_, index_of_, group_, *buckets_);
      stale_ = false;
      return;
    }
    for (size_t b = 0; b < plan_.buckets.size(); ++b) {
      const auto held = [&](const BucketGradient& gradient) { return gradient.tensor.use_count() > own_handles; };
      const GradientBucket& bucket = buckets_->buckets[b];
      if (bucket.flat.storage().use_count() > buckets_->references[b] || std::ranges::any_of(bucket.gradients, held))
        allocate(plan_, b, parameters_, index_of_, group_, *buckets_);
    }
  }

  /// Lets gradients be computed where they are reduced.
  void offer_places() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& parameter = parameters_[i].tensor;
      if (!trained_[i] || buckets_->views[i].scalar_type() != parameter.scalar_type()) continue;
      nn::GradientDispatcher::of(parameter).offer_place([this, i] { return buckets_->views[i]; });
    }
  }

  void withdraw_places() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (trained_[i]) nn::GradientDispatcher::of(parameters_[i].tensor).withdraw_place();
    }
  }

  void listen() {
    if (!options_.phase) options_.phase = own_phase_ = std::make_shared<nn::StepPhase>();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      nn::GradientDispatcher& dispatcher = nn::GradientDispatcher::of(parameters_[i].tensor);
      hooks_.add(Attachment([tensor = parameters_[i].tensor, own = own_phase_] {
        if (auto* const found = nn::GradientDispatcher::find(tensor); found && own) found->unfollow(own);
      }));
      const auto mine = [this, i](auto listener) {
        return [this, i, listener](const at::Tensor&) {
          if (synchronizes(parameters_[i])) (this->*listener)(i);
        };
      };
      hooks_.add(dispatcher.listen_arriving(mine(&Impl::arriving)));
      hooks_.add(dispatcher.listen(mine(&Impl::accumulated)));
      hooks_.add(dispatcher.listen_final(mine(&Impl::final)));
    }
  }

  /// Before the gradient is accumulated. What the parameter has from a step before is summed over the ranks already: it is set aside, and added at the end.
  void arriving(size_t index) {
    protocol_.arriving(parameters_[index].name);
    require(trained_[index], "data parallelism: '", parameters_[index].name, "' was unfrozen within a step; change requires_grad between steps");
    require(reductions_.size() <= buckets_->bucket_of[index] && !overtaken_[index], "data parallelism: '", parameters_[index].name,
            "' got another gradient after its bucket was reduced; run each backward pass of a step but the last under no_sync(), and call begin_step before "
            "each step");
    if (!arrived_[index]) {
      arrived_[index] = true;
      set_aside(index);
    } else {
      settle_cleared(index);
    }
  }

  void set_aside(size_t index) {
    carried_[index] = std::exchange(parameters_[index].tensor.mutable_grad(), {});
    if (carried_[index].defined() && carried_[index].is_alias_of(buckets_->views[index])) carried_[index] = carried_[index].clone();
  }

  /// What was set aside goes where the program has cleared, since the pass before, what shows in its place.
  void settle_cleared(size_t index) {
    if (carried_[index].defined() && gradient_writes_.cleared(index, parameters_[index], "data parallelism")) carried_[index].reset();
  }

  void accumulated(size_t index) {
    require_dense(parameters_[index]);
    if (!is_place_awaited(parameters_[index].tensor, buckets_->views[index])) recover_gradient(parameters_[index].tensor, buckets_->views[index]);
    if (plain_) gradient_writes_.see(index, parameters_[index].tensor.grad());
    used_.mark(index);
  }

  void final(size_t index) {
    overtaken_[index] = is_place_awaited(parameters_[index].tensor, buckets_->views[index]);
    recover_gradient(parameters_[index].tensor, buckets_->views[index]);
    arrivals_.push_back(static_cast<int64_t>(index));
    --missing_[buckets_->bucket_of[index]];
    while (starts_early_ && reductions_.size() < missing_.size() && missing_[reductions_.size()] == 0) launch_next();
  }

  /// Starts the first bucket that has not been. On every rank in the order of the plan, whatever order its gradients came in.
  void launch_next() {
    const comm::CallSite site(bucket_site_);
    const at::NoGradGuard no_grad;
    const size_t index = reductions_.size();
    GradientBucket& bucket = buckets_->buckets[index];
    if (missing_[index] > 0) recover_bucket(index);
    reductions_.push_back(bucket.flat.numel() > 0 ? options_.hook->start(bucket, channel_) : nullptr);
  }

  /// In rounds over the buckets, so that a bucket's next collective runs while the others' results are worked on.
  void complete_reductions() {
    const comm::CallSite site(bucket_site_);
    for (bool busy = true; busy;) {
      busy = false;
      for (std::unique_ptr<BucketReduction>& reduction : reductions_) {
        if (!reduction) continue;
        if (reduction->advance()) {
          reduction.reset();
        } else {
          busy = true;
        }
      }
    }
  }

  /// Which parameters any rank used; the hook's buckets learn it, too.
  std::vector<bool> used_anywhere() {
    const comm::CallSite site("ddp.unused");
    const std::vector<bool> anywhere = used_.anywhere(group_);
    for (GradientBucket& bucket : buckets_->buckets) {
      for (BucketGradient& gradient : bucket.gradients) gradient.used = anywhere[index_of_.at(gradient.name)];
    }
    return anywhere;
  }

  /// Of gradients that were not announced as final: they came in an earlier micro-batch, or not at all.
  void recover_bucket(size_t bucket) {
    for (const BucketPlan::Slot& slot : plan_.buckets[bucket].slots) {
      const size_t i = index_of_.at(slot.name);
      const bool has_gradient = parameters_[i].tensor.grad().defined();
      if (!arrived_[i] && has_gradient) {
        set_aside(i);
      } else if (arrived_[i]) {
        settle_cleared(i);
        if (!has_gradient) used_.mark(i, false);
      }
      recover_gradient(parameters_[i].tensor, buckets_->views[i]);
    }
  }

  /// Sums become gradients, on top of what was there before the step. None where nobody used the parameter: as on one process, optimizers skip it then.
  void hand_over(const std::vector<bool>& used) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained_[i]) continue;
      if (carried_[i].defined()) {
        at::Tensor(buckets_->views[i]).add_(std::exchange(carried_[i], {}));
        used_.mark(i);
      } else if (!used[i]) {
        set_gradient(parameters_[i].tensor, {});
      }
    }
  }

  /// Rank 0's order of arrival becomes every rank's plan, from the next step on.
  void adopt_observed_order() {
    const comm::CallSite site("ddp.plan");
    std::vector<bool> there(parameters_.size(), false);
    for (const int64_t index : arrivals_) there[index] = true;
    for (int64_t i = static_cast<int64_t>(parameters_.size()) - 1; i >= 0; --i) {
      if (trained_[i] && !there[i]) arrivals_.push_back(i);
    }
    if (arrivals_.empty()) return;
    at::Tensor order = at::tensor(arrivals_, at::kLong).to(message_device(parameters_.front().tensor));
    comm::broadcast(group_, order, 0);
    order = order.cpu();
    put_first({order.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>() + order.numel()});
    make_plan(/*observed=*/true);
  }

  DistributedDataParallel& self_;
  torch::nn::Module& module_;
  comm::Group group_;
  DdpOptions options_;
  std::vector<nn::NamedParameter> parameters_;  ///< also those that are frozen
  IndexByName index_of_;
  std::vector<bool> trained_;                                           ///< which of them want a gradient in this step
  std::vector<bool> prepared_ = std::vector<bool>(parameters_.size());  ///< which of them the hook knows
  std::vector<int64_t> order_;                                          ///< of all of them, as their gradients are expected
  std::string bucket_site_;
  BucketPlan plan_;
  bool adopts_order_ = false;  ///< the next step's order of arrival makes the plan anew
  bool stale_ = false;         ///< the buckets are not those of plan_
  std::optional<GradientBuckets> buckets_;
  std::shared_ptr<nn::StepPhase> own_phase_;

  bool plain_ = false;         ///< the step is one of the plain loop
  bool starts_early_ = false;  ///< buckets, while backward runs; else when it is done, for another wrapper's start on the same engine
  UsedParameters used_;
  std::vector<bool> arrived_;        ///< parameters that got a gradient in this step
  std::vector<at::Tensor> carried_;  ///< gradients from before this step, set aside
  nn::GradientWrites gradient_writes_;
  nn::ParameterWrites parameter_writes_;  ///< since a pass that left gradients of this rank alone
  std::vector<bool> overtaken_;           ///< gradients that went without the one that was to be computed in place, which must not come any more
  std::vector<size_t> missing_;           ///< per bucket: gradients that are not final
  std::vector<int64_t> arrivals_;         ///< parameters in the order in which their gradients became final
  SynchronizationStatistics statistics_;
  GradientChannel channel_{group_, statistics_};
  std::vector<std::unique_ptr<BucketReduction>> reductions_;  ///< per bucket launched; null where nothing is, or is no more, under way
  StepProtocol protocol_;
  Attachment hooks_;
};

DistributedDataParallel::DistributedDataParallel(torch::nn::Module& module, comm::Group group, DdpOptions options)
    : impl_(std::make_unique<Impl>(*this, module, std::move(group), std::move(options))) {}
DistributedDataParallel::~DistributedDataParallel() = default;

void DistributedDataParallel::begin_step() { impl_->protocol().begin_step(); }
void DistributedDataParallel::before(ActionKind action, const MicroBatchPosition& position) { impl_->protocol().before(action, position); }
void DistributedDataParallel::after(ActionKind action, const MicroBatchPosition&) { impl_->protocol().after(action); }
void DistributedDataParallel::finish() { impl_->protocol().finish(); }
void DistributedDataParallel::after_update() { impl_->protocol().after_update(); }
const SynchronizationStatistics& DistributedDataParallel::statistics() const { return impl_->statistics(); }
std::vector<nn::NamedParameter> DistributedDataParallel::updated() const { return impl_->parameters(); }
const BucketPlan& DistributedDataParallel::plan() const { return impl_->plan(); }

}  // namespace tessera
