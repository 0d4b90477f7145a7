#include "tessera/zero/sharded_data_parallel.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <tuple>
#include <utility>

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/core/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/names.h"
#include "tessera/nn/step_protocol.h"
#include "tessera/nn/write_watch.h"
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
  Impl(ShardedDataParallel& self, torch::nn::Module& module, ShardGroups groups, ZeroOptions options)
      : self_(self),
        module_(module),
        groups_(std::move(groups)),
        options_(std::move(options)),
        parameters_(floating_parameters(module)),
        memory_(groups_.shard),
        carried_(parameters_.size()),
        is_zeroed_(parameters_.size(), false),
        is_handed_(parameters_.size(), false),
        gradient_writes_(parameters_.size()),
        used_(parameters_),
        arrived_(parameters_.size(), false),
        protocol_("sharded data parallelism", self.holds(),
                  {.open = [this](bool plain) { open(plain); },
                   .begin_pass = [this](bool last) { begin_pass(last); },
                   .end_pass = [this](bool last, bool complete) { end_pass(last, complete); },
                   .complete = [this] { complete(); },
                   .abandon = [this] { abandon(); }}) {
    require(options_.stage == 1 || options_.stage == 2, "zero.stage = ", options_.stage,
            ": this class shards optimizer state (1) and gradients (2); parameters are sharded by fully_shard (3)");
    require(!options_.reduce_dtype || *options_.reduce_dtype == at::kFloat || *options_.reduce_dtype == at::kDouble,
            "sharded data parallelism: reduce_dtype = ", *options_.reduce_dtype,
            ": gradients are summed in fp32 or fp64, or (unset) in each parameter's own dtype");
    require(!options_.network_dtype || *options_.network_dtype == at::kBFloat16 || *options_.network_dtype == at::kHalf,
            "sharded data parallelism: network_dtype = ", *options_.network_dtype, ": gradients cross the network in bf16, fp16, or (unset) as they are held");
    nn::assign_paths(module);
    nn::drop_apart(module, groups_.replicate.rank() * groups_.shard.size() + groups_.shard.rank());
    for (const auto& parameter : parameters_) hooks_.add(nn::GradientDispatcher::of(parameter.tensor).claim(&self_));
    if (!active()) {
      shards_ = parameters_;
      return;
    }
    refuse_shared_memory(parameters_);
    lay_out();
    make_shards();
    make_guards();
    for (const comm::Group& group : {groups_.shard, groups_.replicate}) hooks_.add(group.synchronize_in_backward());
    listen();
    // Before the first forward pass, which in the plain loop nobody announces.
    if (options_.replicas == ReplicaStart::Broadcast) {
      equalize(ReplicaStart::Broadcast);
    } else if (!parameters_.front().tensor.is_meta()) {
      share_buffers();
    }
  }

  ~Impl() {
    drop_reductions();
    for (const auto& parameter : parameters_) {
      if (synchronizes(parameter)) nn::GradientDispatcher::of(parameter.tensor).withdraw_place();
      if (nn::is_gradient_guard(parameter.tensor.grad())) set_gradient(parameter.tensor, {});
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  void begin_step() { protocol_.begin_step(); }

  void before(ActionKind action, const MicroBatchPosition& position) {
    protocol_.before(action, position);
    in_action_ = action != ActionKind::Forward;
    if (!in_action_ || !active()) return;
    const bool complete = action == ActionKind::Weights || !position.weights_later;
    is_last_reduction_ = !reduces_each() || (position.last && complete);
    phase_->last_micro_batch = position.last || reduces_each();
  }

  void after(ActionKind action) {
    protocol_.after(action);
    in_action_ = false;
  }

  void finish() { protocol_.finish(); }

  void after_update() {
    protocol_.after_update();
    if (!active()) return;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      require(!is_replaced(i), "sharded data parallelism: '", parameters_[i].name,
              "' was given other values (torch::load, set_data) between the optimizer's step and after_update(); load before the step or after it");
    }
    const comm::CallSite site("zero.parameters");
    std::vector<comm::Pending> gathers;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (may_be_updated(b)) gathers.push_back(comm::all_gather_async(groups_.shard, buckets_[b].parameters(), buckets_[b].parameter_part()));
    }
    const auto start = Clock::now();
    for (comm::Pending& gather : gathers) gather.wait();
    statistics_.exposed_s += seconds_since(start);
    marks_.clear();
  }

  const SynchronizationStatistics& statistics() const { return statistics_; }

  /// What is updated, as the program has left it.
  const std::vector<nn::NamedParameter>& shards() {
    if (active()) {
      take_replaced();
      settle_cleared();
    }
    return shards_;
  }

  const ShardLayout& layout() const { return layout_; }
  comm::Group norm_group() const { return active() ? groups_.shard : comm::Group::self(); }

  void clear_gradients() {
    for (const auto& parameter : parameters_) set_gradient(parameter.tensor, {});
    for (const auto& shard : shards_) set_gradient(shard.tensor, {});
  }

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

  /// What a bucket's part was when the step was complete.
  struct Mark {
    size_t bucket;
    int64_t version;
    int64_t written;  ///< versions of the parameters, which those who write parts do not touch
    at::Tensor samples;
  };

  bool active() const { return groups_.shard.size() * groups_.replicate.size() > 1; }
  bool reduces_each() const { return options_.stage == 2 && options_.accumulation == Accumulation::Sharded; }
  /// One bucket is reduced at a time where its memory goes when that is done, so that the peak does not depend on who waits for whom, and where a second
  /// collective follows.
  bool one_at_a_time() const { return options_.stage == 2 || groups_.replicate.size() > 1; }

  /// Whether an optimizer may have something to do in the bucket: also of a parameter that was frozen since, and still has its gradient.
  bool may_be_updated(size_t b) const {
    return is_trained_[b] || std::ranges::any_of(buckets_[b].plan().slots, [&](const auto& slot) { return shards_[slot.parameter].tensor.grad().defined(); });
  }

  bool synchronizes(const nn::NamedParameter& parameter) const {
    const auto* const dispatcher = nn::GradientDispatcher::find(parameter.tensor);
    return dispatcher != nullptr && dispatcher->owner() == &self_;
  }

  /// Parameters that are frozen now lie in buckets of their own, behind the others: as long as they are, these buckets cost nothing but their memory.
  void lay_out() {
    layout_.ranks = groups_.shard.size();
    for (const bool trained : {true, false}) {
      std::vector<size_t> indices;
      std::vector<nn::NamedParameter> some;
      for (size_t i = 0; i < parameters_.size(); ++i) {
        if (parameters_[i].tensor.requires_grad() != trained) continue;
        indices.push_back(i);
        some.push_back(parameters_[i]);
      }
      for (auto& bucket : make_shard_layout(specs_of(some), options_.sizes, layout_.ranks).buckets) {
        for (auto& slot : bucket.slots) slot.parameter = indices[slot.parameter];
        layout_.buckets.push_back(std::move(bucket));
      }
    }
    slot_of_.resize(parameters_.size());
    for (const auto& bucket : layout_.buckets) {
      for (size_t slot = 0; slot < bucket.slots.size(); ++slot) slot_of_[bucket.slots[slot].parameter] = {buckets_.size(), slot};
      buckets_.emplace_back(
          layout_, bucket, parameters_, groups_.shard,
          GradientForm{.dtype = options_.reduce_dtype.value_or(bucket.dtype), .network = options_.network_dtype, .keeps_whole = options_.stage == 1}, memory_);
    }
    is_trained_.assign(buckets_.size(), true);
  }

  /// Elements of a parameter that this rank owns, and where they begin in this rank's part of the bucket.
  std::pair<ShardLayout::Run, int64_t> owned(size_t i) const {
    const auto [b, s] = slot_of_[i];
    const auto& plan = buckets_[b].plan();
    const auto run = layout_.owned(plan, plan.slots[s], groups_.shard.rank());
    return {run, run.size > 0 ? plan.slots[s].offset + run.begin - groups_.shard.rank() * plan.part : 0};
  }

  void make_shards() {
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto [run, begin] = owned(i);
      Slice slice = elements(nn::slice_of(parameters_[i].tensor), run.begin, run.size);
      const at::Tensor piece = buckets_[slot_of_[i].bucket].parameter_part().narrow(0, begin, run.size).view(slice.local_shape());
      nn::NamedParameter shard{parameters_[i].name, piece, parameters_[i].aliases};
      shard.tensor.set_requires_grad(parameters_[i].tensor.requires_grad());
      nn::set_slice(shard.tensor, std::move(slice));
      nn::set_updated_for(shard.tensor, parameters_[i].tensor);
      shards_.push_back(std::move(shard));
    }
  }

  /// What becomes the gradient of a shard.
  at::Tensor gradient_shard(size_t i) const { return gradient_view(buckets_[slot_of_[i].bucket].gradient_part(), owned(i).second, shards_[i].tensor.sizes()); }

  void make_guards() {
    for (const auto& [name, tensor, aliases] : parameters_) {
      guards_.push_back(nn::make_gradient_guard(
          tensor,
          detail::concat("sharded data parallelism: the gradient of '", name,
                         "' lies in parts, one on each rank (ShardedDataParallel::shards): make the optimizer by tessera::zero_optimizer(sharded, make) in "
                         "place of one over model->parameters(), and clip by tessera::clip_grad_norm(sharded, max_norm)")));
    }
  }

  void listen() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      nn::GradientDispatcher& dispatcher = nn::GradientDispatcher::of(parameters_[i].tensor);
      const auto mine = [this, i](auto listener) {
        return [this, i, listener](const at::Tensor&) {
          if (synchronizes(parameters_[i])) (this->*listener)(i);
        };
      };
      hooks_.add(Attachment([tensor = parameters_[i].tensor, phase = phase_] {
        if (auto* const found = nn::GradientDispatcher::find(tensor)) found->unfollow(phase);
      }));
      hooks_.add(dispatcher.listen_arriving(mine(&Impl::arriving)));
      hooks_.add(dispatcher.listen(mine(&Impl::accumulated)));
      hooks_.add(dispatcher.listen_final(mine(&Impl::final)));
    }
  }

  void open(bool plain) {
    const c10::NoGradGuard no_grad;
    plain_ = plain;
    if (!active()) {
      if (!plain) clear_gradients();
      return;
    }
    drop_reductions();
    refuse_forgotten_gather();
    take_replaced();
    settle_cleared();
    starts_early_ = groups_.shard.in_backward().may_start_early(/*ordered=*/!plain, /*same_graph=*/!options_.find_unused_parameters) &&
                    groups_.replicate.in_backward().may_start_early(!plain, !options_.find_unused_parameters);
    // In the plain loop the first forward pass has been made by now, with whatever each rank had.
    if (steps_++ == 0) equalize(plain && options_.replicas == ReplicaStart::Broadcast ? ReplicaStart::Check : options_.replicas);
    follow_trained();
    if (plain) {
      carry_gradients();
    } else {
      for (const auto& parameter : parameters_) set_gradient(parameter.tensor, {});
      carried_.assign(parameters_.size(), {});
      is_zeroed_.assign(parameters_.size(), false);
    }
    for (size_t i = 0; i < shards_.size(); ++i) {
      if (plain && !trained_[i]) continue;
      set_gradient(shards_[i].tensor, {});
      is_handed_[i] = false;
    }
    used_.clear();
    arrived_.assign(parameters_.size(), false);
    statistics_ = {};
    overtaken_.assign(parameters_.size(), false);
    in_action_ = false;
    reduced_before_ = false;
    begin_round();
  }

  /// Which parameters have a gradient in this step, and which buckets are reduced and gathered for it.
  void follow_trained() {
    trained_ = trained_parameters(parameters_, &self_);
    used_.want(trained_);
    for (size_t b = 0; b < buckets_.size(); ++b) {
      is_trained_[b] = std::ranges::any_of(buckets_[b].plan().slots, [&](const auto& slot) { return trained_[slot.parameter]; });
      if (is_trained_[b]) buckets_[b].hold_part();
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (trained_[i]) nn::GradientDispatcher::of(parameters_[i].tensor).follow(phase_);
      shards_[i].tensor.set_requires_grad(parameters_[i].tensor.requires_grad());
    }
  }

  /// Parts that were reduced before this step, and that nobody has cleared, neither on the parameters nor on the shards: this step adds to them. Aside, since
  /// their memory is that of this step's.
  void carry_gradients() {
    const MemoryScope scope(MemoryCategory::Gradients);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& gradient = parameters_[i].tensor.grad();
      const at::Tensor& part = shards_[i].tensor.grad();
      const bool stands = trained_[i] && nn::is_gradient_guard(gradient) && part.defined();
      is_zeroed_[i] = stands && nn::is_cleared(gradient);
      carried_[i] = stands && !is_zeroed_[i] ? part.clone() : at::Tensor();
      const at::Tensor& memory = buckets_[slot_of_[i].bucket].gradient_part();
      const bool outlives = !trained_[i] && part.defined() && memory.defined() && part.is_alias_of(memory);
      if (outlives) set_gradient(shards_[i].tensor, part.clone());  // of a parameter that was frozen since
    }
  }

  /// A clear of the parameters, once a step of the plain loop is complete, is one of the parts.
  void settle_cleared() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!is_handed_[i]) continue;
      const at::Tensor& gradient = parameters_[i].tensor.grad();
      at::Tensor part = shards_[i].tensor.grad();
      if (!gradient.defined()) {
        set_gradient(shards_[i].tensor, {});
        is_handed_[i] = false;
      } else if (nn::is_cleared(gradient) && part.defined()) {
        const c10::NoGradGuard no_grad;
        part.zero_();
      }
    }
  }

  bool is_replaced(size_t i) const { return buckets_[slot_of_[i].bucket].is_replaced(slot_of_[i].slot); }

  /// Values that came by another storage (torch::load, set_data, vector_to_parameters) are the model's: they move into the bucket, and the parameter with them.
  void take_replaced() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!is_replaced(i)) continue;
      const auto& [name, tensor, aliases] = parameters_[i];
      const auto [b, slot] = slot_of_[i];
      require(buckets_[b].fits(slot), "sharded data parallelism: '", name, "' was given values of shape ", tensor.sizes(), ", ", tensor.scalar_type(), " on ",
              tensor.device(), " (torch::load, set_data, Module::to) after it was wrapped in another form; change a model's form before it is wrapped");
      buckets_[b].take_parameter(slot);
      for (Mark& mark : marks_) {
        if (mark.bucket == b) mark = mark_of(b);
      }
    }
  }

  /// Updated parts that were not brought together would let the replicas part. An optimizer may update behind autograd's back (Tensor::data), so in the plain
  /// loop, on the CPU, a few elements are compared besides the version, unless the program has written the parameters themselves.
  void refuse_forgotten_gather() {
    for (const Mark& mark : marks_) {
      bool updated = buckets_[mark.bucket].parameter_part()._version() != mark.version;
      if (mark.samples.defined() && written_versions(mark.bucket) == mark.written) {
        const at::Tensor changed = samples_of(buckets_[mark.bucket].parameters()).ne(mark.samples).any(1);
        updated |= changed[groups_.shard.rank()].item<bool>() && changed.sum().item<int64_t>() == 1;
      }
      require(!updated,
              "sharded data parallelism: this rank's parts were updated, but after_update() was not called to bring them together; call it after each "
              "optimizer.step(), or make the optimizer by zero_optimizer, which does. A program that writes values of its own into a parameter writes the "
              "parameter itself under NoGradGuard, or all of it on every rank: a write by data() of what lies in this rank's part alone looks the same");
    }
  }

  /// [ranks, some]: of each rank's part.
  at::Tensor samples_of(const at::Tensor& whole) const {
    constexpr int64_t kSamples = 256;
    const at::Tensor parts = whole.view({groups_.shard.size(), -1});
    return parts.slice(1, 0, std::nullopt, std::max<int64_t>(1, parts.size(1) / kSamples));
  }

  void mark_parts() {
    marks_.clear();
    if (groups_.shard.size() == 1) return;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (!is_trained_[b]) continue;
      marks_.push_back(mark_of(b));
    }
  }

  Mark mark_of(size_t b) const {
    const at::Tensor& whole = buckets_[b].parameters();
    const MemoryScope scope(MemoryCategory::Other);
    return {b, whole._version(), written_versions(b), plain_ && whole.is_cpu() ? samples_of(whole).clone() : at::Tensor()};
  }

  /// Grows with everything that is written to a bucket's parameters, and not to its parts.
  int64_t written_versions(size_t b) const {
    int64_t sum = 0;
    for (const auto& slot : buckets_[b].plan().slots) sum += parameters_[slot.parameter].tensor._version();
    return sum;
  }

  void begin_pass(bool last) {
    if (!active()) return;
    if (!in_action_) phase_->last_micro_batch = is_last_reduction_ = last;
    if (plain_) offer_places();
  }

  void end_pass(bool last, bool complete) {
    if (!active()) return;
    if (plain_) withdraw_places();
    if (!in_action_ || !reduces_each() || (last && complete)) return;
    launch_rest();
    reduced_before_ = true;
    begin_round();
  }

  void complete() {
    if (!active()) return;
    withdraw_places();
    const c10::NoGradGuard no_grad;
    statistics_.num_early = statistics_.num_collectives;
    // All of the step's collectives are made even where a gradient is missing, so that no other rank waits for one that refuses to go on.
    launch_rest();
    const std::vector<bool> used = options_.find_unused_parameters ? used_anywhere() : trained_;
    complete_reductions();
    memory_.clear();
    complete_across();
    if (!options_.find_unused_parameters && !plain_) used_.refuse_unused(groups_.shard);
    hand_over(used);
    if (options_.buffers == BufferBroadcast::EachStep) broadcast_all_buffers();
    mark_parts();
    if (options_.find_unused_parameters || !plain_) return;
    const comm::CallSite site("zero.unused");
    used_.refuse_unused_anywhere({groups_.shard, groups_.replicate});
  }

  /// Sums become the shards' gradients, on top of what was there before the step; none where nobody used the parameter: as on one process, optimizers skip it
  /// then.
  void hand_over(const std::vector<bool>& used) {
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (options_.average && is_trained_[b]) buckets_[b].gradient_part().div_(groups_.shard.size() * groups_.replicate.size());
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained_[i]) continue;
      const at::Tensor before = std::exchange(carried_[i], {});
      const bool has_gradient = used[i] || before.defined() || is_zeroed_[i];
      set_gradient(parameters_[i].tensor, has_gradient ? guards_[i] : at::Tensor());
      is_handed_[i] = plain_ && has_gradient;
      if (!has_gradient) continue;
      nn::arm(guards_[i]);
      at::Tensor part = gradient_shard(i);
      if (before.defined()) {
        part.add_(before);
        used_.mark(i);
      }
      set_gradient(shards_[i].tensor, part);
    }
  }

  /// What a pass that failed, and those under no_sync() before it, have left goes; what was there before them comes back.
  void abandon() {
    if (!active()) return;
    drop_reductions();
    withdraw_places();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained_[i]) continue;
      const at::Tensor& gradient = parameters_[i].tensor.grad();
      const bool zeroed = nn::is_cleared(gradient) || gradient_writes_.zeroed(i, gradient);
      if (!gradient.defined() || zeroed) carried_[i].reset();  // by the program
      if (zeroed || (is_zeroed_[i] && gradient.defined())) carried_[i] = at::zeros(shards_[i].tensor.sizes(), buckets_[slot_of_[i].bucket].gradient_options());
      set_gradient(parameters_[i].tensor, carried_[i].defined() ? guards_[i] : at::Tensor());
      if (carried_[i].defined()) {
        nn::arm(guards_[i]);
        set_gradient(shards_[i].tensor, std::exchange(carried_[i], {}));
        is_handed_[i] = plain_;
      }
    }
  }

  /// Lets go of what a step that failed has under way, and waits for none of it: the other ranks have failed at the same place, or will not get there.
  void drop_reductions() {
    for (const Reduction& reduction : std::exchange(in_flight_, {})) buckets_[reduction.bucket].drop_reduce();
    for (const Across& across : std::exchange(across_, {})) buckets_[across.bucket].drop_reduce();
  }

  void equalize(ReplicaStart start) {
    const comm::CallSite site("zero.start");
    for (const comm::Group& group : {groups_.replicate, groups_.shard}) {
      if (group.size() > 1) equalize_replicas(module_, group, start);
    }
    if (!plain_) share_buffers();
  }

  void share_buffers() {
    if (options_.buffers != BufferBroadcast::Never) broadcast_all_buffers();
  }

  /// From the first rank of all: first to its peers in the other replicas, then by each of those within its own.
  void broadcast_all_buffers() {
    const comm::CallSite site("zero.buffers");
    for (const comm::Group& group : {groups_.replicate, groups_.shard}) {
      if (group.size() > 1) broadcast_buffers(module_, group);
    }
  }

  /// A round ends with a reduction of every bucket: a micro-batch, or a step. To the dispatchers, which announce a gradient once a step, each is a step.
  void begin_round() {
    ++phase_->step;
    phase_->last_micro_batch = is_last_reduction_ = true;
    launched_ = 0;
    missing_.assign(buckets_.size(), 0);
    for (size_t i = 0; i < parameters_.size(); ++i) missing_[slot_of_[i].bucket] += trained_[i];
    if (!plain_) offer_places();  // in the plain loop only within a backward pass: a forward pass may be one whose gradients come in another step, or twice
  }

  /// Lets gradients be computed where they are reduced, in memory that is there once somebody wants it.
  void offer_places() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained_[i]) continue;
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
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (trained_[i]) nn::GradientDispatcher::of(parameters_[i].tensor).withdraw_place();
    }
  }

  /// Reductions of the micro-batch before went on under this one's forward.
  void complete_earlier_pass() {
    if (launched_ == 0) complete_reductions();
  }

  /// Before the gradient is accumulated: the guard goes, and what stood for it was carried when the step opened.
  void arriving(size_t index) {
    protocol_.arriving(parameters_[index].name);
    require(trained_[index], "sharded data parallelism: '", parameters_[index].name, "' was unfrozen within a step; change requires_grad between steps");
    require(launched_ <= slot_of_[index].bucket && !overtaken_[index], "sharded data parallelism: '", parameters_[index].name,
            "' got another gradient after its bucket was reduced; run each backward pass of a step but the last under no_sync(), or put before_micro_batch and "
            "after_micro_batch around each micro-batch of a step, and begin_step before each step");
    settle_earlier(index);
    arrived_[index] = true;
  }

  /// What a parameter has from before its first gradient of this step is not summed again.
  void settle_earlier(size_t index) {
    const at::Tensor& gradient = parameters_[index].tensor.grad();
    // Cleared, since the step opened or since its last pass.
    if (!gradient.defined()) is_zeroed_[index] = false;
    if (carried_[index].defined() && gradient_writes_.cleared(index, parameters_[index], "sharded data parallelism")) {
      is_zeroed_[index] = gradient.defined();
      carried_[index].reset();
    }
    if (arrived_[index] || !gradient.defined()) return;
    if (!nn::is_gradient_guard(gradient)) {  // from before this object: the same on all ranks, each takes its part
      const c10::NoGradGuard no_grad;
      const auto run = owned(index).first;
      carried_[index] = gradient.reshape({-1}).narrow(0, run.begin, run.size).view(shards_[index].tensor.sizes()).clone();
    }
    set_gradient(parameters_[index].tensor, {});
  }

  void accumulated(size_t index) {
    require_dense(parameters_[index]);
    const auto [bucket, slot] = slot_of_[index];
    complete_earlier_pass();
    if (!buckets_[bucket].awaits_gradient(slot)) take_gradient(index);
    if (plain_) gradient_writes_.see(index, parameters_[index].tensor.grad());
    used_.mark(index);
  }

  void take_gradient(size_t index) {
    FlatBucket& bucket = buckets_[slot_of_[index].bucket];
    if (!bucket.take_gradient(slot_of_[index].slot) || !plain_) return;
    for (const auto& slot : bucket.plan().slots) gradient_writes_.see(slot.parameter, parameters_[slot.parameter].tensor.grad());
  }

  void final(size_t index) {
    const auto [bucket, slot] = slot_of_[index];
    overtaken_[index] = options_.stage == 1 && buckets_[bucket].awaits_gradient(slot);
    take_gradient(index);
    if (plain_) gradient_writes_.see(index, parameters_[index].tensor.grad());
    --missing_[bucket];
    while (starts_early_ && launched_ < missing_.size() && missing_[launched_] == 0) launch_next();
  }

  void launch_rest() {
    while (launched_ < buckets_.size()) launch_next();
  }

  /// Starts the first bucket that has not been, on every rank in the order of the layout.
  void launch_next() {
    if (!is_trained_[launched_]) {
      ++launched_;
      return;
    }
    const comm::CallSite site("zero.bucket");
    const c10::NoGradGuard no_grad;
    if (one_at_a_time()) complete_reductions();
    FlatBucket& bucket = buckets_[launched_];
    for (size_t slot = 0; slot < bucket.plan().slots.size(); ++slot) fill(bucket, slot);
    bucket.start_reduce(/*add=*/reduced_before_);
    count(bucket.crossing_bytes());
    in_flight_.push_back({launched_++, is_last_reduction_});
  }

  /// Takes a gradient that was not announced: of an earlier micro-batch, or none.
  void fill(FlatBucket& bucket, size_t slot) {
    const size_t i = bucket.plan().slots[slot].parameter;
    if (!trained_[i]) return bucket.leave_out(slot);
    const at::Tensor& parameter = parameters_[i].tensor;
    const bool cleared = arrived_[i] && !reduced_before_ && !parameter.grad().defined();
    if (cleared) used_.mark(i, false);
    if (cleared || !arrived_[i] || plain_) settle_earlier(i);
    bucket.take_gradient(slot);
    if (options_.stage == 2) set_gradient(parameter, plain_ ? guards_[i] : at::Tensor());
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

  ShardedDataParallel& self_;
  torch::nn::Module& module_;
  ShardGroups groups_;
  ZeroOptions options_;
  std::vector<nn::NamedParameter> parameters_;  ///< also those that are frozen
  std::vector<bool> trained_;                   ///< which of them want a gradient in this step
  ShardLayout layout_;
  GradientMemory memory_;
  std::vector<FlatBucket> buckets_;
  std::vector<Place> slot_of_;  ///< by parameter
  std::vector<nn::NamedParameter> shards_;
  std::vector<at::Tensor> guards_;   ///< by parameter: what stands for its gradient when that lies in parts
  std::vector<at::Tensor> carried_;  ///< by parameter: this rank's part of a gradient from before this step
  std::vector<bool> is_zeroed_;      ///< by parameter: there was one, and the program has made it zero: so optimizers go on, though nobody uses it
  std::vector<bool> is_trained_;     ///< by bucket: it has a part in this step
  std::vector<Mark> marks_;          ///< of a step that is complete, until its parts were brought together
  std::shared_ptr<nn::StepPhase> phase_ = std::make_shared<nn::StepPhase>();

  std::vector<bool> is_handed_;  ///< by parameter: a step of the plain loop has left its guard and its part
  nn::GradientWrites gradient_writes_;
  bool plain_ = false;         ///< the step is one of the plain loop
  bool starts_early_ = false;  ///< reductions, while backward runs; else when it is done, for another wrapper's start on the same engine
  bool in_action_ = false;     ///< an engine's, which brings gradients
  int64_t steps_ = 0;
  bool reduced_before_ = false;  ///< in this step: parts hold sums of earlier micro-batches
  UsedParameters used_;
  std::vector<bool> arrived_;      ///< parameters that got a gradient in this step
  bool is_last_reduction_ = true;  ///< of each bucket, in this step
  std::vector<bool> overtaken_;    ///< stage 1: gradients that went without the one that was to be computed in place, which must not come any more
  std::vector<size_t> missing_;    ///< per bucket: gradients that are not final in this pass
  size_t launched_ = 0;            ///< buckets of this pass, in the order of the layout
  std::vector<Reduction> in_flight_;
  std::vector<Across> across_;
  SynchronizationStatistics statistics_;
  StepProtocol protocol_;
  Attachment hooks_;
};

ShardedDataParallel::ShardedDataParallel(torch::nn::Module& module, ShardGroups groups, ZeroOptions options)
    : impl_(std::make_unique<Impl>(*this, module, std::move(groups), std::move(options))) {}
ShardedDataParallel::~ShardedDataParallel() = default;

void ShardedDataParallel::begin_step() { impl_->begin_step(); }
void ShardedDataParallel::before(ActionKind action, const MicroBatchPosition& position) { impl_->before(action, position); }
void ShardedDataParallel::after(ActionKind action, const MicroBatchPosition&) { impl_->after(action); }
void ShardedDataParallel::finish() { impl_->finish(); }
void ShardedDataParallel::after_update() { impl_->after_update(); }
const SynchronizationStatistics& ShardedDataParallel::statistics() const { return impl_->statistics(); }
std::vector<nn::NamedParameter> ShardedDataParallel::updated() const { return impl_->shards(); }
comm::Group ShardedDataParallel::norm_group() const { return impl_->norm_group(); }
void ShardedDataParallel::clear_gradients() { impl_->clear_gradients(); }
std::vector<int64_t> ShardedDataParallel::held_elements(int rank) const { return impl_->held_elements(rank); }
const std::vector<nn::NamedParameter>& ShardedDataParallel::shards() const { return impl_->shards(); }
const ShardLayout& ShardedDataParallel::layout() const { return impl_->layout(); }

}  // namespace tessera
