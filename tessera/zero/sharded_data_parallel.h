#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/nn/bucket_layout.h"
#include "tessera/nn/gradient_relay.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/replicas.h"
#include "tessera/zero/shard_layout.h"

namespace tessera {

/// The data ranks: `shard` shares the state of one replica; `replicate`, for hybrid sharding, holds the same part in every replica.
struct ShardGroups {
  comm::Group shard;
  comm::Group replicate = comm::Group::self();
};

/// What stage 2 holds while micro-batches accumulate.
enum class Accumulation {
  Sharded,  ///< each micro-batch is reduced when its backward has it: only parts are kept, at (m+1)(n-1)/n P elements sent for m micro-batches
  Whole,    ///< whole gradients are kept until the last micro-batch reduces them once: 2(n-1)/n P elements sent, the memory of stage 1 until then
};

struct ZeroOptions {
  int stage = 1;           ///< 1: optimizer state is sharded; 2: and gradients
  BucketSizes sizes = {};  ///< of what is reduced together
  Accumulation accumulation = Accumulation::Sharded;
  nn::ParameterFilter only = {};                ///< picks parameters of the module; another wrapper has the rest
  bool average = false;                         ///< divide the sum by the number of ranks: for a loss that each rank normalizes by itself
  bool find_unused_parameters = false;          ///< parameters without a gradient contribute zeros; otherwise a step refuses them by name
  ReplicaStart replicas = ReplicaStart::Check;  ///< when the first step begins, so that weights may be loaded before; Broadcast at once
  BufferBroadcast buffers = BufferBroadcast::EachStep;
  std::optional<at::ScalarType> reduce_dtype = {};   ///< hold and reduce gradients in this dtype (fp32, fp64); unset: in each parameter's own
  std::optional<at::ScalarType> network_dtype = {};  ///< let wider gradients cross the network in this one (bf16, fp16: nn/narrow_sum.h)
  std::shared_ptr<GradientRelay> relay = {};         ///< takes gradients to the host as they come (HostGradients); an engine's begin_step opens each step
};

/// ZeRO stages 1 and 2 (arXiv:1910.02054) for any torch::nn::Module, unmodified: every rank holds the whole model and reads a part of the batch. Of optimizer
/// state (stage 1) and gradients (stage 2) it holds one of n equal parts.
///
///   ShardedDataParallel zero(*model, {.shard = world.group()}, {.stage = 2, .average = true});
///   auto optimizer = zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::AdamW>(parts); });
///
/// Requires: the same parameters, frozen and unfrozen alike, and the same order of wrappers on every rank. An optimizer that updates shards() element by
///   element, and after_update behind its step: zero_optimizer sees to both. The module outlives this object, which lives as long as the module is trained:
///   when it is gone each rank trains alone. One rank, one thread.
/// Guarantees: after backward shards()[i].tensor.grad() is this rank's part of the gradient of the global batch, in memory that the next step uses again; the
///   parameter's own grad() is a guard that throws. After the optimizer's step all ranks have the same parameters, which are views of flat buckets.
/// Collective when: this is made, a backward pass outside of no_sync() runs, a step is complete, after_update.
/// Throws ConfigError: another stage, dtypes that do not fit, replicas that differ, no trainable parameter, parameters that share memory.
/// Memory: stage 1 w + g + k/n, stage 2 w + (g+k)/n bytes a parameter. Traffic: 2 (n-1)/n P elements a rank and step; stage 2 with Accumulation::Sharded
///   (m+1)(n-1)/n P. A group of one shards nothing. Details: docs/sharding.md. Rare cases: docs/sharding-contract.md.
class [[nodiscard]] ShardedDataParallel final : public GradientSynchronizer {
 public:
  ShardedDataParallel(torch::nn::Module& module, ShardGroups groups, ZeroOptions options = {});
  ~ShardedDataParallel() override;
  ShardedDataParallel(const ShardedDataParallel&) = delete;
  ShardedDataParallel& operator=(const ShardedDataParallel&) = delete;

  void begin_step() override;
  void before(ActionKind action, const MicroBatchPosition& position) override;
  void after(ActionKind action, const MicroBatchPosition& position) override;
  void finish() override;
  void after_update() override;
  const SynchronizationStatistics& statistics() const override;
  std::vector<nn::NamedParameter> updated() const override;
  comm::Group norm_group() const override;
  void refuse_gradients_that_wait(const std::string& who) const override;
  void clear_gradients() override;
  std::vector<int64_t> held_elements(int rank) const override;
  Slice slice_on(int rank, const at::Tensor& updated) const override;

  /// The part of each floating-point parameter that this rank owns and updates, as a view with its slice set, in the order of registration. A part may be
  /// empty. It requires a gradient exactly while its parameter does.
  const std::vector<nn::NamedParameter>& shards() const;

  /// Empty for one data rank.
  const ShardLayout& layout() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
