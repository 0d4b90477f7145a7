#include "tessera/zero/sharded_data_parallel.h"

#include <chrono>
#include <map>
#include <tuple>
#include <utility>

#include <c10/core/GradMode.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/core/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/zero/flat_buckets.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::vector<GradientSpec> specs_of(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<GradientSpec> specs;
  for (const auto& parameter : parameters) specs.push_back({parameter.name, parameter.tensor.numel(), parameter.tensor.scalar_type()});
  return specs;
}

/// First byte, and the one after the last, of a tensor in its storage.
std::pair<int64_t, int64_t> extent(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto width = static_cast<int64_t>(tensor.element_size());
  return {tensor.storage_offset() * width, (tensor.storage_offset() + last + 1) * width};
}

/// Parameters that see each other's memory would no longer, once each has its own elements of a bucket.
void refuse_shared_memory(const std::vector<nn::NamedParameter>& parameters) {
  std::multimap<std::tuple<const void*, int64_t, int64_t>, std::string> held;  // by storage and place in it
  for (const auto& [name, tensor, aliases] : parameters) {
    if (tensor.numel() == 0) continue;
    const auto [begin, end] = extent(tensor);
    held.emplace(std::tuple(tensor.storage().unsafeGetStorageImpl(), begin, end), name);
  }
  for (auto before = held.begin(), here = before; here != held.end(); before = here++) {
    const auto& [storage, begin, end] = here->first;
    require(here == before || std::get<0>(before->first) != storage || std::get<2>(before->first) <= begin, "sharded data parallelism: parameters '",
            before->second, "' and '", here->second,
            "' share memory, and would not after they moved into buckets; give each its own (clone), or register one tensor twice");
  }
}

}  // namespace

class ShardedDataParallel::Impl {
 public:
  Impl(torch::nn::Module& module, ShardGroups groups, ZeroOptions options)
      : module_(module),
        groups_(std::move(groups)),
        options_(std::move(options)),
        parameters_(trainable_parameters(module)),
        memory_(groups_.shard),
        used_(parameters_) {
    require(options_.stage == 1 || options_.stage == 2, "zero.stage = ", options_.stage,
            ": this class shards optimizer state (1) and gradients (2); parameters are sharded by fully_shard (3)");
    require(!options_.reduce_dtype || *options_.reduce_dtype == at::kFloat || *options_.reduce_dtype == at::kDouble,
            "sharded data parallelism: reduce_dtype = ", *options_.reduce_dtype,
            ": gradients are summed in fp32 or fp64, or (unset) in each parameter's own dtype");
    require(!options_.network_dtype || *options_.network_dtype == at::kBFloat16 || *options_.network_dtype == at::kHalf,
            "sharded data parallelism: network_dtype = ", *options_.network_dtype, ": gradients cross the network in bf16, fp16, or (unset) as they are held");
    nn::assign_paths(module);
    if (!active()) {
      shards_ = parameters_;
      return;
    }
    refuse_shared_memory(parameters_);
    layout_ = make_shard_layout(specs_of(parameters_), options_.sizes, groups_.shard.size());
    slot_of_.resize(parameters_.size());
    for (const auto& bucket : layout_.buckets) {
      for (size_t slot = 0; slot < bucket.slots.size(); ++slot) slot_of_[bucket.slots[slot].parameter] = {buckets_.size(), slot};
      buckets_.emplace_back(
          layout_, bucket, parameters_, groups_.shard,
          GradientForm{.dtype = options_.reduce_dtype.value_or(bucket.dtype), .network = options_.network_dtype, .keeps_whole = options_.stage == 1}, memory_);
    }
    make_shards();
    listen();
  }

  void begin_step() {
    const c10::NoGradGuard no_grad;
    for (const auto& parameter : parameters_) set_gradient(parameter.tensor, {});
    if (!active()) return;
    if (steps_++ == 0) {
      equalize();
    } else if (options_.buffers == BufferBroadcast::EachStep) {
      broadcast_all_buffers();
    }
    for (const auto& shard : shards_) set_gradient(shard.tensor, {});
    used_.clear();
    statistics_ = {};
    in_flight_.clear();
    across_.clear();
    overtaken_.assign(parameters_.size(), false);
    in_step_ = true;
    reduced_before_ = false;
    begin_pass();
  }

  void set_last(bool last) {
    if (!active()) return;
    last_micro_batch_ = last;
    phase_->last_micro_batch = last || reduces_each();
  }

  void end_micro_batch(bool last) {
    if (!active() || !reduces_each() || last) return;
    launch_rest();
    reduced_before_ = true;
    begin_pass();
  }

  void finish() {
    if (!active()) return;
    invariant(in_step_, "ShardedDataParallel::finish without begin_step");
    in_step_ = false;
    withdraw_places();
    const c10::NoGradGuard no_grad;
    statistics_.num_early = statistics_.num_collectives;
    // All of the step's collectives are made even where a gradient is missing, so that no other rank waits for one that refuses to go on.
    launch_rest();
    const std::vector<bool> used = options_.find_unused_parameters ? used_anywhere() : std::vector<bool>(parameters_.size(), true);
    complete_reductions();
    memory_.clear();
    complete_across();
    if (!options_.find_unused_parameters) used_.refuse_unused(groups_.shard);
    for (FlatBucket& bucket : buckets_) {
      bucket.drop_gradients();
      if (options_.average) bucket.gradient_part().div_(groups_.shard.size() * groups_.replicate.size());
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (used[i]) set_gradient(shards_[i].tensor, gradient_shards_[i]);  // otherwise as on one process: optimizers skip it
    }
  }

  void after_update() {
    if (!active()) return;
    const comm::CallSite site("zero.parameters");
    std::vector<comm::Pending> gathers;
    for (const FlatBucket& bucket : buckets_) gathers.push_back(comm::all_gather_async(groups_.shard, bucket.parameters(), bucket.parameter_part()));
    const auto start = Clock::now();
    for (comm::Pending& gather : gathers) gather.wait();
    statistics_.exposed_s += seconds_since(start);
  }

  const SynchronizationStatistics& statistics() const { return statistics_; }
  const std::vector<nn::NamedParameter>& shards() const { return shards_; }
  const ShardLayout& layout() const { return layout_; }

  std::vector<int64_t> held_elements(int rank) const {
    std::vector<int64_t> held;
    for (const auto& bucket : layout_.buckets) {
      for (const auto& slot : bucket.slots) held.push_back(layout_.owned(bucket, slot, rank).size);
    }
    return held;
  }

 private:
  struct Place {
    size_t bucket, slot;
  };
  struct Reduction {
    size_t bucket;
    bool last;  ///< of its bucket in this step
  };
  /// The sum of a part over the replicas.
  struct Across {
    size_t bucket;
    std::optional<NarrowSum> narrow;  ///< where it crosses in fewer bits
    comm::Pending pending;
  };

  bool active() const { return groups_.shard.size() * groups_.replicate.size() > 1; }
  bool reduces_each() const { return options_.stage == 2 && options_.accumulation == Accumulation::Sharded; }
  /// One bucket is reduced at a time where its memory goes when that is done, so that the peak does not depend on who waits for whom, and where a second
  /// collective follows.
  bool one_at_a_time() const { return options_.stage == 2 || groups_.replicate.size() > 1; }

  void make_shards() {
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto [b, s] = slot_of_[i];
      const auto& bucket = buckets_[b];
      const auto& slot = bucket.plan().slots[s];
      const auto run = layout_.owned(bucket.plan(), slot, groups_.shard.rank());
      Slice slice = elements(nn::slice_of(parameters_[i].tensor), run.begin, run.size);
      const int64_t begin = run.size > 0 ? slot.offset + run.begin - groups_.shard.rank() * bucket.plan().part : 0;
      const auto piece = [&](const at::Tensor& part) { return part.narrow(0, begin, run.size).view(slice.local_shape()); };
      nn::NamedParameter shard{parameters_[i].name, piece(bucket.parameter_part()), parameters_[i].aliases};
      gradient_shards_.push_back(piece(bucket.gradient_part()));
      nn::set_slice(shard.tensor, std::move(slice));
      shards_.push_back(std::move(shard));
    }
  }

  void listen() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      nn::GradientDispatcher& dispatcher = nn::GradientDispatcher::of(parameters_[i].tensor);
      dispatcher.follow(phase_);
      hooks_.add(Attachment([tensor = parameters_[i].tensor] { nn::GradientDispatcher::of(tensor).follow(nullptr); }));
      hooks_.add(Attachment([tensor = parameters_[i].tensor] { nn::GradientDispatcher::of(tensor).withdraw_place(); }));
      hooks_.add(dispatcher.listen([this, i](const at::Tensor&) { accumulated(i); }));
      hooks_.add(dispatcher.listen_final([this, i](const at::Tensor&) { final(i); }));
    }
  }

  void equalize() {
    const comm::CallSite site("zero.start");
    for (const comm::Group& group : {groups_.replicate, groups_.shard}) {
      if (group.size() > 1) equalize_replicas(module_, group, options_.replicas);
    }
    if (options_.buffers != BufferBroadcast::Never) broadcast_all_buffers();
  }

  /// From the first rank of all: first to its peers in the other replicas, then by each of those within its own.
  void broadcast_all_buffers() {
    const comm::CallSite site("zero.buffers");
    for (const comm::Group& group : {groups_.replicate, groups_.shard}) {
      if (group.size() > 1) broadcast_buffers(module_, group);
    }
  }

  /// A pass ends with a reduction of every bucket: a micro-batch, or a step. To the dispatchers, which announce a gradient once a step, each is a step.
  void begin_pass() {
    ++phase_->step;
    phase_->last_micro_batch = last_micro_batch_ = true;
    launched_ = 0;
    missing_.clear();
    for (const auto& bucket : buckets_) missing_.push_back(bucket.plan().slots.size());
    offer_places();
  }

  /// Lets gradients be computed where they are reduced, in memory that is there once somebody wants it.
  void offer_places() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (options_.reduce_dtype && parameters_[i].tensor.scalar_type() != *options_.reduce_dtype) continue;
      // Two users' gradients are summed elsewhere, and come to a bucket that the one with the place may still hold: a bucket that goes would be made twice.
      if (options_.stage == 2 && !parameters_[i].aliases.empty()) continue;
      nn::GradientDispatcher::of(parameters_[i].tensor).offer_place([this, i] {
        complete_earlier_pass();
        return buckets_[slot_of_[i].bucket].place(slot_of_[i].slot);
      });
    }
  }

  void withdraw_places() {
    for (const auto& parameter : parameters_) nn::GradientDispatcher::of(parameter.tensor).withdraw_place();
  }

  /// Reductions of the micro-batch before went on under this one's forward.
  void complete_earlier_pass() {
    if (launched_ == 0) complete_reductions();
  }

  void accumulated(size_t index) {
    const auto [bucket, slot] = slot_of_[index];
    require(in_step_, "sharded data parallelism: '", parameters_[index].name,
            "' got a gradient outside a step; call begin_step before the first backward pass of each step");
    require(
        launched_ <= bucket && !overtaken_[index], "sharded data parallelism: '", parameters_[index].name,
        "' got another gradient after its bucket was reduced; put before_micro_batch and after_micro_batch around each micro-batch of a step, and begin_step "
        "before each step");
    complete_earlier_pass();
    if (!buckets_[bucket].awaits_gradient(slot)) buckets_[bucket].take_gradient(slot);
    used_.mark(index);
  }

  void final(size_t index) {
    const auto [bucket, slot] = slot_of_[index];
    overtaken_[index] = options_.stage == 1 && buckets_[bucket].awaits_gradient(slot);
    buckets_[bucket].take_gradient(slot);
    --missing_[bucket];
    while (launched_ < missing_.size() && missing_[launched_] == 0) launch_next();
  }

  void launch_rest() {
    while (launched_ < buckets_.size()) launch_next();
  }

  /// Starts the first bucket that has not been, on every rank in the order of the layout.
  void launch_next() {
    const comm::CallSite site("zero.bucket");
    const c10::NoGradGuard no_grad;
    if (one_at_a_time()) complete_reductions();
    FlatBucket& bucket = buckets_[launched_];
    for (size_t slot = 0; slot < bucket.plan().slots.size(); ++slot) bucket.take_gradient(slot);  // not announced: of an earlier micro-batch, or none
    if (options_.stage == 2) bucket.drop_gradients();
    bucket.start_reduce(/*add=*/reduced_before_);
    count(bucket.crossing_bytes());
    in_flight_.push_back({launched_++, last_micro_batch_});
  }

  /// Waits for what is under way; then each part goes on to meet those of the other replicas, once a step.
  void complete_reductions() {
    const comm::CallSite site("zero.bucket");
    for (const auto& [index, last] : std::exchange(in_flight_, {})) {
      FlatBucket& bucket = buckets_[index];
      const auto start = Clock::now();
      bucket.finish_reduce();
      statistics_.exposed_s += seconds_since(start);
      if (groups_.replicate.size() > 1 && last) start_across(index);
    }
  }

  void start_across(size_t index) {
    const at::Tensor& part = buckets_[index].gradient_part();
    Across& across = across_.emplace_back(Across{.bucket = index, .narrow = {}, .pending = {}});
    if (options_.network_dtype && c10::elementSize(*options_.network_dtype) < static_cast<size_t>(part.element_size())) {
      across.narrow.emplace(part, *options_.network_dtype, groups_.replicate.size());
    }
    const at::Tensor& crossing = across.narrow ? across.narrow->crossing() : part;
    across.pending = comm::all_reduce_async(groups_.replicate, crossing);
    count(static_cast<int64_t>(crossing.nbytes()));
  }

  void complete_across() {
    for (Across& across : std::exchange(across_, {})) {
      const auto start = Clock::now();
      across.pending.wait();
      statistics_.exposed_s += seconds_since(start);
      if (!across.narrow) continue;
      across.narrow->store(across.narrow->crossing(), buckets_[across.bucket].gradient_part(), /*add=*/false);
      across.narrow->release();
    }
  }

  void count(int64_t bytes) {
    statistics_.bytes += bytes;
    ++statistics_.num_collectives;
  }

  std::vector<bool> used_anywhere() {
    const comm::CallSite site("zero.unused");
    std::vector<bool> used = used_.anywhere(groups_.shard);
    if (groups_.replicate.size() == 1) return used;
    for (size_t i = 0; i < used.size(); ++i) {
      if (used[i]) used_.mark(i);
    }
    return used_.anywhere(groups_.replicate);
  }

  torch::nn::Module& module_;
  ShardGroups groups_;
  ZeroOptions options_;
  std::vector<nn::NamedParameter> parameters_;
  ShardLayout layout_;
  GradientMemory memory_;
  std::vector<FlatBucket> buckets_;
  std::vector<Place> slot_of_;  ///< by parameter
  std::vector<nn::NamedParameter> shards_;
  std::vector<at::Tensor> gradient_shards_;  ///< by parameter: what becomes its shard's gradient
  std::shared_ptr<nn::StepPhase> phase_ = std::make_shared<nn::StepPhase>();

  bool in_step_ = false;
  int64_t steps_ = 0;
  bool reduced_before_ = false;  ///< in this step: parts hold sums of earlier micro-batches
  UsedParameters used_;
  bool last_micro_batch_ = true;
  std::vector<bool> overtaken_;  ///< stage 1: gradients that went without the one that was to be computed in place, which must not come any more
  std::vector<size_t> missing_;  ///< per bucket: gradients that are not final in this pass
  size_t launched_ = 0;          ///< buckets of this pass, in the order of the layout
  std::vector<Reduction> in_flight_;
  std::vector<Across> across_;
  SynchronizationStatistics statistics_;
  Attachment hooks_;
};

ShardedDataParallel::ShardedDataParallel(torch::nn::Module& module, ShardGroups groups, ZeroOptions options)
    : impl_(std::make_unique<Impl>(module, std::move(groups), std::move(options))) {}
ShardedDataParallel::~ShardedDataParallel() = default;

void ShardedDataParallel::begin_step() { impl_->begin_step(); }
void ShardedDataParallel::before_micro_batch(const MicroBatchPosition& position) { impl_->set_last(position.last); }
void ShardedDataParallel::after_micro_batch(const MicroBatchPosition& position) { impl_->end_micro_batch(position.last); }
void ShardedDataParallel::finish() { impl_->finish(); }
void ShardedDataParallel::after_update() { impl_->after_update(); }
const SynchronizationStatistics& ShardedDataParallel::statistics() const { return impl_->statistics(); }
std::vector<int64_t> ShardedDataParallel::held_elements(int rank) const { return impl_->held_elements(rank); }
const std::vector<nn::NamedParameter>& ShardedDataParallel::shards() const { return impl_->shards(); }
const ShardLayout& ShardedDataParallel::layout() const { return impl_->layout(); }

}  // namespace tessera
