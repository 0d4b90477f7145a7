#pragma once

#include <functional>
#include <memory>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/nn/parallel_plan.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/replicas.h"

namespace tessera {

namespace tensor_parallel {
struct Context;
}

/// A module whose layers are cut over a group; made by parallelize_module, and kept for as long as the module computes: parameters stay cut when it goes, and
/// calls of their layers are refused from then on. What the ranks hold of each parameter is said beside its slice (nn/sharing.h): nn::sum_terms once a step,
/// and nn::counted_once in a norm, go by it.
class TensorParallel {
 public:
  TensorParallel(comm::Group group, std::shared_ptr<tensor_parallel::Context> context, std::shared_ptr<const void> alive, Attachment attached)
      : group_(std::move(group)), context_(std::move(context)), alive_(std::move(alive)), attached_(std::move(attached)) {}

  const comm::Group& group() const { return group_; }

  /// Says how long the whole sequence is in the passes that follow, where a part of it comes in (a stage of a pipeline). Who cuts a sequence knows by itself.
  void set_sequence(int64_t length);
  int64_t sequence() const;

 private:
  comm::Group group_;
  std::shared_ptr<tensor_parallel::Context> context_;
  std::shared_ptr<const void> alive_;
  Attachment attached_;
};

struct TensorParallelOptions {
  /// comm.check: ranks compare what has to be the same on all of them and comes from outside, at each call: ids and labels, or, where the plan embeds no ids,
  /// what its styles take as Replicated. CommError, the same on every rank, names module and ranks. Cost: a hash of the input and 8 bytes from every rank.
  bool check_inputs = false;
  /// tensor.overlap: layers compute while their parts are on the way (overlap.h); of those behind a PrepareInput, the ones it names. Same traffic, sums in
  /// another order.
  bool overlap = false;
  /// Of a module with values, of which each rank keeps its part: whether the whole is the same on all ranks, or rank 0's. Experts that are dealt already are
  /// left out; a module on meta has no values yet.
  ReplicaStart replicas = ReplicaStart::Check;
  /// Whether a forward refuses what was updated by one rank's term of its gradient (nn::sum_terms forgotten), or is whole and other on another rank
  /// (nn::require_alike). Until terms are summed for the first time: one number a parameter. An engine that sums them itself needs none.
  bool watch_terms = true;
};

/// Cuts the layers of `module` over `group` as `plan` says, in place. On meta nothing has memory yet, and materialize draws this rank's slices; a module with
/// values keeps its part of them. Every rank must pass the same plan, and afterwards the same inputs (of what goes in as Replicated).
///
/// Checked before anything runs, ConfigError: a pattern that matches no module (naming the nearest path), a style on a module of another kind, a layer with
/// two styles, a pair of layouts without a way between them, more ranks than features, heads or entries. In the first backward: a module with a style that saw
/// no call through its holder (nn/calls.h).
[[nodiscard]] std::unique_ptr<TensorParallel> parallelize_module(torch::nn::Module& module, comm::Group group, const ParallelPlan& plan,
                                                                 const TensorParallelOptions& options = {});

/// Runs `forward` once, on meta and without ranks, with `module` cut over `ranks` of them, and follows the layouts of what goes from layer to layer.
/// ConfigError for a plan whose pieces do not meet: a layer that takes another layout than it gets, an operator on a part or a term of a sum that has no
/// meaning there, or of which it is not known how it hands the layout on. `module` is on meta; it is cut afterwards, so hand over one that was built for this.
///   check_parallel_plan(*model, 4, plan, [&] { model(tokens); });
void check_parallel_plan(torch::nn::Module& module, int ranks, const ParallelPlan& plan, const std::function<void()>& forward);

/// The same for every holder.
template <class Contained>
[[nodiscard]] std::unique_ptr<TensorParallel> parallelize_module(const torch::nn::ModuleHolder<Contained>& module, comm::Group group, const ParallelPlan& plan,
                                                                 const TensorParallelOptions& options = {}) {
  return parallelize_module(*module.ptr(), std::move(group), plan, options);
}

}  // namespace tessera
