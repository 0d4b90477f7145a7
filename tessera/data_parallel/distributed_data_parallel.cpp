#include "tessera/data_parallel/distributed_data_parallel.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/bucketed_step.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/write_watch.h"

// In which order gradients come nobody knows before the first backward pass: the reverse of registration is a guess, and what rank 0 then sees is made
// everyone's by one broadcast, since any order will do as long as it is the same one. Buckets keep their memory from step to step, but a program may hold on to
// a gradient, or to an alias of one: reference counts tell, and such a bucket is left to whoever holds it. Gradients of passes under no_sync() are of this rank
// alone, and an optimizer's step on them would part the replicas without a word: parameters' versions and values between passes give it away. But who gave
// those gradients up, and loaded weights, has written parameters too; values alone tell the two apart, so that is when they are compared.

namespace tessera {

/// Buckets lie whole on every rank, hooks sum them, and gradients are views of them.
class DistributedDataParallel::Impl final : public BucketedStep {
 public:
  Impl(DistributedDataParallel& self, torch::nn::Module& module, comm::Group group, DdpOptions options)
      : BucketedStep(self, self.holds(), module,
                     {.technique = "data parallelism",
                      .site = "ddp",
                      .groups = {group},
                      .only = options.only,
                      .average = options.average,
                      .find_unused_parameters = options.find_unused_parameters,
                      .buffers = options.buffers,
                      .reduce_dtype = options.reduce_dtype,
                      .phase = options.phase,
                      .one_at_a_time = options.relay != nullptr,
                      .relay = options.relay}),
        group_(std::move(group)),
        options_(std::move(options)),
        order_(parameters_.size()) {
    for (size_t i = 0; i < parameters_.size(); ++i) index_of_.emplace(parameters_[i].name, i);
    std::iota(order_.rbegin(), order_.rend(), int64_t{0});  // gradients are expected in the reverse order of registration before anything was seen
    if (!active()) return;
    strides_ = gradient_strides(parameters_, /*alike=*/equalize(options_.replicas));
    share_buffers();
    if (!options_.hook) options_.hook = std::make_shared<AllReduceHook>();
    follow_trained();
    plan_for_trained();
    if (options_.plan) take_given_plan();
  }

  ~Impl() override { let_go(); }

  const BucketLayout& plan() const { return plan_; }

 private:
  void prepare() override {
    if (planned_ != trained_) plan_for_trained();
    if (plain_ && group_.rank() == 0 && !std::exchange(told_of_tied_, true)) warn_of_tied("data parallelism", parameters_);
    renew_buckets();
    note_writes();
    options_.hook->begin_step();
  }

  void begin_pass(bool last) override {
    if (plain_) note_writes();
    BucketedStep::begin_pass(last);
  }

  /// What comes behind them is marked anew.
  void note_writes() {
    if (parameter_writes_.first_written(parameters_).empty()) return;
    written_ = true;
    parameter_writes_.clear();
  }

  /// Asked where the host waits for the other ranks' words, and so for a device.
  uint64_t count_writes() override {
    if (options_.replicas == ReplicaStart::Trust) return 0;
    std::vector<nn::WriteCounts::Seen> own(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (synchronizes(i)) own[i] = nn::WriteCounts::of(parameters_[i].tensor);
    }
    return write_counts_.take(std::move(own));
  }

  bool were_written() const override { return written_ || parameter_writes_.changed(parameters_) || updates_.changed(parameters_); }

  /// Weights may be loaded between the wrapping and the first step, and on some ranks alone. Where writes have left the replicas equal, an update comes before
  /// the next comparison, and it is the last one if it shows: whether it does all ranks see alike, since they were equal before and are now.
  void compare(bool written, bool unlike) override {
    parameter_writes_.clear();  // gradients are all ranks' now, and an optimizer may take them
    if (!active() || options_.replicas == ReplicaStart::Trust) return;
    if (was_compared_ && !written && !unlike) return write_counts_.settle(unlike);
    unlike &= was_compared_ && !written;  // before the first step ranks may have made their weights in other ways
    written_ = written;                   // until they were found equal
    const std::string name = site("start");
    const comm::CallSite scope(name);
    compare_replicas(own_parameters(), group_, "data parallelism",
                     written
                         ? "on some rank it was written after a backward pass under no_sync(): an optimizer's step took gradients that were of that rank "
                           "alone, or other values were loaded than elsewhere. Let a pass without no_sync() complete gradients before each step, the last of "
                           "an epoch too, and load the same on every rank (ReplicaStart::Trust: who writes parameters there vouches)"
                     : unlike ? nn::kUnlikeWrites
                              : "");
    write_counts_.settle(unlike);
    was_compared_ = true;
    written_ = false;
    again_ = written && !(again_ && updates_.changed(parameters_));
    updates_.clear();
    if (again_) updates_.mark(parameters_, trained_);
  }

  void end_pass(bool last, bool complete) override {
    BucketedStep::end_pass(last, complete);
    if (active() && plain_ && !last && options_.replicas != ReplicaStart::Trust) parameter_writes_.mark(parameters_, trained_);
  }

  at::Tensor place(size_t i) override { return views_[i]; }
  void take(size_t i) override {
    if (!views_[i].defined()) allocate(bucket_at_[i]);
    recover_gradient(parameters_[i].tensor, views_[i]);
  }

  /// What the parameter has from a step before is summed over the ranks already, and what the program has put there the same on all, or refused.
  void settle(size_t i) override {
    drop_cleared(i);
    if (arrived_[i]) return;
    carried_[i] = std::exchange(parameters_[i].tensor.mutable_grad(), {});
    note_given(i, carried_[i]);
    if (carried_[i].defined() && views_[i].defined() && carried_[i].is_alias_of(views_[i])) carried_[i] = carried_[i].clone();
  }

  bool start(size_t bucket) override {
    if (buckets_[bucket].flat.numel() > 0) reductions_[bucket] = options_.hook->start(buckets_[bucket], channel_);
    return reductions_[bucket] != nullptr;
  }

  /// The hook's buckets learn it.
  void learn_used(const std::vector<bool>& used) override {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      for (size_t slot = 0; slot < slots_[b].size(); ++slot) buckets_[b].gradients[slot].used = used[slots_[b][slot]];
    }
  }

  bool advance(size_t bucket) override {
    if (!reductions_[bucket]->advance()) return false;
    reductions_[bucket].reset();
    return true;
  }

  /// The engine keeps the memory in which it may still write; buckets get another.
  void drop(size_t bucket) override {
    reductions_[bucket].reset();
    stale_ = true;
  }

  bool is_linear() const override { return options_.hook->is_linear(); }
  at::Tensor sum(size_t bucket) const override { return buckets_[bucket].flat; }

  /// None where nobody used the parameter: as on one process, optimizers skip it then.
  at::Tensor hand_over(size_t i, bool has_gradient) override {
    if (!has_gradient) set_gradient(parameters_[i].tensor, {});
    return views_[i];
  }

  void release(size_t bucket) override {
    for (const size_t i : slots_[bucket]) views_[i].reset();
    release_scratch(buckets_[bucket].flat);
    buckets_[bucket] = {};
  }

  void complete_step() override {
    options_.hook->complete_step();
    if (std::exchange(adopts_order_, false)) adopt_observed_order();
  }

  /// This step's part of a gradient goes, what was there before it comes back.
  void restore(size_t i) override {
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    if (!arrived_[i] || !gradient.defined()) return;
    if (gradient_writes_.zeroed(i, gradient)) carried_[i].reset();  // by the program
    set_gradient(parameters_[i].tensor, carried_[i]);
  }

  /// From now on the trained ones have gradients: a plan of their own, from the order known of all.
  void plan_for_trained() {
    std::vector<nn::NamedParameter> added;
    std::vector<at::ScalarType> dtypes;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained_[i] || prepared_[i]) continue;
      prepared_[i] = true;
      added.push_back(as_its_gradient_lies(i));
      dtypes.push_back(spec(i).dtype);
    }
    if (!added.empty()) {
      options_.hook->set_average(options_.average);
      options_.hook->prepare(added, dtypes, group_);
    }
    const auto count = std::ranges::count(trained_, true);
    bucket_site_ = site("bucket");  // ranks that disagree show it under comm.check
    if (count < std::ssize(trained_)) bucket_site_ += detail::concat(", ", count, " of ", trained_.size(), " parameters trained");
    lay_out(/*observed=*/false);
    planned_ = trained_;
    adopts_order_ = true;
  }

  /// For hooks, which go by how a gradient lies. Where the parameter lies otherwise, its values in another place.
  nn::NamedParameter as_its_gradient_lies(size_t i) const {
    const auto& [name, tensor, aliases] = parameters_[i];
    if (gradient_strides(tensor) == strides_[i]) return parameters_[i];
    const at::NoGradGuard no_grad;
    const at::Tensor laid = at::empty_strided(tensor.sizes(), strides_[i], tensor.options().requires_grad(false)).copy_(tensor), stand_in = tensor.detach();
    nn::set_data_of_same(stand_in, laid);
    return {name, stand_in, aliases};
  }

  void take_given_plan() {
    std::vector<GradientSpec> specs;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (trained_[i]) specs.push_back(spec(i));
    }
    check_bucket_layout(*options_.plan, specs, "given");
    plan_ = *options_.plan;
    adopts_order_ = false;
    std::vector<int64_t> order;
    for (const BucketLayout::Bucket& bucket : plan_.buckets) {
      for (const BucketLayout::Slot& slot : bucket.slots) order.push_back(static_cast<int64_t>(index_of_.at(slot.name)));
    }
    put_first(order);
  }

  GradientSpec spec(size_t i) const { return spec_of(parameters_[i], summed_dtype(parameters_[i].tensor, options_.reduce_dtype)); }

  /// `first`, then the others as they were.
  void put_first(std::vector<int64_t> first) {
    std::vector<bool> there(parameters_.size(), false);
    for (const int64_t index : first) there[index] = true;
    for (const int64_t index : order_) {
      if (!there[index]) first.push_back(index);
    }
    order_ = std::move(first);
  }

  void lay_out(bool observed) {
    std::vector<GradientSpec> specs;
    std::vector<int64_t> order;
    for (const int64_t index : order_) {
      if (!trained_[index]) continue;
      order.push_back(static_cast<int64_t>(specs.size()));
      specs.push_back(spec(index));
    }
    plan_ = make_bucket_layout(specs, order, options_.sizes, observed);
    stale_ = true;
  }

  /// Buckets of the plan, in the memory of the step before. A bucket of which somebody still holds a gradient, or of whose memory (a detached alias, a view), a
  /// parameter that is added to or whoever kept it, is left to them, and gets new memory.
  void renew_buckets() {
    if (stale_) {
      std::vector<std::vector<size_t>> slots;
      for (const BucketLayout::Bucket& bucket : plan_.buckets) {
        auto& indices = slots.emplace_back();
        for (const BucketLayout::Slot& slot : bucket.slots) {
          indices.push_back(index_of_.at(slot.name));
          bucket_at_[indices.back()] = slots.size() - 1;
        }
      }
      set_slots(std::move(slots));
      buckets_.clear();  // the old ones go before the new ones come
      views_.assign(parameters_.size(), {});
      buckets_.resize(plan_.buckets.size());
      references_.assign(plan_.buckets.size(), 0);
      reductions_.clear();
      reductions_.resize(plan_.buckets.size());
    }
    for (size_t b = 0; relay() == nullptr && b < plan_.buckets.size(); ++b) {  // relayed, they come and go
      if (stale_ || is_held(b)) allocate(b);
    }
    stale_ = false;
  }

  bool is_held(size_t b) const {
    constexpr size_t own_handles = 2;  // in views_ and in the bucket's gradients
    const auto held = [&](const BucketGradient& gradient) { return gradient.tensor.use_count() > own_handles; };
    return buckets_[b].flat.storage().use_count() > references_[b] || std::ranges::any_of(buckets_[b].gradients, held);
  }

  /// Gives a bucket its memory: such as the group's engine can sum without staging it, where it has such memory.
  void allocate(size_t b) {
    const MemoryScope scope(MemoryCategory::Gradients);
    const BucketLayout::Bucket& bucket = plan_.buckets[b];
    const at::Tensor& first = parameters_[slots_[b].front()].tensor;
    const at::Tensor flat = comm::empty(group_, {bucket.numel()}, first.options().dtype(bucket.dtype).requires_grad(false));
    buckets_[b] = {.flat = flat, .gradients = {}};
    for (size_t slot = 0; slot < bucket.slots.size(); ++slot) {
      at::Tensor& view = views_[slots_[b][slot]];
      const size_t i = slots_[b][slot];
      view = gradient_view(flat, bucket.slots[slot].offset, parameters_[i].tensor.sizes(), strides_[i]);
      buckets_[b].gradients.push_back({.name = bucket.slots[slot].name, .tensor = view});
    }
    references_[b] = flat.storage().use_count();
  }

  /// Numbers that a network has changed are no places in memory: each of this rank's has to be there once, as the same are trained on all.
  void check_arrived(const std::vector<int64_t>& arrived, const std::vector<int64_t>& own) const {
    std::vector<bool> due(parameters_.size(), false);
    for (const int64_t index : own) due[index] = true;
    for (size_t i = 0; i < arrived.size(); ++i) {
      const bool known = arrived[i] >= 0 && arrived[i] < static_cast<int64_t>(due.size());
      if (known && due[arrived[i]]) {
        due[arrived[i]] = false;
        continue;
      }
      throw CommError(detail::concat("the order of gradients that rank 0 of group ", group_.name(), " gave out arrived damaged on rank ", group_.rank(),
                                     ": entry ", i, " of ", arrived.size(), " is ", arrived[i],
                                     known ? ", which is there already, or of a parameter that is not trained here" : ", which is no parameter's number",
                                     "; look for a fault of the network, and go on from the last checkpoint"));
    }
  }

  /// Rank 0's order of arrival becomes every rank's plan, from the next step on.
  void adopt_observed_order() {
    const comm::CallSite site("ddp.plan");
    std::vector<bool> there(parameters_.size(), false);
    std::vector<int64_t> arrivals = finals_;
    for (const int64_t index : arrivals) there[index] = true;
    for (int64_t i = static_cast<int64_t>(parameters_.size()) - 1; i >= 0; --i) {
      if (trained_[i] && !there[i]) arrivals.push_back(i);
    }
    if (arrivals.empty()) return;
    at::Tensor order = at::tensor(arrivals, at::kLong).to(message_device(parameters_.front().tensor, group_));
    comm::broadcast(group_, order, 0);
    order = order.cpu();
    std::vector<int64_t> arrived(order.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>() + order.numel());
    check_arrived(arrived, arrivals);
    put_first(std::move(arrived));
    lay_out(/*observed=*/true);
  }

  comm::Group group_;
  DdpOptions options_;
  std::unordered_map<std::string, size_t> index_of_;
  std::vector<int64_t> order_;                                          ///< of all parameters, as their gradients are expected
  std::vector<std::vector<int64_t>> strides_;                           ///< of all gradients: ranks add them up as flat memory
  std::vector<bool> planned_;                                           ///< which were trained when the plan was made
  std::vector<bool> prepared_ = std::vector<bool>(parameters_.size());  ///< which the hook knows
  BucketLayout plan_;
  bool adopts_order_ = false;  ///< this step's order of arrival makes the plan anew
  bool told_of_tied_ = false;
  bool stale_ = false;  ///< the buckets are not those of plan_, or somebody may still write in them

  std::vector<GradientBucket> buckets_;
  std::vector<at::Tensor> views_;  ///< by parameter; undefined while its bucket has no memory
  std::vector<size_t> bucket_at_ = std::vector<size_t>(parameters_.size());
  std::vector<size_t> references_;        ///< per bucket: of our own to its memory
  nn::ParameterWrites parameter_writes_;  ///< since a pass that left gradients of this rank alone
  nn::WriteCounts write_counts_{"data parallelism", group_};
  bool written_ = false;         ///< there were such, and replicas have not been compared since
  bool again_ = false;           ///< equal weights may hide that moments have parted, which the next update shows
  nn::ParameterWrites updates_;  ///< since then
  bool was_compared_ = false;    ///< when the first step was complete
  GradientChannel channel_{group_, statistics_};
  std::vector<std::unique_ptr<BucketReduction>> reductions_;  ///< per bucket; null where nothing is under way
};

DistributedDataParallel::DistributedDataParallel(torch::nn::Module& module, comm::Group group, DdpOptions options)
    : impl_(std::make_unique<Impl>(*this, module, std::move(group), std::move(options))) {}
DistributedDataParallel::~DistributedDataParallel() = default;

void DistributedDataParallel::begin_step() { impl_->begin_step(); }
void DistributedDataParallel::before(ActionKind action, const MicroBatchPosition& position) { impl_->before(action, position); }
void DistributedDataParallel::after(ActionKind action, const MicroBatchPosition&) { impl_->after(action); }
void DistributedDataParallel::finish() { impl_->finish(); }
void DistributedDataParallel::after_update() { impl_->after_update(); }
const SynchronizationStatistics& DistributedDataParallel::statistics() const { return impl_->statistics(); }
std::vector<nn::NamedParameter> DistributedDataParallel::updated() const { return impl_->parameters(); }
void DistributedDataParallel::refuse_gradients_that_wait(const std::string& who) const { impl_->refuse_gradients_that_wait(who); }
const BucketLayout& DistributedDataParallel::plan() const { return impl_->plan(); }

}  // namespace tessera
