#include "tessera/data_parallel/tree_reduction.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/step_protocol.h"
#include "tessera/nn/write_watch.h"

// Floating-point addition does not associate, so bits that are to be the same for any number of ranks need one order of additions that knows no ranks: a binary
// tree over the micro-batches' index. A leaf is the gradient of one micro-batch, hence each begins at zero and nothing accumulates between them. Within a
// rank's run partial sums merge as carries do in a binary counter, with a logarithm of them alive; what does not fit into a run is exchanged in one order that
// all ranks follow, so that blocking messages cannot wait in a circle.

namespace tessera {

class TreeReduction::Impl {
 public:
  Impl(TreeReduction& self, torch::nn::Module& module, comm::Group group, TreeReductionOptions options)
      : self_(self),
        module_(module),
        group_(std::move(group)),
        options_(options),
        parameters_(floating_parameters(module)),
        schedule_(make_tree_schedule(options.num_micro_batches, group_.size())),
        used_(parameters_),
        stack_(options.num_micro_batches),
        protocol_("TreeReduction", self.holds(), nn::Turn(parameters_.front().name),
                  {.open = [this](bool plain) { open(plain); },
                   .begin_pass =
                       [this](bool) {
                         if (!padding_ && !leaf_.defined()) begin_leaf();
                       },
                   .end_pass = [this](bool last, bool complete) { end_leaf(last, complete); },
                   .complete = [this] { complete(); },
                   .abandon = [this] { abandon(); }}) {
    const comm::CallSite site("tree.start");
    equalize_replicas(module_, group_, options_.replicas);
    if (options_.buffers != BufferBroadcast::Never) broadcast_buffers(module_, group_);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      nn::GradientDispatcher& dispatcher = nn::GradientDispatcher::of(parameters_[i].tensor);
      hooks_.add(dispatcher.claim(&self_));
      hooks_.add(dispatcher.listen_arriving([this, i, &dispatcher](const at::Tensor&) {
        if (dispatcher.owner() == &self_) protocol_.arriving(parameters_[i].name);
      }));
      hooks_.add(dispatcher.listen([this, i](const at::Tensor&) {
        require_summable(parameters_[i]);
        if (!padding_) used_.mark(i);
      }));
    }
  }

  ~Impl() {
    for (const nn::NamedParameter& parameter : parameters_) {
      if (nn::is_gradient_guard(parameter.tensor.grad())) set_gradient(parameter.tensor, {});
    }
  }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  StepProtocol& protocol() { return protocol_; }

  /// Gives the micro-batch gradients of its own.
  void before(ActionKind action, const MicroBatchPosition& position) {
    protocol_.before(action, position);
    if (action == ActionKind::Weights) return reopen_leaf();
    // With its forward where no other runs ahead: then its backward comes next.
    if (leaf_.defined() || (action == ActionKind::Forward && protocol_.calls().alive() > 1)) return;
    padding_ = position.padding;
    if (padding_) return clear_gradients();
    invariant(position.index == next_index_, "micro-batch ", position.index, " came where ", next_index_,
              " was expected: a rank's run is taken in ascending order");
    begin_leaf();
  }

  const std::vector<nn::NamedParameter>& parameters() const { return parameters_; }
  const SynchronizationStatistics& statistics() const { return statistics_; }
  const TreeSchedule& schedule() const { return schedule_; }

 private:
  void open(bool plain) {
    plain_ = plain;
    lay_out();
    carried_.assign(parameters_.size(), {});
    for (size_t i = 0; plain && i < parameters_.size(); ++i) {
      if (trained_[i]) carried_[i] = parameters_[i].tensor.grad();
    }
    clear_gradients();
    padding_ = false;
    statistics_ = {};
    start_run();
  }

  void start_run() {
    sums_.clear();
    stack_ = TreeStack(options_.num_micro_batches);
    waiting_.clear();
    next_index_ = next_sum_ = run().begin;
    used_.clear();
  }

  TreeSchedule::Run run() const { return schedule_.runs[group_.rank()]; }

  /// Where the gradient of each parameter that is trained now lies in a flat one.
  void lay_out() {
    trained_ = trained_parameters(parameters_, &self_);
    used_.want(trained_);
    forms_ = nn::ParameterForms(parameters_);
    offsets_.assign(parameters_.size(), 0);
    numel_ = 0;
    dtype_ = at::kFloat;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained_[i]) continue;
      offsets_[i] = numel_;
      numel_ += parameters_[i].tensor.numel();
      dtype_ = c10::promoteTypes(dtype_, parameters_[i].tensor.scalar_type());
    }
  }

  /// Views of a flat tensor of zeros, so that autograd adds into it and nothing is copied.
  void begin_leaf() {
    if (plain_ && next_index_ > run().begin) settle_cleared();
    forms_.require_same("TreeReduction", parameters_);
    require(next_index_ < run().begin + run().size, "TreeReduction: backward pass ", next_index_ - run().begin + 1, " of a step in which rank ", group_.rank(),
            " has ", run().size, " of ", options_.num_micro_batches, " micro-batches (num_micro_batches); run all of them but the last under no_sync()");
    show_leaf(new_flat(/*zeroed=*/true));
  }

  void show_leaf(at::Tensor leaf) {
    leaf_ = std::move(leaf);
    views_.assign(parameters_.size(), {});
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained_[i]) continue;
      views_[i] = gradient_view(leaf_, offsets_[i], parameters_[i].tensor);
      set_gradient(parameters_[i].tensor, views_[i]);
    }
  }

  /// Gradients that a backward has left for later are of its leaf, which waits for them.
  void reopen_leaf() {
    if (waiting_.empty()) return;
    show_leaf(std::move(waiting_.front()));
    waiting_.pop_front();
  }

  void end_leaf(bool last, bool complete) {
    if (leaf_.defined()) {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters_.size(); ++i) {
        if (trained_[i]) recover_gradient(parameters_[i].tensor, views_[i]);
      }
      if (complete) {
        add_leaf();
      } else {
        waiting_.push_back(std::exchange(leaf_, {}));
        ++next_index_;
      }
    }
    padding_ = false;
    views_.clear();
    clear_gradients();
    if (plain_ && !last) show_guards();
  }

  void add_leaf() {
    sums_.push_back(std::exchange(leaf_, {}));
    for (int merges = stack_.push(next_sum_++); merges > 0; --merges) {
      const at::Tensor right = std::move(sums_.back());
      sums_.pop_back();
      sums_.back().add_(right);
    }
    next_index_ = std::max(next_index_, next_sum_);
  }

  /// Between the passes of a run there is no gradient: what stands in its place tells an optimizer so, and us that the program cleared it.
  void show_guards() {
    guards_.resize(parameters_.size());
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained_[i]) continue;
      const auto& [name, tensor, aliases] = parameters_[i];
      if (!guards_[i].defined()) {
        guards_[i] = nn::make_gradient_guard(
            tensor,
            detail::concat("TreeReduction: the gradient of '", name,
                           "' is summed when the last of this rank's micro-batches is done, in a backward pass without no_sync(); read it, clip and step "
                           "after that"));
      }
      nn::arm(guards_[i]);
      set_gradient(tensor, guards_[i]);
    }
  }

  /// A run whose gradients were cleared begins anew, with nothing carried.
  void settle_cleared() {
    std::string cleared, kept;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (trained_[i]) (is_guarded(i) ? kept : cleared) = parameters_[i].name;
    }
    if (cleared.empty()) return;
    require(kept.empty(), "TreeReduction: the gradient of '", cleared, "' was cleared within a run of micro-batches, and that of '", kept,
            "' was not; clear all of the module's or none (zero_grad)");
    start_run();
    carried_.assign(parameters_.size(), {});
  }

  bool is_guarded(size_t i) const {
    const at::Tensor& gradient = parameters_[i].tensor.grad();
    return nn::is_gradient_guard(gradient) && !nn::is_cleared(gradient);
  }

  void complete() {
    const int64_t done = next_sum_ - run().begin;
    require(done == run().size, "TreeReduction: the step ended after ", done, " of the ", run().size, " micro-batches of rank ", group_.rank(),
            " (num_micro_batches = ", options_.num_micro_batches, "); each has a backward pass of its own, in the plain loop all but the last under no_sync()");
    const at::NoGradGuard no_grad;
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor sum = exchange();
    hand_over(sum, used_parameters());
    statistics_.exposed_s = group_.size() > 1 ? std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() : 0;
    if (options_.buffers != BufferBroadcast::EachStep) return;
    const comm::CallSite site("tree.buffers");
    broadcast_buffers(module_, group_);
  }

  void abandon() {
    const bool between_passes = plain_ && !leaf_.defined() && next_index_ > run().begin;
    leaf_.reset();
    waiting_.clear();
    sums_.clear();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (trained_[i]) set_gradient(parameters_[i].tensor, between_passes && !is_guarded(i) ? at::Tensor() : carried_[i]);
    }
  }

  at::Tensor new_flat(bool zeroed) const {
    const MemoryScope scope(MemoryCategory::Gradients);
    const at::TensorOptions options = parameters_.front().tensor.options().dtype(dtype_).requires_grad(false);
    return zeroed ? at::zeros({numel_}, options) : at::empty({numel_}, options);
  }

  void clear_gradients() {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (trained_[i]) set_gradient(parameters_[i].tensor, {});
    }
  }

  /// Runs this rank's part of the schedule's merges, then brings the root to every rank.
  at::Tensor exchange() {
    const comm::CallSite site("tree.exchange");
    const int rank = group_.rank();
    std::map<TreeNode, at::Tensor> held;
    for (size_t i = 0; i < sums_.size(); ++i) held.emplace(schedule_.kept[rank][i], std::move(sums_[i]));
    sums_.clear();
    for (const TreeMerge& merge : schedule_.merges) {
      if (merge.owner == rank) {
        const auto left = held.extract(merge.left);
        at::Tensor right;
        if (merge.right_owner == rank) {
          right = std::move(held.extract(merge.right).mapped());
        } else {
          right = new_flat(/*zeroed=*/false);
          comm::recv(group_, right, merge.right_owner);
          ++statistics_.num_collectives;
        }
        held.emplace(merge.sum, left.mapped().add_(right));
      } else if (merge.right_owner == rank) {
        send(std::move(held.extract(merge.right).mapped()), merge.owner);
      }
    }
    if (group_.size() == 1) return std::move(held.begin()->second);
    at::Tensor sum = rank == schedule_.root_owner ? std::move(held.begin()->second) : new_flat(/*zeroed=*/false);
    comm::broadcast(group_, sum, schedule_.root_owner);
    ++statistics_.num_collectives;
    if (rank == schedule_.root_owner) statistics_.bytes += static_cast<int64_t>(sum.nbytes());
    return sum;
  }

  std::vector<bool> used_parameters() const {
    if (group_.size() == 1 || options_.find_unused_parameters) return used_.anywhere(group_);
    if (plain_) {
      used_.refuse_unused_anywhere({group_});
    } else if (run().size > 0) {
      used_.refuse_unused(group_);
    }
    return trained_;
  }

  void send(const at::Tensor& flat, int to) {
    comm::send(group_, flat, to);
    ++statistics_.num_collectives;
    statistics_.bytes += static_cast<int64_t>(flat.nbytes());
  }

  /// The sum becomes the parameters' gradients, on top of those from before the step: views of it, or copies where they are to have another dtype. None where
  /// nobody used the parameter.
  void hand_over(const at::Tensor& sum, const std::vector<bool>& used) {
    const MemoryScope scope(MemoryCategory::Gradients);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!trained_[i]) continue;
      const at::Tensor& parameter = parameters_[i].tensor;
      const at::Tensor before = std::exchange(carried_[i], {});
      if (!used[i]) {
        set_gradient(parameter, before);
        continue;
      }
      const at::ScalarType own = parameter.scalar_type();
      const at::Tensor gradient = gradient_view(sum, offsets_[i], parameter).to(at::isComplexType(own) ? own : options_.gradient_dtype.value_or(own));
      if (before.defined()) at::Tensor(gradient).add_(before);
      set_gradient(parameter, gradient);
    }
  }

  TreeReduction& self_;
  torch::nn::Module& module_;
  comm::Group group_;
  TreeReductionOptions options_;
  std::vector<nn::NamedParameter> parameters_;  ///< also those that are frozen
  std::vector<bool> trained_;                   ///< which of them want a gradient in this step
  std::vector<int64_t> offsets_;                ///< of each of these in a flat gradient
  nn::ParameterForms forms_{parameters_};       ///< as the offsets follow from them
  int64_t numel_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  TreeSchedule schedule_;

  bool plain_ = false;      ///< the step is one of the plain loop
  int64_t next_index_ = 0;  ///< of the micro-batch that comes
  int64_t next_sum_ = 0;    ///< of the one whose gradient is complete next
  bool padding_ = false;
  std::vector<at::Tensor> carried_;  ///< gradients from before this step
  at::Tensor leaf_;                  ///< of the micro-batch at hand
  std::deque<at::Tensor> waiting_;   ///< of those whose weights' gradients come later
  std::vector<at::Tensor> views_;    ///< into leaf_
  std::vector<at::Tensor> sums_;     ///< of stack_'s nodes
  std::vector<at::Tensor> guards_;   ///< by parameter, once they were needed: what stands for its gradient between the passes of a run
  UsedParameters used_;
  TreeStack stack_;
  SynchronizationStatistics statistics_;
  StepProtocol protocol_;
  Attachment hooks_;
};

TreeReduction::TreeReduction(torch::nn::Module& module, comm::Group group, TreeReductionOptions options)
    : impl_(std::make_unique<Impl>(*this, module, std::move(group), options)) {}
TreeReduction::~TreeReduction() = default;

void TreeReduction::begin_step() { impl_->protocol().begin_step(); }
void TreeReduction::before(ActionKind action, const MicroBatchPosition& position) { impl_->before(action, position); }
void TreeReduction::after(ActionKind action, const MicroBatchPosition&) { impl_->protocol().after(action); }
void TreeReduction::finish() { impl_->protocol().finish(); }
void TreeReduction::after_update() { impl_->protocol().after_update(); }
const SynchronizationStatistics& TreeReduction::statistics() const { return impl_->statistics(); }
std::vector<nn::NamedParameter> TreeReduction::updated() const { return impl_->parameters(); }
const TreeSchedule& TreeReduction::schedule() const { return impl_->schedule(); }

}  // namespace tessera
