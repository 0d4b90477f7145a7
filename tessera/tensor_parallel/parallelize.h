#pragma once

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/comm/group.h"
#include "tessera/core/attachment.h"
#include "tessera/nn/parallel_plan.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// A module whose layers are cut over a group; made by parallelize_module. Destroying it detaches what was attached, while parameters stay cut.
class TensorParallel {
 public:
  /// Ranks of the group that hold the same elements of a parameter and each a term of their gradient: `holders` of them from `first` on, the set number `set`
  /// of `sets`.
  struct Holders {
    int first = 0, holders = 1, set = 0, sets = 1;
  };

  TensorParallel(comm::Group group, Attachment attached, std::set<std::string> cut, std::map<std::string, Holders> shared);

  /// Sums the gradients whose terms several ranks hold (norms and biases under sequence parallelism, keys and values that ranks share), once a step, after data
  /// parallelism has finished. `updated` are the parameters, or the slices of them that this rank updates, under the parameters' names. One all-reduce for
  /// all of them together: 2 (n-1)/n of their elements sent, of shared keys and values those of all heads.
  void sum_shared_gradients(const std::vector<nn::NamedParameter>& updated) const;

  /// Of these parameters, those that this rank answers for in a norm over the group: what several ranks hold alike counts on the first of them.
  std::vector<nn::NamedParameter> counted_in_norm(const std::vector<nn::NamedParameter>& parameters) const;

  const comm::Group& group() const { return group_; }

 private:
  comm::Group group_;
  Attachment attached_;
  std::set<std::string> cut_;              ///< logical names of parameters of which each rank holds a part
  std::map<std::string, Holders> shared_;  ///< by logical name
};

/// Cuts the layers of `module` over `group` as `plan` says, in place. On meta nothing has memory yet, and materialize draws this rank's slices; a module with
/// values keeps its part of them. Every rank must pass the same plan, and afterwards the same inputs (of what goes in as Replicated).
///
/// Checked before anything runs, ConfigError: a pattern that matches no module (naming the nearest path), a style on a module of another kind, a layer with
/// two styles, a pair of layouts without a way between them, more ranks than features, heads or entries.
std::unique_ptr<TensorParallel> parallelize_module(torch::nn::Module& module, comm::Group group, const ParallelPlan& plan);

/// Runs `forward` once, on meta and without ranks, with `module` cut over `ranks` of them, and follows the layouts of what goes from layer to layer.
/// ConfigError for a plan whose pieces do not meet: a layer that takes another layout than it gets, an operator between two of them that has no meaning there.
/// `module` is on meta; it is cut afterwards, so hand over one that was built for this.
///   check_parallel_plan(*model, 4, plan, [&] { model(tokens); });
void check_parallel_plan(torch::nn::Module& module, int ranks, const ParallelPlan& plan, const std::function<void()>& forward);

/// The same for every holder.
template <class Contained>
std::unique_ptr<TensorParallel> parallelize_module(const torch::nn::ModuleHolder<Contained>& module, comm::Group group, const ParallelPlan& plan) {
  return parallelize_module(*module.ptr(), std::move(group), plan);
}

}  // namespace tessera
