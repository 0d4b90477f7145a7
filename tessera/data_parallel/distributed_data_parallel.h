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
  nn::ParameterFilter only = {};                ///< picks parameters of the module; another wrapper has the rest
  bool average = false;                         ///< divide the sum by the number of ranks: for a loss that each rank normalises by itself
  bool find_unused_parameters = false;          ///< parameters without a gradient contribute zeros; otherwise a step refuses them by name
  ReplicaStart replicas = ReplicaStart::Check;  ///< what makes the replicas equal at the start; but for Trust, compared again in the plain loop's first step
  BufferBroadcast buffers = BufferBroadcast::EachStep;
  std::optional<at::ScalarType> reduce_dtype = {};  ///< hold and reduce gradients in this dtype (fp32, fp64); unset, and complex ones: in their own
  std::optional<BucketLayout> plan = {};            ///< of a checkpoint: used as it is, and never rebuilt
  std::shared_ptr<CommunicationHook> hook = {};     ///< how a bucket is summed; unset: an all-reduce. Not called in a group of one
  std::shared_ptr<const nn::StepPhase> phase = {};  ///< of an engine that announces steps and last micro-batches to all techniques; unset: kept here
  std::shared_ptr<GradientRelay> relay = {};        ///< takes gradients to the host as they come (HostGradients); an engine's begin_step opens each step
};

/// Data parallelism by replication (PyTorch DDP, arXiv:2006.15704) for any torch::nn::Module, unmodified: every rank holds the whole model and reads a part of
/// the batch. Backward all-reduces gradients over `group`, bucket by bucket while it runs; when it returns, grad() is that of the global batch.
///
///   DistributedDataParallel ddp(*model, world.group(), {.average = true});  // then zero_grad, forward, backward, step, as on one device
///
/// Requires: the same parameters (options.replicas), frozen and unfrozen alike, and the same order of wrappers on every rank. The module outlives this object
///   and keeps its parameters, in their shapes and dtypes. This object lives as long as the module is trained: when it is gone each rank trains alone. One
///   rank, one thread.
/// Guarantees: grad() has the same bits on every rank. A pass without a zero_grad adds. After an exception in backward grad() is what it was before the step.
/// Collective when: this is made, a backward pass outside of no_sync() runs, a step is complete. A rank whose loss uses nothing of the module must add
///   `0 * output.sum()`, or its peers wait.
/// Throws ConfigError, by name: replicas that differ, options.plan of another model, no trainable parameter, parameters without a gradient.
/// Memory: gradients once, in buckets, of which grad() is a view; twice while a pass adds. A group of one has no buckets and communicates nothing.
/// Traffic: 2 (n-1)/n P elements a rank and step. Details, small messages: docs/sharding.md. Rare cases: docs/sharding-contract.md.
class [[nodiscard]] DistributedDataParallel final : public GradientSynchronizer {
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
  void refuse_gradients_that_wait(const std::string& who) const override;

  /// The bucket layout of the next step, for a checkpoint to keep. Empty in a group of one.
  const BucketLayout& plan() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
