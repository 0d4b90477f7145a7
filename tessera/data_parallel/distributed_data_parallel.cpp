#include "tessera/data_parallel/distributed_data_parallel.h"

#include <chrono>
#include <string_view>
#include <unordered_map>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/core/memory.h"
#include "tessera/nn/flat_gradients.h"

namespace tessera {
namespace {

/// The buffers of a plan, and for each parameter its view and its bucket.
struct GradientBuckets {
  std::vector<GradientBucket> buckets;
  std::vector<at::Tensor> views;
  std::vector<size_t> bucket_of;
};

/// In memory that the group's engine can sum without staging it, where it has such memory.
GradientBuckets allocate(const BucketPlan& plan, const std::vector<nn::NamedParameter>& parameters, const comm::Group& group) {
  const MemoryScope scope(MemoryCategory::Gradients);
  std::unordered_map<std::string, size_t> index_of;
  for (size_t i = 0; i < parameters.size(); ++i) index_of.emplace(parameters[i].name, i);
  GradientBuckets buckets{.buckets = {}, .views = std::vector<at::Tensor>(parameters.size()), .bucket_of = std::vector<size_t>(parameters.size())};
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    const BucketPlan::Bucket& bucket = plan.buckets[b];
    const at::Tensor& first = parameters[index_of.at(bucket.slots.front().name)].tensor;
    const at::Tensor flat = comm::empty(group, {bucket.numel()}, first.options().dtype(bucket.dtype).requires_grad(false));
    buckets.buckets.push_back({.flat = flat, .gradients = {}});
    for (const BucketPlan::Slot& slot : bucket.slots) {
      const size_t index = index_of.at(slot.name);
      buckets.views[index] = gradient_view(flat, slot.offset, parameters[index].tensor);
      buckets.bucket_of[index] = b;
      buckets.buckets.back().gradients.push_back({.name = slot.name, .tensor = buckets.views[index]});
    }
  }
  return buckets;
}

std::vector<GradientSpec> specs_of(const std::vector<nn::NamedParameter>& parameters, std::optional<at::ScalarType> reduce_dtype) {
  std::vector<GradientSpec> specs;
  for (const auto& parameter : parameters) {
    specs.push_back({parameter.name, parameter.tensor.numel(), reduce_dtype.value_or(parameter.tensor.scalar_type())});
  }
  return specs;
}

std::vector<at::ScalarType> dtypes_of(const std::vector<GradientSpec>& specs) {
  std::vector<at::ScalarType> dtypes;
  for (const GradientSpec& spec : specs) dtypes.push_back(spec.dtype);
  return dtypes;
}

}  // namespace

class DistributedDataParallel::Impl {
 public:
  Impl(torch::nn::Module& module, comm::Group group, DdpOptions options)
      : module_(module), group_(std::move(group)), options_(std::move(options)), parameters_(trainable_parameters(module)), used_(parameters_) {
    require(!options_.reduce_dtype || *options_.reduce_dtype == at::kFloat || *options_.reduce_dtype == at::kDouble,
            "data parallelism: reduce_dtype = ", *options_.reduce_dtype, ": gradients are summed in fp32 or fp64, or (unset) in each parameter's own dtype");
    if (!active()) return;
    const comm::CallSite site("ddp.start");
    equalize_replicas(module_, group_, options_.replicas);
    if (options_.buffers != BufferBroadcast::Never) broadcast_buffers(module_, group_);
    specs_ = specs_of(parameters_, options_.reduce_dtype);
    if (options_.plan) check_bucket_plan(*options_.plan, specs_, "given");
    plan_ = options_.plan ? *options_.plan : make_bucket_plan(specs_, options_.sizes);
    if (!options_.hook) options_.hook = std::make_shared<AllReduceHook>();
    options_.hook->prepare(parameters_, dtypes_of(specs_), group_);
    listen();
  }

  void begin_step() {
    if (!active()) return clear_gradients();
    const at::NoGradGuard no_grad;
    if (own_phase_) {
      ++own_phase_->step;
      own_phase_->last_micro_batch = true;
    }
    if (options_.buffers == BufferBroadcast::EachStep && steps_ > 0) {
      const comm::CallSite site("ddp.buffers");
      broadcast_buffers(module_, group_);
    }
    clear_gradients();
    if (!buckets_ || stale_) {
      buckets_.reset();  // the old ones go before the new ones come
      buckets_ = allocate(plan_, parameters_, group_);
      stale_ = false;
    }
    offer_places();
    missing_.clear();
    for (const BucketPlan::Bucket& bucket : plan_.buckets) missing_.push_back(bucket.slots.size());
    reductions_.clear();
    used_.clear();
    arrivals_.clear();
    statistics_ = {};
    options_.hook->begin_step();
    in_step_ = true;
  }

  void set_last(bool last) {
    if (own_phase_) own_phase_->last_micro_batch = last;
  }

  void finish() {
    if (!active()) return;
    invariant(in_step_, "DistributedDataParallel::finish without begin_step");
    in_step_ = false;
    withdraw_places();
    const at::NoGradGuard no_grad;
    const auto start = std::chrono::steady_clock::now();
    statistics_.num_early = statistics_.num_collectives;
    // All of the step's collectives are made even where a gradient is missing, so that no other rank waits for one that refuses to go on.
    while (reductions_.size() < plan_.buckets.size()) launch_next();
    const std::vector<bool> used = options_.find_unused_parameters ? used_anywhere() : std::vector<bool>(parameters_.size(), true);
    complete_reductions();
    if (++steps_ == 1 && !options_.plan) adopt_observed_order();
    if (!options_.find_unused_parameters) used_.refuse_unused(group_);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!used[i]) set_gradient(parameters_[i].tensor, {});  // as on one process: optimizers skip it
    }
    statistics_.exposed_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (options_.average) {
      for (const GradientBucket& bucket : buckets_->buckets) bucket.flat.div_(group_.size());
    }
  }

  const SynchronizationStatistics& statistics() const { return statistics_; }
  const BucketPlan& plan() const { return plan_; }

 private:
  bool active() const { return group_.size() > 1; }

  void clear_gradients() {
    for (const nn::NamedParameter& parameter : parameters_) set_gradient(parameter.tensor, {});
  }

  /// Lets gradients be computed where they are reduced.
  void offer_places() {
    overtaken_.assign(parameters_.size(), false);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& parameter = parameters_[i].tensor;
      const at::Tensor& view = buckets_->views[i];
      if (view.scalar_type() == parameter.scalar_type()) nn::GradientDispatcher::of(parameter).offer_place(view);
    }
  }

  void withdraw_places() {
    for (const nn::NamedParameter& parameter : parameters_) nn::GradientDispatcher::of(parameter.tensor).withdraw_place();
  }

  void listen() {
    std::shared_ptr<const nn::StepPhase> phase = options_.phase;
    if (!phase) phase = own_phase_ = std::make_shared<nn::StepPhase>();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      nn::GradientDispatcher& dispatcher = nn::GradientDispatcher::of(parameters_[i].tensor);
      dispatcher.follow(phase);
      if (own_phase_) hooks_.add(Attachment([tensor = parameters_[i].tensor] { nn::GradientDispatcher::of(tensor).follow(nullptr); }));
      hooks_.add(dispatcher.listen([this, i](const at::Tensor&) { accumulated(i); }));
      hooks_.add(dispatcher.listen_final([this, i](const at::Tensor&) { final(i); }));
    }
  }

  void accumulated(size_t index) {
    require(in_step_, "data parallelism: '", parameters_[index].name,
            "' got a gradient outside a step; call begin_step before the first backward pass of each step");
    require(reductions_.size() <= buckets_->bucket_of[index] && !overtaken_[index], "data parallelism: '", parameters_[index].name,
            "' got another gradient after its bucket was reduced; call set_last_micro_batch(false) before each backward pass of a step but the last, and "
            "begin_step before each step");
    if (!is_place_awaited(parameters_[index].tensor, buckets_->views[index])) recover_gradient(parameters_[index].tensor, buckets_->views[index]);
    used_.mark(index);
  }

  void final(size_t index) {
    overtaken_[index] = is_place_awaited(parameters_[index].tensor, buckets_->views[index]);
    recover_gradient(parameters_[index].tensor, buckets_->views[index]);
    arrivals_.push_back(static_cast<int64_t>(index));
    --missing_[buckets_->bucket_of[index]];
    while (reductions_.size() < missing_.size() && missing_[reductions_.size()] == 0) launch_next();
  }

  /// Starts the first bucket that has not been. On every rank in the order of the plan, whatever order its gradients came in.
  void launch_next() {
    const comm::CallSite site("ddp.bucket");
    const at::NoGradGuard no_grad;
    const size_t index = reductions_.size();
    GradientBucket& bucket = buckets_->buckets[index];
    if (missing_[index] > 0) recover_bucket(index);
    reductions_.push_back(bucket.flat.numel() > 0 ? options_.hook->start(bucket, channel_) : nullptr);
  }

  /// In rounds over the buckets, so that a bucket's next collective runs while the others' results are worked on.
  void complete_reductions() {
    const comm::CallSite site("ddp.bucket");
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
    std::unordered_map<std::string_view, bool> by_name;
    for (size_t i = 0; i < parameters_.size(); ++i) by_name.emplace(parameters_[i].name, anywhere[i]);
    for (GradientBucket& bucket : buckets_->buckets) {
      for (BucketGradient& gradient : bucket.gradients) gradient.used = by_name.at(gradient.name);
    }
    return anywhere;
  }

  /// Of gradients that were not announced as final: they came in an earlier micro-batch, or not at all.
  void recover_bucket(size_t bucket) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (buckets_->bucket_of[i] == bucket) recover_gradient(parameters_[i].tensor, buckets_->views[i]);
    }
  }

  /// Rank 0's order of arrival becomes every rank's plan, from the next step on.
  void adopt_observed_order() {
    const comm::CallSite site("ddp.plan");
    std::vector<bool> arrived(parameters_.size(), false);
    for (const int64_t index : arrivals_) arrived[index] = true;
    for (int64_t i = static_cast<int64_t>(parameters_.size()) - 1; i >= 0; --i) {
      if (!arrived[i]) arrivals_.push_back(i);
    }
    at::Tensor order = at::tensor(arrivals_, at::kLong).to(message_device(parameters_.front().tensor));
    comm::broadcast(group_, order, 0);
    order = order.cpu();
    plan_ = make_bucket_plan(specs_, {order.const_data_ptr<int64_t>(), static_cast<size_t>(order.numel())}, options_.sizes, /*observed=*/true);
    stale_ = true;
  }

  torch::nn::Module& module_;
  comm::Group group_;
  DdpOptions options_;
  std::vector<nn::NamedParameter> parameters_;
  std::vector<GradientSpec> specs_;
  BucketPlan plan_;
  bool stale_ = false;  ///< the buckets are not those of plan_
  std::optional<GradientBuckets> buckets_;
  std::shared_ptr<nn::StepPhase> own_phase_;

  bool in_step_ = false;
  int64_t steps_ = 0;
  UsedParameters used_;
  std::vector<bool> overtaken_;    ///< gradients that went without the one that was to be computed in place, which must not come any more
  std::vector<size_t> missing_;    ///< per bucket: gradients that are not final
  std::vector<int64_t> arrivals_;  ///< parameters in the order in which their gradients became final
  SynchronizationStatistics statistics_;
  GradientChannel channel_{group_, statistics_};
  std::vector<std::unique_ptr<BucketReduction>> reductions_;  ///< per bucket launched; null where nothing is, or is no more, under way
  Attachment hooks_;
};

DistributedDataParallel::DistributedDataParallel(torch::nn::Module& module, comm::Group group, DdpOptions options)
    : impl_(std::make_unique<Impl>(module, std::move(group), std::move(options))) {}
DistributedDataParallel::~DistributedDataParallel() = default;

void DistributedDataParallel::begin_step() { impl_->begin_step(); }
void DistributedDataParallel::before_micro_batch(const MicroBatchPosition& position) { impl_->set_last(position.last); }
void DistributedDataParallel::after_micro_batch(const MicroBatchPosition&) {}
void DistributedDataParallel::set_last_micro_batch(bool last) { impl_->set_last(last); }
void DistributedDataParallel::finish() { impl_->finish(); }
const SynchronizationStatistics& DistributedDataParallel::statistics() const { return impl_->statistics(); }
const BucketPlan& DistributedDataParallel::plan() const { return impl_->plan(); }

}  // namespace tessera
