#include "tessera/zero/sharded_data_parallel.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/bucketed_step.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/late_updates.h"
#include "tessera/nn/names.h"
#include "tessera/nn/shared_memory.h"
#include "tessera/nn/write_watch.h"
#include "tessera/zero/flat_buckets.h"

// A bucket is cut into n equal parts, through parameters where it comes so: equal parts need no padding to the largest, and one collective each way. The price
// is that a parameter's gradient is nowhere whole. In its place stands a guard, and the parts and the guards have to tell one story, whichever of them a
// program clears. Much here sees to errors that would otherwise let replicas part without a word: an optimizer over the wrong tensors, an update that nobody
// gathered, weights loaded into a storage that is the bucket's no more.

namespace tessera {
namespace {

std::vector<GradientSpec> specs_of(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<GradientSpec> specs;
  for (const auto& parameter : parameters) specs.push_back(spec_of(parameter, parameter.tensor.scalar_type()));
  return specs;
}

}  // namespace

/// Buckets are cut into parts, one a rank, and what is updated are views of this rank's.
class ShardedDataParallel::Impl final : public BucketedStep {
 public:
  Impl(ShardedDataParallel& self, torch::nn::Module& module, ShardGroups groups, ZeroOptions options)
      : BucketedStep(self, self.holds(), module,
                     {.technique = "sharded data parallelism",
                      .site = "zero",
                      .groups = {groups.shard, groups.replicate},
                      .only = options.only,
                      .average = options.average,
                      .find_unused_parameters = options.find_unused_parameters,
                      .buffers = options.buffers,
                      .reduce_dtype = options.reduce_dtype,
                      .each_micro_batch = options.stage == 2 && options.accumulation == Accumulation::Sharded,
                      // So that the peak does not depend on who waits for whom, where a bucket's memory goes when it is reduced or a second collective follows.
                      .one_at_a_time = options.stage == 2 || groups.replicate.size() > 1 || options.relay,
                      .relay = options.relay,
                      .gives_way = options.stage == 2}),
        groups_(std::move(groups)),
        options_(std::move(options)),
        memory_(groups_.shard),
        is_zeroed_(parameters_.size(), false),
        standing_(parameters_.size(), 0),
        shown_(parameters_.size(), nullptr),
        seen_parts_(parameters_.size(), name_of({})),
        zeroed_parts_(parameters_.size()) {
    require(options_.stage == 1 || options_.stage == 2, "zero.stage = ", options_.stage,
            ": this class shards optimizer state (1) and gradients (2); parameters are sharded by fully_shard (3)");
    require(!options_.network_dtype || *options_.network_dtype == at::kBFloat16 || *options_.network_dtype == at::kHalf,
            "sharded data parallelism: network_dtype = ", *options_.network_dtype, ": gradients cross the network in bf16, fp16, or (unset) as they are held");
    if (!active()) {
      shards_ = parameters_;
      return;
    }
    require_disjoint("sharded data parallelism", groups_.shard, groups_.replicate);
    nn::refuse_shared_memory("sharded data parallelism", module, parameters_);
    nn::FormerMemory former("sharded data parallelism", parameters_);
    lay_out();
    former.refuse_use();
    for (const auto& parameter : parameters_) late_updates_.push_back(nn::late_updates(parameter.tensor));
    make_shards();
    make_guards();
    // Before the first forward pass, which in the plain loop nobody announces.
    const bool equalizes = options_.replicas == ReplicaStart::Broadcast;
    if (equalizes) equalize(ReplicaStart::Broadcast);
    if (equalizes || !parameters_.front().tensor.is_meta()) share_buffers();
  }

  ~Impl() override {
    let_go();
    for (size_t i = 0; i < guards_.size(); ++i) {
      if (shows_standing(i) || parameters_[i].tensor.grad().is_same(guards_[i])) drop_guard(i);
    }
  }

  void after_update() {
    BucketedStep::after_update();
    if (!active()) return;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      require(!is_replaced(i), "sharded data parallelism: '", parameters_[i].name,
              "' was given other values (torch::load, set_data, another wrapper that holds it, too) between the optimizer's step and after_update(); load "
              "before the step or after it, and give each "
              "wrapper parameters of its own (`only`)");
      refuse_former(i);  // an optimizer that asks nobody before its step has left the parameter out
    }
    const comm::CallSite site("zero.parameters");
    std::vector<comm::Pending> gathers;
    for (size_t b = 0; b < buckets_.size(); ++b) {
      const bool updated = may_be_updated(b), updated_late = take_late_updates(b);
      if (updated || updated_late) gathers.push_back(comm::all_gather_async(groups_.shard, buckets_[b].parameters(), buckets_[b].parameter_part()));
    }
    const comm::ExposedTime::Scope exposed(statistics_.exposed, parameters_.front().tensor.device());
    for (comm::Pending& gather : gathers) gather.wait();
    marks_.clear();
  }

  /// What is updated, as the program has left it.
  const std::vector<nn::NamedParameter>& shards() {
    if (active()) {
      take_replaced();
      follow_parts(Look::Shows);
      follow_frozen();
    }
    return shards_;
  }

  const ShardLayout& layout() const { return layout_; }
  comm::Group norm_group() const { return active() ? groups_.shard : comm::Group::self(); }

  /// Also what the program itself has put there.
  void refuse_gradients_that_wait(const std::string& who) {
    if (active()) follow_parts(Look::Uses);
    for (size_t i = 0; active() && i < parameters_.size(); ++i) {
      const auto& [name, tensor, aliases] = parameters_[i];
      const bool waits = synchronizes(i) && tensor.requires_grad() && tensor.grad().defined() && !nn::is_gradient_guard(tensor.grad());
      require(!waits, gradient_that_waits(who, name));
    }
  }

  void clear_gradients() override {
    BucketedStep::clear_gradients();
    for (const auto& shard : shards_) set_gradient(shard.tensor, {});
  }

  std::vector<int64_t> held_elements(int rank) const {
    std::vector<int64_t> held;
    for (const auto& bucket : layout_.buckets) {
      for (const auto& slot : bucket.slots) held.push_back(layout_.owned(bucket, slot, rank).size);
    }
    return held;
  }

  Slice slice_on(int rank, const at::Tensor& updated) const {
    const auto found = std::ranges::find_if(shards_, [&](const nn::NamedParameter& shard) { return shard.tensor.is_same(updated); });
    invariant(found != shards_.end(), "sharded data parallelism: a tensor that it does not update");
    return active() ? slice_of(static_cast<size_t>(found - shards_.begin()), rank) : nn::slice_of(updated);
  }

 private:
  struct Place {
    size_t bucket, slot;
  };
  /// What a bucket's part was when the step was complete.
  struct Mark {
    size_t bucket;
    int64_t version;
    int64_t written;  ///< versions of the parameters, which those who write parts do not touch
    at::Tensor samples;
  };
  /// What parts are looked at for.
  enum class Look {
    Shows,  ///< the program asks for them; also for a clear, so that no clear is refused
    Uses,   ///< a step, or a norm
    Adds,   ///< a pass
  };
  using Name = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  static Name name_of(const at::Tensor& tensor) { return Name(tensor.getIntrusivePtr()); }

  /// Whether an optimizer may have something to do in the bucket: also of a parameter that was frozen since, and still has its gradient.
  bool may_be_updated(size_t b) const {
    return is_trained(b) || std::ranges::any_of(buckets_[b].plan().slots, [&](const auto& slot) { return shards_[slot.parameter].tensor.grad().defined(); });
  }

  /// Whether an optimizer has shown an update in the bucket that was begun before (HostOptimizer), since this was asked for: also of what is frozen by now, and
  /// in the first step of a run that goes on.
  bool take_late_updates(size_t b) {
    bool found = false;
    for (const auto& slot : buckets_[b].plan().slots) {
      const int64_t now = nn::late_updates(parameters_[slot.parameter].tensor);
      if (std::exchange(late_updates_[slot.parameter], now) == now) continue;
      nn::show_update(shards_[slot.parameter].tensor);
      found = true;
    }
    return found;
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
    std::vector<std::vector<size_t>> slots;
    for (const auto& bucket : layout_.buckets) {
      auto& here = slots.emplace_back();
      for (const auto& slot : bucket.slots) {
        slot_of_[slot.parameter] = {buckets_.size(), here.size()};
        here.push_back(slot.parameter);
      }
      const GradientForm form{.dtype = summed_dtype(parameters_[bucket.slots.front().parameter].tensor, options_.reduce_dtype),
                              .network = options_.network_dtype,
                              .keeps_whole = options_.stage == 1 && relay() == nullptr,
                              .passes_on = relay() != nullptr};
      buckets_.emplace_back(layout_, bucket, parameters_, groups_, form, memory_, statistics_);
    }
    set_slots(std::move(slots));
  }

  /// Elements of a parameter that a rank owns.
  ShardLayout::Run owned_by(int rank, size_t i) const {
    const auto& plan = buckets_[slot_of_[i].bucket].plan();
    return layout_.owned(plan, plan.slots[slot_of_[i].slot], rank);
  }
  Slice slice_of(size_t i, int rank) const {
    const auto [begin, size] = owned_by(rank, i);
    return elements(nn::slice_of(parameters_[i].tensor), begin, size);
  }

  /// Those that this rank owns, and where they begin in its part of the bucket.
  std::pair<ShardLayout::Run, int64_t> owned(size_t i) const {
    const auto [b, s] = slot_of_[i];
    const auto& plan = buckets_[b].plan();
    const auto run = owned_by(groups_.shard.rank(), i);
    return {run, run.size > 0 ? plan.slots[s].offset + run.begin - groups_.shard.rank() * plan.part : 0};
  }

  void make_shards() {
    const c10::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const auto [run, begin] = owned(i);
      Slice slice = slice_of(i, groups_.shard.rank());
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
                         "place of one over model->parameters() (torch::optim::LBFGS, which needs whole gradients, works under DistributedDataParallel alone), "
                         "clip by tessera::clip_grad_norm(sharded, max_norm), and scale or change gradients by hand on sharded.updated()")));
    }
  }

  void prepare() override {
    refuse_forgotten_gather();
    take_replaced();
    follow_parts(Look::Adds);
    if (!plain_ || starts_early()) meet_first();
    for (size_t b = 0; b < buckets_.size(); ++b) {
      if (is_trained(b) && relay() == nullptr) buckets_[b].hold_part();
    }
    carry_gradients();
    follow_frozen();
    for (size_t i = 0; i < shards_.size(); ++i) {
      if (!plain_ || trained_[i]) set_gradient(shards_[i].tensor, {});
    }
  }

  void begin_pass(bool last) override {
    BucketedStep::begin_pass(last);
    for (size_t i = 0; plain_ && i < parameters_.size(); ++i) {
      require(
          !trained_[i] || !shards_[i].tensor.grad().defined(), "sharded data parallelism: a gradient was put on this rank's part of '", parameters_[i].name,
          "' within an accumulation, where those of the passes under no_sync() wait whole, and nobody can tell whether it is one more or stands for them; put "
          "it there before the first pass, or when a pass without no_sync() has completed the step");
    }
  }

  /// Beside other wrappers gradients, and so steps, may begin in another order on each rank; they end in one.
  void begin_completion() override { meet_first(); }

  void meet_first() {
    if (has_started_) return;
    // In the plain loop the first forward pass has been made by now, with whatever each rank had.
    equalize(plain_ && options_.replicas == ReplicaStart::Broadcast ? ReplicaStart::Check : options_.replicas);
    if (!plain_) share_buffers();
    has_started_ = true;  // a loop that goes on after a refusal is refused again
    (void)count_writes();
    write_counts_.settle(/*unlike=*/false);
  }

  /// Of the parameters, and of this rank's parts. Within a shard a write of one rank lasts in its own part alone.
  uint64_t count_writes() override {
    if (groups_.replicate.size() == 1 || options_.replicas == ReplicaStart::Trust) return 0;
    std::vector<nn::WriteCounts::Seen> own(2 * parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!synchronizes(i)) continue;
      own[2 * i] = nn::WriteCounts::of(parameters_[i].tensor);
      own[2 * i + 1] = nn::WriteCounts::of(shards_[i].tensor);
    }
    return write_counts_.take(std::move(own));
  }

  void compare(bool /*written*/, bool unlike) override {
    if (unlike) {
      const comm::CallSite site("zero.start");
      std::vector<nn::NamedParameter> own;
      for (size_t i = 0; i < parameters_.size(); ++i) {
        if (synchronizes(i)) own.push_back(shards_[i]);
      }
      write_counts_.compare(own);
    }
    write_counts_.settle(unlike);
  }

  /// Whoever makes an optimizer of the parts of what is trained makes it between steps, when the program has just frozen or unfrozen parameters.
  void follow_frozen() {
    for (size_t i = 0; i < shards_.size(); ++i) shards_[i].tensor.set_requires_grad(parameters_[i].tensor.requires_grad());
  }

  /// Parts that were reduced before this step, or that the program has put there, and that nobody has cleared, neither on the parameters nor on the shards:
  /// this step adds to them. Aside, since their memory is that of this step's.
  void carry_gradients() {
    const MemoryScope scope(MemoryCategory::Gradients);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& gradient = parameters_[i].tensor.grad();
      const at::Tensor& part = shards_[i].tensor.grad();
      const bool stands = trained_[i] && nn::is_gradient_guard(gradient) && part.defined();
      is_zeroed_[i] = stands && zeroed_parts_.is(i, part);
      carried_[i] = stands && !is_zeroed_[i] ? part.clone() : at::Tensor();
      nn::arm(gradient);  // so that a clear within the step shows
      const at::Tensor& memory = buckets_[slot_of_[i].bucket].gradient_part();
      const bool outlives = !trained_[i] && part.defined() && memory.defined() && part.is_alias_of(memory);
      if (outlives) {  // of a parameter that was frozen since
        set_gradient(shards_[i].tensor, part.clone());
        seen_parts_[i] = name_of(shards_[i].tensor.grad());
      }
    }
  }

  // A parameter's guard and the gradient of its part are one gradient:
  //   none      neither is there. What the program puts on the part stays, and is `standing` from the next use on (a step, a clip, a pass)
  //   standing  the guard is shown, by a complete step or for what was put. Put, scaled or replaced, the part's is the gradient; where the parameter is
  //             cleared, it is at once, so that what is put or added afterwards is another one. To none: none. To zeros: zeroed
  //   zeroed    standing; the part holds the zeros of that clear, until it is written
  // A guard that the program holds has not ended when the parameter no longer shows it. That it was a clear is found when the parts are looked at, and it is
  // one of the part that was there at the look before: another one was put since. A guard that is put back later is of no gradient, and refused.
  // While a step runs, what stood is carried, a guard that is left says whether the program clears it, and the parts have none.

  /// The guard of parameter `i` was cleared.
  void clear_part(size_t i, bool to_zeros) {
    at::Tensor& part = at::Tensor(shards_[i].tensor).mutable_grad();
    if (!to_zeros) {
      standing_[i] = 0;
      part.reset();
    } else if (part.defined()) {
      const c10::NoGradGuard no_grad;
      part.zero_();
      zeroed_parts_.see(i, part);
    }
  }

  void follow_parts(Look look) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const at::Tensor& parameter = parameters_[i].tensor;
      if (look != Look::Shows) refuse_former(i);
      if (standing_[i] != 0 && !nn::is_gradient_guard(parameter.grad()) && !clear_late(i, look)) continue;
      const at::Tensor& part = shards_[i].tensor.grad();
      const bool was_put = part.defined() && !nn::is_gradient_guard(part) && !parameter.grad().defined();
      if (was_put && relay() == nullptr && parameter.requires_grad() && synchronizes(i)) show_guard(i, part);
      if (!nn::is_gradient_guard(part)) seen_parts_[i] = name_of(part);
    }
  }

  /// By a program that keeps the guard. Whether that could be decided: what was not there before may have been put before the clear or behind it. Who would use
  /// it without a pass means the latter, since there is nothing else to use.
  bool clear_late(size_t i, Look look) {
    const at::Tensor& part = shards_[i].tensor.grad();
    const bool is_another = part.defined() && !nn::is_gradient_guard(part) && seen_parts_[i].lock().get() != part.unsafeGetTensorImpl();
    if (!is_another) {
      clear_part(i, /*to_zeros=*/false);
      return true;
    }
    if (look == Look::Shows) return false;
    require(
        look != Look::Adds, "sharded data parallelism: grad() of '", parameters_[i].name,
        "' was cleared while the program keeps what stood there, and this rank's part was given another gradient, before that or behind it: nobody can tell "
        "whether this pass adds to it. Let go of what grad() has shown before it is cleared, or call updated() between the two");
    standing_[i] = 0;
    return true;
  }

  /// Whether the guard that a parameter shows is of its gradient.
  bool shows_standing(size_t i) const { return standing_[i] != 0 && nn::identity_of_guard(parameters_[i].tensor.grad()) == shown_[i]; }

  /// One that was put back, or is another parameter's: an update would leave the parameter out without a word.
  void refuse_former(size_t i) const {
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    const bool is_former = nn::is_gradient_guard(gradient) && !shows_standing(i) && !gradient.is_same(guards_[i]) && synchronizes(i);
    require(
        !is_former, "sharded data parallelism: what was put into grad() of '", parameters_[i].name,
        "' does not stand for its gradient: it was kept from an earlier one, whose parts were cleared or used for another since, or is another tensor's or "
        "wrapper's. To set gradients aside keep clones of those of the parts (sharded.updated()), and put them on these again; or give it up by zero_grad()");
  }

  void show_guard(size_t i, const at::Tensor& part) {
    const int64_t number = standing_[i] = ++num_shown_;  // before the former goes, which is nobody's clear
    const at::Tensor guard = nn::make_gradient_guard_like(guards_[i], [this, i, number, alive = std::weak_ptr(alive_)](bool to_zeros) {
      if (!alive.expired() && standing_[i] == number) clear_part(i, to_zeros);
    });
    shown_[i] = nn::identity_of_guard(guard);
    seen_parts_[i] = name_of(part);
    set_gradient(parameters_[i].tensor, guard);
    set_gradient(shards_[i].tensor, part);
  }

  void drop_guard(size_t i) {
    standing_[i] = 0;
    set_gradient(parameters_[i].tensor, {});
  }

  bool is_replaced(size_t i) const { return buckets_[slot_of_[i].bucket].is_replaced(slot_of_[i].slot); }

  /// Values that came by another storage (torch::load, set_data, vector_to_parameters) are the model's: they move into the bucket, and the parameter with them.
  void take_replaced() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!is_replaced(i)) continue;
      require_same_form(i);
      const auto [b, slot] = slot_of_[i];
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
              "optimizer.step(), or make the optimizer by zero_optimizer, which does in optimizer.step() (and not in optimizer.inner().step()). A program that "
              "writes values of its own into a parameter writes the "
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
      if (is_trained(b)) marks_.push_back(mark_of(b));
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

  at::Tensor place(size_t i) override { return buckets_[slot_of_[i].bucket].place(slot_of_[i].slot); }

  void take(size_t i) override {
    FlatBucket& bucket = buckets_[slot_of_[i].bucket];
    if (!bucket.take_gradient(slot_of_[i].slot) || !plain_) return;
    for (const auto& slot : bucket.plan().slots) gradient_writes_.see(slot.parameter, parameters_[slot.parameter].tensor.grad());
  }

  /// The guard goes; what stood for it was carried when the step opened.
  void settle(size_t i) override {
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    // Cleared, since the step opened or since its last pass.
    if (!gradient.defined()) is_zeroed_[i] = false;
    if (drop_cleared(i)) is_zeroed_[i] = gradient.defined();
    if (arrived_[i] || !gradient.defined()) return;
    if (!nn::is_gradient_guard(gradient)) {  // the program's: where it is the same on all ranks each takes its part
      const c10::NoGradGuard no_grad;
      note_given(i, gradient);
      const auto run = owned(i).first;
      carried_[i] = gradient.reshape({-1}).narrow(0, run.begin, run.size).view(shards_[i].tensor.sizes()).clone();
    }
    drop_guard(i);
  }

  bool start(size_t bucket) override {
    for (size_t slot = 0; slot < slots_[bucket].size(); ++slot) {
      const size_t i = slots_[bucket][slot];
      if (!trained_[i]) {
        buckets_[bucket].leave_out(slot);
      } else if (options_.stage == 2 || relay() != nullptr) {
        set_gradient(parameters_[i].tensor, plain_ ? guards_[i] : at::Tensor());
      }
    }
    buckets_[bucket].start_reduce(/*add=*/!is_first_round() && relay() == nullptr, is_last_round());
    return true;
  }

  bool advance(size_t bucket) override {
    return buckets_[bucket].advance_reduce([&] {  // parts meet whole, with those of the rounds before
      for (const size_t i : slots_[bucket]) {
        if (trained_[i] && relay() != nullptr) relay()->add_kept(shards_[i].tensor, gradient_shard(i));
      }
    });
  }
  const at::Tensor& updated(size_t i) const override { return shards_[i].tensor; }
  void release(size_t bucket) override { buckets_[bucket].release_part(); }
  void drop(size_t bucket) override { buckets_[bucket].drop_reduce(); }
  at::Tensor sum(size_t bucket) const override { return buckets_[bucket].gradient_part(); }

  /// None where nobody used the parameter, and none was there before: as on one process, optimizers skip it then.
  at::Tensor hand_over(size_t i, bool has_gradient) override {
    has_gradient |= is_zeroed_[i];
    zeroed_parts_.see(i, {});
    if (!has_gradient) {
      drop_guard(i);
      return {};
    }
    const at::Tensor part = gradient_shard(i);
    show_guard(i, part);
    return part;
  }

  void complete_step() override {
    memory_.clear();
    mark_parts();
  }

  void restore(size_t i) override {
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    const bool zeroed = nn::is_cleared(gradient) || gradient_writes_.zeroed(i, gradient);
    if (!gradient.defined() || zeroed) carried_[i].reset();  // by the program
    if (zeroed || (is_zeroed_[i] && gradient.defined())) carried_[i] = at::zeros(shards_[i].tensor.sizes(), buckets_[slot_of_[i].bucket].gradient_options());
    zeroed_parts_.see(i, {});
    if (!carried_[i].defined()) return drop_guard(i);
    show_guard(i, std::exchange(carried_[i], {}));
  }

  ShardGroups groups_;
  ZeroOptions options_;
  ShardLayout layout_;
  GradientMemory memory_;
  std::vector<FlatBucket> buckets_;
  std::vector<Place> slot_of_;  ///< by parameter
  std::vector<nn::NamedParameter> shards_;
  std::vector<at::Tensor> guards_;     ///< by parameter: of what stands for its gradient when that lies in parts
  std::vector<bool> is_zeroed_;        ///< by parameter: there was one, and the program has made it zero: so optimizers go on, though nobody uses it
  std::vector<int64_t> standing_;      ///< by parameter: number of the guard that it shows; 0: none
  int64_t num_shown_ = 0;              ///< guards
  std::vector<const void*> shown_;     ///< by parameter: that guard, which lives while it stands
  std::vector<Name> seen_parts_;       ///< by parameter: what was the part's gradient when it was last looked at
  nn::GradientWrites zeroed_parts_;    ///< those that a clear of the parameters has zeroed
  std::vector<Mark> marks_;            ///< of a step that is complete, until its parts were brought together
  std::vector<int64_t> late_updates_;  ///< by parameter: those that were brought together
  bool has_started_ = false;
  nn::WriteCounts write_counts_{"sharded data parallelism", groups_.replicate, groups_.shard};
  std::shared_ptr<const void> alive_ = std::make_shared<char>();  ///< for guards that a program keeps
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
void ShardedDataParallel::refuse_gradients_that_wait(const std::string& who) const { impl_->refuse_gradients_that_wait(who); }
void ShardedDataParallel::clear_gradients() { impl_->clear_gradients(); }
std::vector<int64_t> ShardedDataParallel::held_elements(int rank) const { return impl_->held_elements(rank); }
Slice ShardedDataParallel::slice_on(int rank, const at::Tensor& updated) const { return impl_->slice_on(rank, updated); }
const std::vector<nn::NamedParameter>& ShardedDataParallel::shards() const { return impl_->shards(); }
const ShardLayout& ShardedDataParallel::layout() const { return impl_->layout(); }

}  // namespace tessera
