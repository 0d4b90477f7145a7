#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/comm/group.h"
#include "tessera/data_parallel/tree_schedule.h"
#include "tessera/nn/gradient_synchronizer.h"
#include "tessera/nn/replicas.h"

namespace tessera {

struct TreeReductionOptions {
  int64_t num_micro_batches = 1;  ///< of the global batch, padding not counted: global_size / micro_size
  bool find_unused_parameters = false;
  ReplicaStart replicas = ReplicaStart::Check;
  BufferBroadcast buffers = BufferBroadcast::EachStep;
  std::optional<at::ScalarType> gradient_dtype = {};  ///< in which real gradients are handed over; default: the parameter's
  nn::ParameterFilter only = {};                      ///< which of the module's parameters
  /// Each backward pass brings the gradients of so many micro-batches, of neighbours among the ranks that these are dealt over, each said to be of its place
  /// among them (nn::GradientSource): of experts, to which several ranks send rows. Rank r of the group has those of the ranks r * sources .. in one order with
  /// the others'. Takes so many times the memory; by explicit calls alone.
  int sources = 1;
};

/// Sums micro-batch gradients in one fixed binary tree over their index in the global batch (`run.deterministic`): the same bits for any number of ranks and
/// any degree of accumulation. Each micro-batch has a gradient of its own; a rank adds up the subtrees that lie inside its run, the rest is exchanged.
///
///   arithmetic   fp32 whatever the parameter's dtype; the result is handed over in that dtype, or in gradient_dtype
///   memory       flat gradients of 4 P bytes: one for the micro-batch at hand and up to log2 M + 1 partial sums in a run that starts at a power of two,
///                2 log2 M in the worst; freed as they are added up
///   traffic      each partial sum that is no whole tree once, P elements (at most 2 log2 M per rank), then a broadcast of P; nothing overlaps backward.
///                Replicas are compared, and words and buffers go round, as DistributedDataParallel's do
///
/// In the plain loop each backward pass is one micro-batch of this rank's run, in ascending order, all but the last under no_sync(). Between them what
/// grad() returns refuses to be read, clipped or stepped with; zero_grad there begins the run anew. Ranks without a micro-batch, and padding, need the explicit
/// calls.
///
/// Padding micro-batches are left out. In a group of one the tree is the same and nothing is sent. Micro-batches of a rank must come in ascending order.
class [[nodiscard]] TreeReduction final : public GradientSynchronizer {
 public:
  TreeReduction(torch::nn::Module& module, comm::Group group, TreeReductionOptions options);
  ~TreeReduction() override;
  TreeReduction(const TreeReduction&) = delete;
  TreeReduction& operator=(const TreeReduction&) = delete;

  void begin_step() override;
  void before(ActionKind action, const MicroBatchPosition& position) override;
  void after(ActionKind action, const MicroBatchPosition& position) override;
  void finish() override;
  void after_update() override;
  std::vector<nn::NamedParameter> updated() const override;
  const SynchronizationStatistics& statistics() const override;

  const TreeSchedule& schedule() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace tessera
