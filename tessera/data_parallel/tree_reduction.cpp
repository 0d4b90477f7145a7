#include "tessera/data_parallel/tree_reduction.h"

#include <chrono>
#include <map>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/core/memory.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"

namespace tessera {

class TreeReduction::Impl {
 public:
  Impl(torch::nn::Module& module, comm::Group group, TreeReductionOptions options)
      : module_(module),
        group_(std::move(group)),
        options_(options),
        parameters_(trainable_parameters(module)),
        schedule_(make_tree_schedule(options.num_micro_batches, group_.size())),
        used_(parameters_),
        stack_(options.num_micro_batches) {
    const comm::CallSite site("tree.start");
    equalize_replicas(module_, group_, options_.replicas);
    if (options_.buffers != BufferBroadcast::Never) broadcast_buffers(module_, group_);
    for (const auto& parameter : parameters_) {
      offsets_.push_back(numel_);
      numel_ += parameter.tensor.numel();
      dtype_ = c10::promoteTypes(dtype_, parameter.tensor.scalar_type());
    }
    for (size_t i = 0; i < parameters_.size(); ++i) {
      hooks_.add(nn::GradientDispatcher::of(parameters_[i].tensor).listen([this, i](const at::Tensor&) {
        if (!padding_) used_.mark(i);
      }));
    }
  }

  void begin_step() {
    if (options_.buffers == BufferBroadcast::EachStep && steps_++ > 0) {
      const comm::CallSite site("tree.buffers");
      broadcast_buffers(module_, group_);
    }
    clear_gradients();
    sums_.clear();
    stack_ = TreeStack(options_.num_micro_batches);
    next_index_ = schedule_.runs[group_.rank()].begin;
    used_.clear();
    statistics_ = {};
  }

  /// Gives the micro-batch gradients of its own: views of a flat tensor of zeros, so that autograd adds into it and nothing is copied.
  void before_micro_batch(const MicroBatchPosition& position) {
    padding_ = position.padding;
    if (padding_) return clear_gradients();
    invariant(position.index == next_index_, "micro-batch ", position.index, " came where ", next_index_,
              " was expected: a rank's run is taken in ascending order");
    leaf_ = new_flat(/*zeroed=*/true);
    views_ = views_of(leaf_);
    for (size_t i = 0; i < parameters_.size(); ++i) set_gradient(parameters_[i].tensor, views_[i]);
  }

  void after_micro_batch(const MicroBatchPosition& position) {
    if (!position.padding) {
      for (size_t i = 0; i < parameters_.size(); ++i) recover_gradient(parameters_[i].tensor, views_[i]);
      const at::NoGradGuard no_grad;
      sums_.push_back(std::move(leaf_));
      for (int merges = stack_.push(next_index_++); merges > 0; --merges) {
        const at::Tensor right = std::move(sums_.back());
        sums_.pop_back();
        sums_.back().add_(right);
      }
    }
    views_.clear();
    clear_gradients();
  }

  void finish() {
    const TreeSchedule::Run run = schedule_.runs[group_.rank()];
    invariant(next_index_ == run.begin + run.size, "TreeReduction::finish after ", next_index_ - run.begin, " of ", run.size, " micro-batches");
    const at::NoGradGuard no_grad;
    const auto start = std::chrono::steady_clock::now();
    const at::Tensor sum = exchange();
    hand_over(sum, used_parameters(run));
    statistics_.exposed_s = group_.size() > 1 ? std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() : 0;
  }

  const SynchronizationStatistics& statistics() const { return statistics_; }
  const TreeSchedule& schedule() const { return schedule_; }

 private:
  at::Tensor new_flat(bool zeroed) const {
    const MemoryScope scope(MemoryCategory::Gradients);
    const at::TensorOptions options = parameters_.front().tensor.options().dtype(dtype_).requires_grad(false);
    return zeroed ? at::zeros({numel_}, options) : at::empty({numel_}, options);
  }

  std::vector<at::Tensor> views_of(const at::Tensor& flat) const {
    std::vector<at::Tensor> views;
    for (size_t i = 0; i < parameters_.size(); ++i) views.push_back(gradient_view(flat, offsets_[i], parameters_[i].tensor));
    return views;
  }

  void clear_gradients() {
    for (const nn::NamedParameter& parameter : parameters_) set_gradient(parameter.tensor, {});
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

  std::vector<bool> used_parameters(const TreeSchedule::Run& run) const {
    if (group_.size() == 1 || options_.find_unused_parameters) return used_.anywhere(group_);
    if (run.size > 0) used_.refuse_unused(group_);
    return std::vector<bool>(parameters_.size(), true);
  }

  void send(const at::Tensor& flat, int to) {
    comm::send(group_, flat, to);
    ++statistics_.num_collectives;
    statistics_.bytes += static_cast<int64_t>(flat.nbytes());
  }

  /// The sum becomes the parameters' gradients: views of it, or copies where the parameter's dtype is another. None where nobody used the parameter.
  void hand_over(const at::Tensor& sum, const std::vector<bool>& used) {
    const MemoryScope scope(MemoryCategory::Gradients);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!used[i]) continue;
      const at::Tensor& parameter = parameters_[i].tensor;
      set_gradient(parameter, gradient_view(sum, offsets_[i], parameter).to(parameter.scalar_type()));
    }
  }

  torch::nn::Module& module_;
  comm::Group group_;
  TreeReductionOptions options_;
  std::vector<nn::NamedParameter> parameters_;
  std::vector<int64_t> offsets_;  ///< of each parameter in a flat gradient
  int64_t numel_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  TreeSchedule schedule_;

  int64_t steps_ = 0;
  int64_t next_index_ = 0;
  bool padding_ = false;
  at::Tensor leaf_;                ///< of the micro-batch at hand
  std::vector<at::Tensor> views_;  ///< into leaf_
  std::vector<at::Tensor> sums_;   ///< of stack_'s nodes
  UsedParameters used_;
  TreeStack stack_;
  SynchronizationStatistics statistics_;
  Attachment hooks_;
};

TreeReduction::TreeReduction(torch::nn::Module& module, comm::Group group, TreeReductionOptions options)
    : impl_(std::make_unique<Impl>(module, std::move(group), options)) {}
TreeReduction::~TreeReduction() = default;

void TreeReduction::begin_step() { impl_->begin_step(); }
void TreeReduction::before_micro_batch(const MicroBatchPosition& position) { impl_->before_micro_batch(position); }
void TreeReduction::after_micro_batch(const MicroBatchPosition& position) { impl_->after_micro_batch(position); }
void TreeReduction::finish() { impl_->finish(); }
const SynchronizationStatistics& TreeReduction::statistics() const { return impl_->statistics(); }
const TreeSchedule& TreeReduction::schedule() const { return impl_->schedule(); }

}  // namespace tessera
