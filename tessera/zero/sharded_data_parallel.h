#pragma once

#include <memory>
#include <optional>
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
  nn::ParameterFilter only = {};                ///< which of the module's parameters; the rest are another's
  bool average = false;                         ///< divide the sum by the number of ranks: for a loss that each rank normalizes by itself
  bool find_unused_parameters = false;          ///< parameters without a gradient contribute zeros; otherwise a step refuses them by name
  ReplicaStart replicas = ReplicaStart::Check;  ///< when the first step begins, so that weights may be loaded before; Broadcast at once
  BufferBroadcast buffers = BufferBroadcast::EachStep;
  std::optional<at::ScalarType> reduce_dtype = {};   ///< hold and reduce gradients in this dtype (fp32, fp64); unset: in each parameter's own
  std::optional<at::ScalarType> network_dtype = {};  ///< let wider gradients cross the network in this one (bf16, fp16: nn/narrow_sum.h)
  std::shared_ptr<GradientRelay> relay = {};         ///< takes gradients to the host as they come (HostGradients); an engine's begin_step opens each step
};

/// ZeRO stages 1 and 2 (arXiv:1910.02054) for any torch::nn::Module, unmodified: every rank holds the whole model and a part of the batch; of optimizer state
/// (stage 1) and gradients (stage 2) it holds one of n equal parts.
///
///   ShardedDataParallel zero(*model, {.shard = world.group()}, {.stage = 2, .average = true});
///   auto optimizer = zero_optimizer(zero, [](const std::vector<at::Tensor>& parts) { return std::make_unique<torch::optim::AdamW>(parts); });
///   for (...) {
///     optimizer.zero_grad();
///     loss(model->forward(x), y).backward();      // with accumulation: all passes but the last under `const auto local = zero.no_sync();`
///     optimizer.step();                           // updates this rank's parts in place, and brings the parts of all ranks together
///   }
///
/// When backward returns, shards()[i].tensor.grad() is this rank's part of the gradient of the global batch. In place of the parameter's own gradient then
/// stands a guard (nn/gradient_guard.h): an optimizer over model->parameters(), or libtorch's clip_grad_norm_, throws and says what to write. A pass without a
/// zero_grad before it adds to the parts. Engines call begin_step, finish and after_update themselves (nn/gradient_synchronizer.h).
///
/// Floating-point parameters move into flat buckets (shard_layout.h) and become views of them, row-major, so that updated parts are gathered where they are
/// used; gradients are reduce-scattered bucket by bucket, in one order on every rank, as soon as backward has a bucket's last gradient. With several replicas
/// (hybrid sharding) each rank's part is then all-reduced over `replicate`. A parameter's own grad() is defined only until its bucket is reduced.
///
///   traffic per step   n ranks, P parameters: reduce-scatter (n-1)/n P, all-gather (n-1)/n P elements sent per rank: as DDP's all-reduce. Stage 2 with
///                      Accumulation::Sharded sends (m+1)(n-1)/n P for m micro-batches. Hybrid: 2 (r-1)/r P/n more for r replicas. Gradients count half with
///                      network_dtype
///   memory per rank    w, g, k bytes a parameter of working weight, gradient, optimizer state: stage 1 w + g + k/n, stage 2 w + (g+k)/n. Beyond that, stage 2
///                      holds the buckets that are being filled and one that is being reduced (with network_dtype its copy); padding as in shard_layout.h
///                      Passes under no_sync(), and those that add to a result: whole gradients in stage 2 too, and a copy of the parts
///   at construction    buffers from rank 0 (ReplicaStart::Broadcast: the parameters, too); when the first step begins as DDP 3 words per rank, and, by
///                      explicit calls, buffers once more
///   when complete      with BufferBroadcast::EachStep a broadcast of the buffers; in the plain loop an all-gather of ten words
///
/// Parameters that are frozen when this is made lie in buckets of their own, which take no gradients, no reduction and no gather until one of them is unfrozen;
/// parameters may be frozen and unfrozen between steps, on every rank alike. Tied ones are held once. Weights may be loaded at any time, also by what gives a
/// parameter another storage (torch::load, set_data, vector_to_parameters): when a step begins, and before an update, the values move into the bucket and the
/// parameter with them. shards()[i].tensor.grad() lies in memory that the next step uses again: clone what is to be kept. After an exception in a backward
/// pass, with several wrappers, on a rank whose pass uses nothing of the module, for a pass inside of another, and for parameters that are in two: as
/// DistributedDataParallel. A group of one data rank shards nothing: shards() are the parameters. Throws
/// ConfigError for a stage other than 1 and 2, dtypes that do not fit, replicas that differ, a module without trainable parameters, parameters that share
/// memory. The module must outlive this object and keep its parameters. Not thread-safe: one rank, one thread.
class ShardedDataParallel final : public GradientSynchronizer {
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
  void clear_gradients() override;
  std::vector<int64_t> held_elements(int rank) const override;
  Slice slice_on(int rank, const at::Tensor& updated) const override;

  /// What this rank updates: of each floating-point parameter the part it owns, as a view with its slice set, in the order of registration; a part may be
  /// empty. It requires a gradient where its parameter does, and has none while that is frozen.
  const std::vector<nn::NamedParameter>& shards() const;

  /// Empty for one data rank.
  const ShardLayout& layout() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
