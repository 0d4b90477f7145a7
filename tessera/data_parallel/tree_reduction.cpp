#include "tessera/data_parallel/tree_reduction.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/attachment.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_guard.h"
#include "tessera/nn/late_parameters.h"
#include "tessera/nn/sharing.h"
#include "tessera/nn/step_protocol.h"
#include "tessera/nn/weight_gradients.h"
#include "tessera/nn/write_watch.h"

// Floating-point addition does not associate, so bits that are to be the same for any number of ranks need one order of additions that knows no ranks: a binary
// tree over the micro-batches' index. A leaf is the gradient of one micro-batch, hence each begins at zero and nothing accumulates between them. Within a
// rank's run partial sums merge as carries do in a binary counter, with a logarithm of them alive; what does not fit into a run is exchanged in one order that
// all ranks follow, so that blocking messages cannot wait in a circle.
//
// A pass may bring gradients of several ranks' micro-batches (experts that are dealt over data ranks). Each source then has a leaf and partial sums of its own;
// their runs are neighbours, so what they come to are again subtrees of one run.

namespace tessera {

class TreeReduction::Impl {
 public:
  Impl(TreeReduction& self, torch::nn::Module& module, comm::Group group, TreeReductionOptions options)
      : self_(self),
        module_(module),
        group_(std::move(group)),
        options_(options),
        parameters_(floating_parameters("TreeReduction", module, options.only)),
        late_(module, options.only),
        schedule_(make_tree_schedule(options.num_micro_batches, group_.size(), options.sources)),
        used_("TreeReduction", parameters_),
        protocol_("TreeReduction", self.holds(), nn::Turn(parameters_.front().name),
                  {.open = [this](bool plain) { open(plain); },
                   .begin_pass =
                       [this](bool) {
                         if (!padding_ && leaf_.empty()) begin_leaf();
                       },
                   .end_pass = [this](bool last, bool complete) { end_leaf(last, complete); },
                   .complete = [this] { complete(); },
                   .abandon = [this] { abandon(); },
                   .plain_loop_refusal = several() ? "an engine that tells apart whose micro-batch a gradient is of calls begin_step before" : ""}) {
    const comm::CallSite site("tree.start");
    nn::assign_paths(module_);
    drops_apart_ = nn::drop_apart(module_, group_.rank(), group_.size());
    nn::require_same_parts("TreeReduction", parameters_, {group_});
    if (group_.size() > 1) {
      refuse_renormalized("TreeReduction", module_, parameters_);
      left_ = LeftGradients(parameters_);
    }
    strides_ = gradient_strides(parameters_, /*alike=*/equalize_replicas(module_, group_, options_.replicas, options_.only));
    if (options_.buffers != BufferBroadcast::Never) broadcast_buffers(module_, group_);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      nn::GradientDispatcher& dispatcher = nn::GradientDispatcher::of(parameters_[i].tensor);
      hooks_.add(dispatcher.claim(&self_));
      hooks_.add(dispatcher.listen_arriving([this, i, &dispatcher](const at::Tensor&) {
        if (dispatcher.owner() != &self_) return;
        protocol_.arriving(parameters_[i].name);
        require(trained_[i], "TreeReduction: '", parameters_[i].name, "' was unfrozen within a step; change requires_grad between steps");
        if (several()) show(i, source_at_hand(i));
      }));
      hooks_.add(dispatcher.listen([this, i](const at::Tensor&) {
        require_summable("TreeReduction", parameters_[i]);
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
    if (!leaf_.empty() || (action == ActionKind::Forward && protocol_.calls().alive() > 1)) return;
    padding_ = several() ? !any_more() : position.padding;
    if (padding_) return clear_gradients();
    invariant(position.padding || std::ranges::any_of(sources_, [&](const Source& source) { return position.index == source.run.begin + begun_; }),
              "micro-batch ", position.index, " came where ", sources_.front().run.begin + begun_, " was expected: a rank's run is taken in ascending order");
    begin_leaf();
  }

  const std::vector<nn::NamedParameter>& parameters() const { return parameters_; }
  const SynchronizationStatistics& statistics() const { return statistics_; }
  const TreeSchedule& schedule() const { return schedule_; }

 private:
  /// One of the ranks whose micro-batches are summed here: its run of them, and what they have come to.
  struct Source {
    TreeSchedule::Run run;
    TreeStack stack;
    std::vector<at::Tensor> sums{};  ///< of the stack's nodes
    bool has(int64_t pass) const { return pass < run.size; }
  };
  /// Of a pass, the flat gradient of each source's micro-batch; none of a source that has no more.
  using Leaf = std::vector<at::Tensor>;

  bool several() const { return options_.sources > 1; }
  bool any_more() const {
    return std::ranges::any_of(sources_, [&](const Source& source) { return source.has(begun_); });
  }

  size_t source_at_hand(size_t parameter) const {
    const auto source = nn::GradientSource::current();
    invariant(source && *source < options_.sources, "TreeReduction: nobody says whose micro-batch the gradient of '", parameters_[parameter].name, "' is of");
    return static_cast<size_t>(*source);
  }

  /// What is delivered next for a parameter is added, in place, to the leaf of its source; of padding to nothing that is kept.
  void show(size_t parameter, size_t source) {
    set_gradient(parameters_[parameter].tensor, padding_ || views_[source].empty() ? at::Tensor() : views_[source][parameter]);
  }

  void open(bool plain) {
    plain_ = plain;
    if (plain) left_.refuse("TreeReduction", parameters_);
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
    sources_.clear();
    for (int i = 0; i < options_.sources; ++i) {
      const auto [begin, size] = chunk(options_.num_micro_batches, group_.size() * options_.sources, group_.rank() * options_.sources + i);
      sources_.push_back({.run = {begin, size}, .stack = TreeStack(options_.num_micro_batches)});
    }
    waiting_.clear();
    begun_ = summed_ = 0;
    used_.clear();
  }

  /// Of all sources.
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
    if (plain_ && begun_ > 0) settle_cleared();
    forms_.require_same("TreeReduction", parameters_);
    require(any_more(), "TreeReduction: backward pass ", begun_ + 1, " of a step in which rank ", group_.rank(), " has ", run().size, " of ",
            options_.num_micro_batches, " micro-batches (num_micro_batches); run all of them but the last under no_sync()");
    Leaf leaf;
    for (const Source& source : sources_) leaf.push_back(source.has(begun_) ? new_flat(/*zeroed=*/true) : at::Tensor());
    show_leaf(std::move(leaf));
  }

  void show_leaf(Leaf leaf) {
    leaf_ = std::move(leaf);
    views_.assign(sources_.size(), {});
    for (size_t source = 0; source < sources_.size(); ++source) {
      if (!leaf_[source].defined()) continue;
      views_[source].resize(parameters_.size());
      for (size_t i = 0; i < parameters_.size(); ++i) {
        if (!trained_[i]) continue;
        views_[source][i] = gradient_view(leaf_[source], offsets_[i], parameters_[i].tensor.sizes(), strides_[i]);
        if (!several()) set_gradient(parameters_[i].tensor, views_[source][i]);
      }
    }
  }

  /// Gradients that a backward has left for later are of its leaf, which waits for them.
  void reopen_leaf() {
    if (waiting_.empty()) return;
    show_leaf(std::move(waiting_.front()));
    waiting_.pop_front();
  }

  void end_leaf(bool last, bool complete) {
    if (!leaf_.empty()) {
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < parameters_.size() && !several(); ++i) {
        if (trained_[i]) recover_gradient(parameters_[i].tensor, views_.front()[i]);
      }
      if (complete) {
        add_leaf();
      } else {
        waiting_.push_back(std::exchange(leaf_, {}));
        ++begun_;
      }
    }
    padding_ = false;
    views_.clear();
    clear_gradients();
    if (plain_ && !last) show_guards();
  }

  void add_leaf() {
    const Leaf leaf = std::exchange(leaf_, {});
    for (size_t i = 0; i < sources_.size(); ++i) {
      Source& source = sources_[i];
      if (leaf[i].defined()) add(source.sums, leaf[i], source.stack.push(source.run.begin + summed_));
    }
    begun_ = std::max(begun_, ++summed_);
  }

  /// Puts `sum` behind the others, of which so many then go into their left neighbours.
  static void add(std::vector<at::Tensor>& sums, at::Tensor sum, int merges) {
    sums.push_back(std::move(sum));
    for (; merges > 0; --merges) {
      const at::Tensor right = std::move(sums.back());
      sums.pop_back();
      sums.back().add_(right);
    }
  }

  /// The sources' partial sums as those of one run, by node.
  std::map<TreeNode, at::Tensor> partial_sums() {
    TreeStack stack(options_.num_micro_batches);
    std::vector<at::Tensor> sums;
    for (Source& source : sources_) {
      for (size_t i = 0; i < source.sums.size(); ++i) add(sums, std::move(source.sums[i]), stack.push(source.stack.nodes()[i]));
      source.sums.clear();
    }
    std::map<TreeNode, at::Tensor> held;
    for (size_t i = 0; i < sums.size(); ++i) held.emplace(stack.nodes()[i], std::move(sums[i]));
    return held;
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
    int64_t done = 0;
    for (const Source& source : sources_) done += std::min(summed_, source.run.size);
    require(done == run().size, "TreeReduction: the step ended after ", done, " of the ", run().size, " micro-batches of rank ", group_.rank(),
            " (num_micro_batches = ", options_.num_micro_batches, "); each has a backward pass of its own, in the plain loop all but the last under no_sync()");
    const at::NoGradGuard no_grad;
    std::optional<StepWords> told;
    {
      std::optional<comm::ExposedTime::Scope> exposed;
      if (group_.size() > 1) exposed.emplace(statistics_.exposed, parameters_.front().tensor.device());
      const at::Tensor sum = exchange();
      hand_over(sum, used_parameters(told));
    }
    if (plain_) compare();
    if (options_.buffers == BufferBroadcast::EachStep) share_buffers(told);
    late_.refuse("TreeReduction");
  }

  /// Weights may be loaded between the wrapping and the first step, and on some ranks alone.
  void compare() {
    if (options_.replicas == ReplicaStart::Trust || was_compared_) return;
    const comm::CallSite site("tree.start");
    compare_replicas(nn::owned_by(self_), group_, "TreeReduction");
    was_compared_ = true;
  }

  /// Where the words of the step have not told that they fit, ranks ask.
  void share_buffers(const std::optional<StepWords>& told) {
    const comm::CallSite site("tree.buffers");
    if (!told || told->unlike_buffers) require_same_buffers(module_, {group_}, /*found=*/told.has_value());
    broadcast_buffers(module_, group_);
  }

  void abandon() {
    const bool between_passes = plain_ && leaf_.empty() && begun_ > 0;
    leaf_.clear();
    waiting_.clear();
    for (Source& source : sources_) source.sums.clear();
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
    std::map<TreeNode, at::Tensor> held = partial_sums();
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

  /// `told`: what the ranks have told each other beside, where they did.
  std::vector<bool> used_parameters(std::optional<StepWords>& told) const {
    const StepWords words{.buffers = options_.buffers == BufferBroadcast::EachStep ? hash_of_buffers(module_) : 0};
    if (group_.size() == 1 || options_.find_unused_parameters) {
      told = words;
      return used_.anywhere({group_}, &*told);
    }
    if (plain_) {
      told = used_.refuse_unused_anywhere({group_}, words);
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
      const at::ScalarType handed = at::isComplexType(own) ? own : options_.gradient_dtype.value_or(own);
      const at::Tensor gradient = gradient_view(sum, offsets_[i], parameter.sizes(), strides_[i]).to(handed);
      if (before.defined()) at::Tensor(gradient).add_(before);
      set_gradient(parameter, gradient);
    }
  }

  TreeReduction& self_;
  torch::nn::Module& module_;
  comm::Group group_;
  TreeReductionOptions options_;
  std::vector<nn::NamedParameter> parameters_;  ///< also those that are frozen
  nn::LateParameters late_;
  LeftGradients left_;
  std::shared_ptr<const void> drops_apart_;
  std::vector<std::vector<int64_t>> strides_;  ///< of all gradients: ranks add them up as flat memory
  std::vector<bool> trained_;                  ///< which of them want a gradient in this step
  std::vector<int64_t> offsets_;               ///< of each of these in a flat gradient
  nn::ParameterForms forms_{parameters_};      ///< as the offsets follow from them
  int64_t numel_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  TreeSchedule schedule_;

  bool plain_ = false;         ///< the step is one of the plain loop
  bool was_compared_ = false;  ///< what replicas are, when the first step was complete
  int64_t begun_ = 0;          ///< passes of this step whose leaves have begun
  int64_t summed_ = 0;         ///< of these, the ones whose gradients are complete and added up
  bool padding_ = false;
  std::vector<at::Tensor> carried_;             ///< gradients from before this step
  std::vector<Source> sources_;                 ///< by place among those whose micro-batches are summed here
  Leaf leaf_;                                   ///< of the pass at hand; empty between passes
  std::deque<Leaf> waiting_;                    ///< of those whose weights' gradients come later
  std::vector<std::vector<at::Tensor>> views_;  ///< into leaf_, by source and parameter
  std::vector<at::Tensor> guards_;              ///< by parameter, once they were needed: what stands for its gradient between the passes of a run
  UsedParameters used_;
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
