#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include "tessera/comm/group.h"
#include "tessera/memory/filed_tensor.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/replicas.h"

namespace tessera {

struct UnitLayout;

/// Auto-wrap policy: called for every module below the root; true makes the module a unit of its own.
using WrapPolicy = std::function<bool(const std::string& path, const torch::nn::Module& module)>;

/// Wraps modules that have at least `parameters` elements of parameters, those of their submodules included; the same rule holds inside a wrapped module.
WrapPolicy wrap_by_size(int64_t parameters);

/// Wraps modules of type M: `wrap_by_type<LlamaBlockImpl>()`.
template <class M>
WrapPolicy wrap_by_type() {
  return [](const std::string&, const torch::nn::Module& module) { return dynamic_cast<const M*>(&module) != nullptr; };
}

/// Gives whole parameters their values. Called on every rank, one unit at a time, for each module that owns parameters; the rank keeps its slices, and the
/// rest is freed. The function has to write every element.
using ParameterInit = std::function<void(torch::nn::Module& module, const std::string& path)>;

/// How far gathers run ahead of their use, in the order that the pass before had.
struct PrefetchLimits {
  int64_t units = 1;                                    ///< gathered ahead of the one in use; 0: each unit is waited for
  int64_t bytes = std::numeric_limits<int64_t>::max();  ///< of those, together
};

/// How the wrapper notices that a unit is needed.
enum class ShardTrigger {
  Automatic,  ///< calls, where every module that owns parameters is a tessera::nn::Module; else operators
  Calls,      ///< interceptors around the modules: costs a step nothing per operator
  Operators,  ///< a dispatcher fallback that looks at the arguments of each operator of a step: any torch::nn::Module, unmodified
};

/// Where this rank's slices of parameters and reduced gradients lie between their uses; optimizer state and master weights are made beside them. The bits are
/// the same for all three.
///
/// Host (ZeRO-Offload, arXiv:2101.06840, for stage 3): a gather begins with a copy of the slice into its part of the gathered unit, and a reduction ends with a
/// copy of the reduced slice. Clipping and update run on the host. On an accelerator the host's memory is pinned, each direction has a stream of its own, and
/// a prefetched unit is copied and gathered while others compute. A CPU is its own host: the copies are made all the same.
///
///   device     the units in use and on their way; nothing that lasts from step to step
///   host       (w + g + k)/n bytes per element; a reduced slice on its way; with param_dtype the slices once more in that type, while a step runs
///   to device  two slices of each unit per micro-batch (one without reshard_after_forward): P/n elements each, in the type that is gathered
///   to host    one per reduction: P/n elements each, in the type of the reduction. With `replicate` and several reductions a step, the sums of the first ones
///              go back to the device once, P/n elements more, and the last reduction's come in the type of the kept gradients
///
/// A group of one copies units in and out without a collective, also where `param_dtype` or the type of kept gradients is not the parameters'.
///
/// Disk (ZeRO-Infinity, arXiv:2104.07857): slices lie in FullyShardOptions::file. They are read while the unit before is gathered, `prefetch.units` of them
/// beyond those that are gathered ahead, and dropped once they are on the device. Gradients are added up in the file; clipping and update go through it as the
/// host goes through memory. Nothing is cast beforehand. Optimizer state and masters lie where their maker puts them.
///
///   host       slices of units that are read, or on their way to the device, and a reduced slice
///   disk       (w + g)/n bytes an element
///   from disk  each slice that goes to the device; gradients once for each further micro-batch, norm, clipping and update; slices for the update
///   to disk    gradients for each micro-batch, and clipped ones; slices that were updated
enum class Offload { None, Host, Disk };

struct FullyShardOptions {
  nn::ParameterFilter only = {};  ///< picks parameters of the module; another wrapper has the rest, over other ranks or not (experts)
  std::string wrap = {};          ///< pattern of the modules that become units, such as "layers.*"; empty: see `policy`
  WrapPolicy policy = {};         ///< in place of a pattern; neither: the whole module is one unit
  ParameterInit init = {};        ///< for a module on meta; unset: call materialize(module, seed) afterwards, which draws this rank's slices only
  at::Device device = at::kCPU;   ///< where `init` gets its memory
  PrefetchLimits prefetch = {};
  /// true: a unit is freed after its forward and gathered again for backward. false: it stays until its backward, and is gathered once per micro-batch, unless
  /// an operator of a program's own loop meets slices between the two passes (an optimizer's step, an evaluation), which may write them. false takes calls that
  /// can be intercepted: refused where a unit's module, or one that is in no unit and has parameters, is a plain torch::nn::Module.
  bool reshard_after_forward = true;
  bool reduce_each_micro_batch = true;  ///< false: whole gradients are kept through the step and reduced once, at P elements of memory
  bool average = false;                 ///< divide gradients by the number of ranks: for a loss that each rank normalizes by itself
  /// true: ranks may use different parameters, and those that no rank used have no gradient. All units are gathered at once, in one order, and stay until
  /// backward has left them: 2 P elements a micro-batch, with all parameters in memory. (In evaluation each call from outside gathers: every rank makes as
  /// many.) false: an unused parameter is refused by name when the step completes, except on one rank.
  bool find_unused_parameters = false;
  /// Gather, and compute with, floating-point parameters in this dtype; the slices keep theirs. Without `cast`, floating-point inputs of the root and of
  /// wrapped modules are cast, too, where calls trigger the gathers. Where operators trigger them, libtorch's layers refuse an input of another dtype by name,
  /// and tessera's cast it.
  std::optional<at::ScalarType> param_dtype = {};
  std::optional<at::ScalarType> reduce_dtype = {};  ///< sum gradients of the ranks in this dtype; unset: the slices'
  /// Keep reduced gradients, over micro-batches and for the optimizer, in this dtype; unset: the wider of the slices' and reduce_dtype.
  std::optional<at::ScalarType> gradient_dtype = {};
  /// Picks the parameters that param_dtype applies to; unset: every floating-point parameter.
  std::function<bool(const nn::NamedParameter&)> cast = {};
  comm::Group replicate = {};  ///< ranks that hold the same slices (hybrid sharding): their reduced gradients are summed once a step
  /// For a module that has values already: what makes them equal on all ranks. But for Trust, ranks of `replicate` compare their slices once more, in the plain
  /// loop's first step. Weights that only some ranks of a shard have loaded in between are not noticed.
  ReplicaStart replicas = ReplicaStart::Check;
  /// When every rank takes over rank 0's buffers (BatchNorm's statistics). EachStep: evaluation and checkpoints agree on all ranks.
  BufferBroadcast buffers = BufferBroadcast::EachStep;
  int64_t unit_bytes_limit = 0;  ///< of a gathered unit; 0: no limit
  ShardTrigger trigger = ShardTrigger::Automatic;
  Offload offload = Offload::None;  ///< where slices lie between uses
  /// The place of each parameter, where places differ; unset: `offload`. All parameters of a unit have one place, since a unit is fetched as a whole.
  std::function<Offload(const nn::NamedParameter&)> place = {};
  std::shared_ptr<TensorFile> file = {};  ///< holds the slices with Offload::Disk

  /// Where slices of `parameter` lie between uses.
  Offload place_of(const nn::NamedParameter& parameter) const { return place ? place(parameter) : offload; }
  /// Whether any slice may lie elsewhere than on the device.
  bool offloads() const { return place || offload != Offload::None; }
};

/// A unit as a plan sees it.
struct ShardUnit {
  std::string name;                     ///< path of its module; of parameters between wrapped modules: of the first module that owns some of them
  std::vector<std::string> parameters;  ///< in the order in which they lie in the unit
  int64_t numel = 0;                    ///< of all its parameters
  int64_t gathered_bytes = 0;           ///< while in use, padding included
  int64_t local_bytes = 0;              ///< of this rank's slices, padding included
  Offload place = Offload::None;        ///< where these slices lie between uses
};

/// Shards parameters, gradients and optimizer state over the n ranks of a group (ZeRO stage 3, arXiv:1910.02054; FSDP, arXiv:2304.11277); made by fully_shard.
/// A unit is gathered before it is used in forward and backward and freed after it; its gradients are reduce-scattered as soon as backward has left it.
///
///   auto sharded = fully_shard(*model, group, {.wrap = "layers.*"});      // in place; the model may be on meta
///   materialize(*model, seed);                                            // this rank's slices only; then the loop of one device
///
/// Requires: the same calls in the same order on every rank, the same parameters frozen. The module outlives this object. One rank, one thread.
/// Guarantees: between steps each parameter, the very same tensor, is this rank's rows (slice_of), and grad() its slice of the sum over ranks, so an optimizer
///   over model->parameters() and checkpoints need nothing more. In a forward and its backward it has its whole shape.
/// Collective when: this is made, a forward or backward runs (evaluation too), a step is complete, weights are taken in, unshard().
/// Throws ConfigError, by name: clipping by libtorch, operators that mean neither slice nor whole, unused parameters, forwards after this object is gone.
/// Memory: (w + g + k)/n bytes an element (Offload says where), and, as Comm, units in use and prefetched; in backward whole gradients of at most two units.
/// Traffic: 3 (n-1)/n P elements a micro-batch, 2 without reshard_after_forward. Details: docs/sharding.md. Rare cases: docs/sharding-contract.md.
class FullyShardedDataParallel final : public GradientSynchronizer {
 public:
  FullyShardedDataParallel(torch::nn::Module& module, comm::Group group, FullyShardOptions options);
  ~FullyShardedDataParallel() override;
  FullyShardedDataParallel(const FullyShardedDataParallel&) = delete;
  FullyShardedDataParallel& operator=(const FullyShardedDataParallel&) = delete;

  void begin_step() override;
  void before(ActionKind action, const MicroBatchPosition& position) override;
  void after(ActionKind action, const MicroBatchPosition& position) override;
  void expect(ActionKind action) override;
  void drain() override;
  void finish() override;
  void after_update() override;
  const SynchronizationStatistics& statistics() const override;
  std::vector<nn::NamedParameter> updated() const override;
  void refuse_gradients_that_wait(const std::string& who) const override;
  comm::Group norm_group() const override;
  std::vector<int64_t> held_elements(int rank) const override;
  Slice slice_on(int rank, const at::Tensor& updated) const override;

  /// Gives the whole module back: every parameter in memory of its own, without gradient. Collective, between steps. Afterwards the module can be wrapped
  /// anew, in another layout, and this object refuses every call.
  void unshard();

  /// The units, in the order of registration. Empty where a group of one is the identity.
  std::vector<ShardUnit> units() const;

  /// The ranks over which the slices are cut: a norm over slices sums over them.
  const comm::Group& group() const;

 private:
  friend class SliceGuards;
  class Impl;

  /// How the unit of `parameter` is cut, and which of its parameters it is; null for a tensor that is not cut by this.
  std::pair<const UnitLayout*, size_t> layout_of(const at::Tensor& parameter) const;

  std::unique_ptr<Impl> impl_;
};

/// Shards `module` over `group`, in place. On meta the parameters become slices, which `init` or materialize gives memory; a module with values is made equal
/// over the ranks (options.replicas) and cut. Throws ConfigError for a pattern that matches nothing (naming the nearest path), a unit above unit_bytes_limit
/// (naming the largest), modules that cannot be intercepted with ShardTrigger::Calls, parameters of one unit at several places, an `init` that leaves a
/// parameter untouched or changes its shape.
[[nodiscard]] std::unique_ptr<FullyShardedDataParallel> fully_shard(torch::nn::Module& module, comm::Group group, FullyShardOptions options = {});

/// The same for every holder.
template <class Contained>
[[nodiscard]] std::unique_ptr<FullyShardedDataParallel> fully_shard(const torch::nn::ModuleHolder<Contained>& module, comm::Group group,
                                                                    FullyShardOptions options = {}) {
  return fully_shard(*module.ptr(), std::move(group), std::move(options));
}

/// FullyShardedDataParallel::unshard of the wrapper, or of all that shard `module`. Throws ConfigError where none does.
void unshard(torch::nn::Module& module);
inline void unshard(FullyShardedDataParallel& sharded) { sharded.unshard(); }
template <class Contained>
void unshard(const torch::nn::ModuleHolder<Contained>& module) {
  unshard(*module.ptr());
}

}  // namespace tessera
