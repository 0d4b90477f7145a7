#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
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

/// What makes a module a unit of its own: asked for every module below the root.
using WrapPolicy = std::function<bool(const std::string& path, const torch::nn::Module& module)>;

/// Modules whose own parameters and those below them have at least `parameters` elements; inside such a module, smaller ones only if they do too.
WrapPolicy wrap_by_size(int64_t parameters);

/// Modules of type M: `wrap_by_type<LlamaBlockImpl>()`.
template <class M>
WrapPolicy wrap_by_type() {
  return [](const std::string&, const torch::nn::Module& module) { return dynamic_cast<const M*>(&module) != nullptr; };
}

/// Gives whole parameters their values: called for each module that owns some, one unit at a time, on every rank; each rank keeps its slices and the rest is
/// freed. Every element has to be written.
using ParameterInit = std::function<void(torch::nn::Module& module, const std::string& path)>;

/// How far gathers run ahead of their use, in the order seen in the pass before.
struct PrefetchLimits {
  int64_t units = 1;                                    ///< gathered ahead of the one in use; 0: each unit is waited for
  int64_t bytes = std::numeric_limits<int64_t>::max();  ///< of those, together
};

/// What notices that a unit is needed.
enum class ShardTrigger {
  Automatic,  ///< calls, where every module that owns parameters is a tessera::nn::Module; else operators
  Calls,      ///< interceptors around the modules: costs a step nothing per operator
  Operators,  ///< a dispatcher fallback that looks at the arguments of each operator of a step: any torch::nn::Module, unmodified
};

/// Where this rank's slices lie between their uses: those of parameters and of reduced gradients, and with them what is made like parameters, optimizer state
/// and master weights. A gather begins with a copy of the slice into its part of the gathered unit, a reduction ends with a copy of the reduced slice, and
/// clipping and update run on the host (ZeRO-Offload, arXiv:2101.06840, for stage 3). The same bits. On an accelerator the host's memory is pinned, each
/// direction has a stream of its own, and a unit that is prefetched is copied and gathered while others compute; on the CPU, which is its own host, the copies
/// are made all the same.
///
///   device     the units in use and on their way; nothing that lasts from step to step
///   host       (w + g + k)/n bytes per element; a reduced slice on its way; with param_dtype the slices once more in that type, while a step runs
///   to device  two slices of each unit per micro-batch (one without reshard_after_forward): P/n elements each, in the type that is gathered
///   to host    one per reduction: P/n elements each in the type of the reduction. With `replicate` and several reductions a step, sums of the first ones go
///              back to the device once: P/n elements more to the device, and the last reduction's come in the type of the kept gradients
///
/// A group of one copies units in and out without a collective, as it does where `param_dtype` or the type of kept gradients is not the parameters'.
///
/// Disk: those slices of parameters and of reduced gradients lie in FullyShardOptions::file (ZeRO-Infinity, arXiv:2104.07857). Slices are read while the unit
/// before is gathered, `prefetch.units` of them beyond those that are gathered ahead, and dropped once they are on the device; gradients are added up in the
/// file, and clipping and update go through it as the host goes through memory. Nothing is cast beforehand. What is made like parameters lies where its maker
/// puts it.
///
///   host       slices of units that are read, or on their way to the device, and a reduced slice
///   disk       (w + g)/n bytes an element
///   from disk  each slice that goes to the device; gradients once for each further micro-batch, norm, clipping and update; slices for the update
///   to disk    gradients for each micro-batch, and clipped ones; slices that were updated
enum class Offload { None, Host, Disk };

struct FullyShardOptions {
  nn::ParameterFilter only = {};  ///< which of the module's parameters; the rest are another's, who may shard them over other ranks (experts)
  std::string wrap = {};          ///< pattern of the modules that become units, such as "layers.*"; empty: see `policy`
  WrapPolicy policy = {};         ///< in place of a pattern; neither: the whole module is one unit
  ParameterInit init = {};        ///< for a module on meta; unset: call materialize(module, seed) afterwards, which draws this rank's slices only
  at::Device device = at::kCPU;   ///< where `init` gets its memory
  PrefetchLimits prefetch = {};
  /// false: a unit stays gathered until its backward, and is gathered once per micro-batch; in a program's own loop, too, unless an operator meets slices
  /// between the two passes (an optimizer's step, an evaluation), for it may write them.
  bool reshard_after_forward = true;
  bool reduce_each_micro_batch = true;  ///< false: whole gradients are kept through the step and reduced once, at P elements of memory
  bool average = false;                 ///< divide gradients by the number of ranks: for a loss that each rank normalizes by itself
  /// Ranks may use different parameters, and those that no rank used have no gradient; otherwise they are refused by name when the step completes, but on one
  /// rank. Then all units are gathered at once, in one order, and stay until backward has left them: 2 P elements a micro-batch, all parameters in memory
  /// meanwhile. (Without gradients each call from outside gathers: there every rank makes as many.)
  bool find_unused_parameters = false;
  /// Gather (and compute with) floating-point parameters in this dtype; the slices keep theirs. Where `cast` names none of them, floating-point inputs of the
  /// root and of wrapped modules are cast, too, if calls trigger the gathers; if operators do, libtorch's layers refuse an
  /// input of another dtype by name, and ours cast it.
  std::optional<at::ScalarType> param_dtype = {};
  std::optional<at::ScalarType> reduce_dtype = {};  ///< sum gradients of the ranks in this dtype; unset: the slices'
  /// Keep reduced gradients, over micro-batches and for the optimizer, in this dtype; unset: the wider of the slices' and reduce_dtype.
  std::optional<at::ScalarType> gradient_dtype = {};
  /// Where param_dtype applies; unset: to every floating-point parameter.
  std::function<bool(const nn::NamedParameter&)> cast = {};
  comm::Group replicate = {};  ///< ranks that hold the same slices (hybrid sharding): their reduced gradients are summed once a step
  /// Of a module that has values already: what makes those of the ranks equal. But for Trust, ranks of `replicate` compare their slices once more, in the plain
  /// loop's first step; what some ranks of a shard have not loaded meanwhile, nobody can tell.
  ReplicaStart replicas = ReplicaStart::Check;
  /// Buffers (BatchNorm's statistics) of rank 0 are every rank's: when a step is complete, so that evaluation and checkpoints agree.
  BufferBroadcast buffers = BufferBroadcast::EachStep;
  int64_t unit_bytes_limit = 0;  ///< a gathered unit may not take more than that; 0: no limit
  ShardTrigger trigger = ShardTrigger::Automatic;
  Offload offload = Offload::None;  ///< where slices wait
  /// The same for each parameter, where they wait at several places; unset: `offload`. A unit is fetched as a whole, so all of its parameters have one place.
  std::function<Offload(const nn::NamedParameter&)> place = {};
  std::shared_ptr<TensorFile> file = {};  ///< in which those with Disk lie

  /// Where slices of `parameter` wait.
  Offload place_of(const nn::NamedParameter& parameter) const { return place ? place(parameter) : offload; }
  /// Whether any may wait elsewhere than on the device.
  bool offloads() const { return place || offload != Offload::None; }
};

/// A unit as a plan sees it.
struct ShardUnit {
  std::string name;                     ///< path of its module; for what no unit wraps, the path of the first module that owns some of it
  std::vector<std::string> parameters;  ///< in the order in which they lie in the unit
  int64_t numel = 0;                    ///< of all its parameters
  int64_t gathered_bytes = 0;           ///< while in use, padding included
  int64_t local_bytes = 0;              ///< of this rank's slices, padding included
  Offload place = Offload::None;        ///< where these wait
};

/// Sharded parameters, gradients and optimizer state (ZeRO stage 3, arXiv:1910.02054; FSDP, arXiv:2304.11277) over the ranks of a group, n of them; made by
/// fully_shard. Parameters are cut along dimension 0. Each parameter of the module has its whole shape while a forward or a backward runs, with memory only
/// while its unit is in use; in between the very same tensor is this rank's slice, as slice_of says, so optimizers, clipping, checkpoints and hashes see slices
/// and need to know nothing. The loop is that of one device:
///
///   auto model = on_meta([&] { return make_model(config.model); });
///   auto sharded = fully_shard(*model, group, {.wrap = "layers.*"});
///   materialize(*model, seed);                            // this rank's slices only
///   torch::optim::AdamW optimizer(model->parameters());
///   for (...) {
///     optimizer.zero_grad();
///     loss(model->forward(x), y).backward();              // grad() of each parameter is this rank's slice of the sum over ranks
///     optimizer.step();
///   }
///
/// A step begins with a forward that records gradients and is complete when its backward pass is; another backward pass adds to what is in grad(). Under
/// `auto held = sharded->no_sync()` whole gradients wait on each rank if reduce_each_micro_batch is false, and buffers are not shared; parameters without a
/// gradient are refused when the first pass without it is complete. Several of these live side by side. Evaluation, under NoGradGuard, needs nothing where
/// calls trigger; where operators do, a forward that begins with a parameter alone needs eval(). Weights that are loaded later (torch::load, set_data; whole,
/// or slices) are taken in by the next forward. tessera::clip_grad_norm clips; libtorch's, which would take a norm of slices, is refused. Parameters may be
/// frozen and unfrozen between steps. An engine that says begin_step and finish has gradients cleared by begin_step, sums over `replicate` once a step, and
/// whole parameters from the one to the other.
///
/// A unit is gathered before the calls that use it, freed after the last of them, gathered again when backward reaches it, and its gradients are
/// reduce-scattered and freed as soon as backward has left it, in an order that depends on the order of calls alone, so that collectives match on
/// ranks that use different parameters. Tied parameters belong to the first unit that has them; it is gathered for all of their users. What no unit wraps is
/// dealt into units between the wrapped modules, in the order of registration (embedding | blocks | norm and head).
///
///   traffic per micro-batch   two all-gathers (one without reshard_after_forward) and one reduce-scatter of each unit: (n-1)/n P elements each
///   per step                  with `replicate`, r ranks: an all-reduce of each reduced slice, 2 (r-1)/r P/n elements
///   memory                    (w + g + k) / n bytes per element for parameters, gradients and optimizer state (Offload says where), and, counted as Comm:
///                             the unit in use and those prefetched; in backward, whole gradients of at most two units
///   padding                   at the end of a unit, at most a few rows; where no cut between rows fits equal parts, the parts are padded to the largest and
///                             copied once (unit_layout.h)
///
/// A group of one (with `replicate` of one, without offload, in the parameters' own types) is the identity: nothing is attached and nothing moves. Buffers are
/// not sharded. One rank, one thread. The module must outlive this object, which leaves slices behind, and a forward over them is refused by name; unshard()
/// before makes it whole again.
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
  comm::Group norm_group() const override;
  std::vector<int64_t> held_elements(int rank) const override;
  Slice slice_on(int rank, const at::Tensor& updated) const override;

  /// Gives the whole module back: every parameter in memory of its own, without gradient. Collective, between steps. Afterwards the module can be wrapped
  /// anew, in another layout, and this object refuses to be called.
  void unshard();

  /// What is sharded, in the order of registration. Empty where a group of one is the identity.
  std::vector<ShardUnit> units() const;

  /// Ranks over which the slices are cut: what a norm over slices sums over.
  const comm::Group& group() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Shards `module` over `group`, in place. On meta the parameters get their slices, to be given memory by `init` or materialize; a module with values is made
/// equal over the ranks (options.replicas) and cut. Throws ConfigError for a pattern that matches nothing (naming the nearest path), a unit above
/// unit_bytes_limit (naming the largest), modules that cannot be intercepted with ShardTrigger::Calls, parameters of one unit at several places, an `init`
/// that leaves a parameter untouched or changes its shape.
std::unique_ptr<FullyShardedDataParallel> fully_shard(torch::nn::Module& module, comm::Group group, FullyShardOptions options = {});

/// The same for every holder.
template <class Contained>
std::unique_ptr<FullyShardedDataParallel> fully_shard(const torch::nn::ModuleHolder<Contained>& module, comm::Group group, FullyShardOptions options = {}) {
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
