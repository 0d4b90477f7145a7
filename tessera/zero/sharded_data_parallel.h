#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/nn/bucket_plan.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/replicas.h"
#include "tessera/zero/shard_layout.h"

namespace tessera {

/// Who shares the state of one replica, and, for hybrid sharding, who holds the same part of the other replicas. Together they are the data ranks.
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
  bool average = false;                         ///< divide the sum by the number of ranks: for a loss that each rank normalizes by itself
  bool find_unused_parameters = false;          ///< parameters without a gradient contribute zeros; otherwise finish() refuses them by name
  ReplicaStart replicas = ReplicaStart::Check;  ///< at the first begin_step, so that weights may be loaded before
  BufferBroadcast buffers = BufferBroadcast::EachStep;
  std::optional<at::ScalarType> reduce_dtype = {};   ///< hold and reduce gradients in this dtype (fp32, fp64); unset: in each parameter's own
  std::optional<at::ScalarType> network_dtype = {};  ///< let wider gradients cross the network in this one (bf16, fp16: nn/narrow_sum.h)
};

/// ZeRO stages 1 and 2 (arXiv:1910.02054) for any torch::nn::Module, unmodified: every rank holds the whole model and a part of the batch; of optimizer state
/// (stage 1) and gradients (stage 2) it holds one of n equal parts.
///
///   ShardedDataParallel zero(*model, {.shard = world.group()}, {.stage = 2, .average = true});
///   optim::AdamW optimizer(optim::decay_groups(zero.shards(), "all", 0.01));
///   for (...) {
///     zero.begin_step();                          // clears gradients
///     loss(model->forward(x), y).backward();      // with accumulation: between before_micro_batch and after_micro_batch
///     zero.finish();                              // shards()[i].tensor.grad(): this rank's part of the gradient of the whole batch
///     optimizer.step(lr);                         // updates this rank's parts, in place
///     zero.after_update();                        // parts meet: every rank has the whole model again
///   }
///
/// Trainable parameters move into flat buckets (shard_layout.h) and become views of them, row-major, so that updated parts are gathered where they are used;
/// gradients are reduce-scattered bucket by bucket, in one order on every rank, as soon as backward has a bucket's last gradient. With several replicas
/// (hybrid sharding) each rank's part is then all-reduced over `replicate`. A parameter's own grad() is defined only until its bucket is reduced.
///
///   traffic per step   n ranks, P parameters: reduce-scatter (n-1)/n P, all-gather (n-1)/n P elements sent per rank: as DDP's all-reduce. Stage 2 with
///                      Accumulation::Sharded sends (m+1)(n-1)/n P for m micro-batches. Hybrid: 2 (r-1)/r P/n more for r replicas. Gradients count half with
///                      network_dtype
///   memory per rank    w, g, k bytes a parameter of working weight, gradient, optimizer state: stage 1 w + g + k/n, stage 2 w + (g+k)/n. Beyond that, stage 2
///                      holds the buckets that are being filled and one that is being reduced (with network_dtype its copy); padding as in shard_layout.h
///   at construction    nothing; at the first begin_step as DDP: 3 words per rank, and buffers from rank 0
///
/// Frozen parameters are left alone, tied ones held once. A group of one data rank shards nothing: shards() are the parameters. Throws ConfigError for a stage
/// other than 1 and 2, dtypes that do not fit, replicas that differ, a module without trainable parameters, parameters that share memory.
/// The module must outlive this object and keep its parameters. Not thread-safe: one rank, one thread.
class ShardedDataParallel final : public GradientSynchronizer {
 public:
  ShardedDataParallel(torch::nn::Module& module, ShardGroups groups, ZeroOptions options = {});
  ~ShardedDataParallel() override;
  ShardedDataParallel(const ShardedDataParallel&) = delete;
  ShardedDataParallel& operator=(const ShardedDataParallel&) = delete;

  void begin_step() override;
  void before_micro_batch(const MicroBatchPosition& position) override;
  void after_micro_batch(const MicroBatchPosition& position) override;
  void finish() override;
  void after_update() override;
  const SynchronizationStatistics& statistics() const override;
  std::vector<int64_t> held_elements(int rank) const override;

  /// What this rank updates: of each trainable parameter the part it owns, as a view with its slice set, in the order of registration; a part may be empty.
  const std::vector<nn::NamedParameter>& shards() const;

  /// Empty for one data rank.
  const ShardLayout& layout() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
