#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/data_parallel/communication_hook.h"
#include "tessera/nn/bucket_layout.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/gradient_relay.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/replicas.h"

namespace tessera {

struct DdpOptions {
  BucketSizes sizes = {};
  nn::ParameterFilter only = {};                ///< which of the module's parameters; the rest are another's
  bool average = false;                         ///< divide the sum by the number of ranks: for a loss that each rank normalises by itself
  bool find_unused_parameters = false;          ///< parameters without a gradient contribute zeros; otherwise a step refuses them by name
  ReplicaStart replicas = ReplicaStart::Check;  ///< what makes the replicas equal at the start; but for Trust, compared again in the plain loop's first step
  BufferBroadcast buffers = BufferBroadcast::EachStep;
  std::optional<at::ScalarType> reduce_dtype = {};  ///< hold and reduce gradients in this dtype (fp32, fp64); unset, and complex ones: in their own
  std::optional<BucketLayout> plan = {};            ///< of a checkpoint: used as it is, and never rebuilt
  std::shared_ptr<CommunicationHook> hook = {};     ///< how a bucket is summed; unset: as it is. A group of one has nothing to sum and leaves it alone
  std::shared_ptr<const nn::StepPhase> phase = {};  ///< of an engine that announces steps and last micro-batches to all techniques; unset: kept here
  std::shared_ptr<GradientRelay> relay = {};        ///< takes gradients to the host as they come (HostGradients); an engine's begin_step opens each step
};

/// Data parallelism by replication (PyTorch DDP, arXiv:2006.15704) for any torch::nn::Module, unmodified: every rank holds the whole model and a part of the
/// batch, and gradients are summed over `group`.
///
///   DistributedDataParallel ddp(*model, world.group(), {.average = true});
///   for (...) {
///     optimizer.zero_grad();
///     loss(model->forward(x), y).backward();              // with accumulation: all passes but the last under `const auto local = ddp.no_sync();`
///     optimizer.step();
///   }
///
/// When backward returns, grad() of each parameter is that of the global batch, on every rank the same bits. A pass without a zero_grad before it adds to that,
/// as on one process (GANs call backward twice for a discriminator): the sum over passes of the reduced gradients, at one all-reduce each.
///
/// The first gradient of a step is copied into its bucket (a pass less over memory than to clear the bucket and add), unless who computes it takes that place
/// on offer (nn/gradient_dispatcher.h; the embedding and the head do). `grad()` of the parameter lies in the bucket from then on, so that further passes
/// accumulate in place. The hook of the last gradient of a bucket starts its all-reduce, while backward goes on; buckets start in the order of the plan on
/// every rank, so that collectives match. After the first step the plan is made anew from the order that rank 0 saw. Accumulation passes but the last
/// communicate nothing.
///
///   traffic per step   one all-reduce of each bucket: 2 (n-1)/n P elements sent per rank for P parameters; no more under accumulation; a hook
///                      (communication_hook.h) may compress it. With BufferBroadcast::EachStep a broadcast of the buffers
///   at construction    one all-gather of 3 words per rank (ReplicaStart::Check), buffers broadcast from rank 0
///   after step 1       one broadcast of a word per parameter; in the plain loop, unless ReplicaStart::Trust, an all-gather of 3 words
///   in every step      with find_unused_parameters an all-reduce of a word per parameter; without it, in the plain loop, an all-gather of ten words. Where
///                      neither is and buffers are broadcast, an all-gather of 3 words
///   memory             gradients once, in the buckets, twice while a pass adds to what is there; a group of one has no buckets and no hooks, and communicates
///                      nothing
///
/// Frozen parameters (requires_grad false when a step begins) are skipped, tied ones reduced once; parameters may be frozen and unfrozen between steps, on
/// every rank alike, and the plan follows. A parameter that gets a second gradient after its bucket has left is refused by name. A backward pass that ends by
/// an exception takes its step with it: what it and passes under no_sync() before it have accumulated is dropped, what was there before is there again.
/// An optimizer's step after nothing but passes under no_sync() would part the replicas: where parameters were written between passes, on any rank, all compare
/// theirs (as at the start) when the step is complete, and a difference is refused by name (with ReplicaStart::Trust the program vouches for them, too).
/// Several live side by side in any order, also over modules that are used in each other's losses, a parameter of two being the newer one's; ranks have to use
/// them in the same order. Where several share an engine, buckets of the plain loop start when backward is done, since gradients may become final in another
/// order on each rank.
///
/// In the plain loop a rank takes part in a step's collectives by a gradient that arrives: one whose pass uses nothing at all of the module, while others'
/// passes do, leaves them waiting until comm.timeout, with find_unused_parameters, too. Add `0 * sum` of one of its outputs to that rank's loss. A backward
/// pass inside of another that brings the first gradient (a checkpoint that calls backward itself) is refused. Throws
/// ConfigError for replicas that differ, a plan of another model, a module without trainable parameters. The module must outlive this object and keep its
/// parameters, in the shape and dtype that they have; the hooks go with it, gradients stay.
class DistributedDataParallel final : public GradientSynchronizer {
 public:
  DistributedDataParallel(torch::nn::Module& module, comm::Group group, DdpOptions options = {});
  ~DistributedDataParallel() override;
  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  void begin_step() override;
  void before(ActionKind action, const MicroBatchPosition& position) override;
  void after(ActionKind action, const MicroBatchPosition& position) override;
  void finish() override;
  void after_update() override;
  const SynchronizationStatistics& statistics() const override;
  std::vector<nn::NamedParameter> updated() const override;

  /// The plan that the next step uses: what a checkpoint keeps. Empty in a group of one.
  const BucketLayout& plan() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
