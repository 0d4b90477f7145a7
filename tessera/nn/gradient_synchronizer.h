#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// Where a micro-batch stands in its step.
struct MicroBatchPosition {
  int64_t index = 0;     ///< in the global batch, counted over all ranks; a padding micro-batch's index means nothing
  bool last = false;     ///< of this rank in this step: gradients are final after its backward
  bool padding = false;  ///< of weight 0: it keeps a rank with fewer micro-batches in step with the others
};

/// What the last finished step cost this rank.
struct SynchronizationStatistics {
  double exposed_s = 0;         ///< seconds that finish() waited for communication: what backward did not hide
  int64_t bytes = 0;            ///< gradient bytes handed to collectives or sent
  int64_t num_collectives = 0;  ///< collectives and messages that carried them
  int64_t num_early = 0;        ///< of those, begun while backward still ran
};

/// Turns the gradients of each rank's micro-batches into the gradient of the global batch, the same bits on every rank. The loop calls, in each step:
///   begin_step, then per micro-batch before_micro_batch, forward, backward, after_micro_batch, then finish;
/// then `grad()` of each parameter (of what a rank holds of it, where it is sharded) holds the result until the next begin_step, which clears it; after the
/// optimizer's step, after_update. Not thread-safe: one rank, one thread.
class GradientSynchronizer {
 public:
  virtual ~GradientSynchronizer() = default;

  virtual void begin_step() = 0;
  virtual void before_micro_batch(const MicroBatchPosition& position) = 0;
  virtual void after_micro_batch(const MicroBatchPosition& position) = 0;

  /// Waits for what is under way. Throws ConfigError naming parameters that got no gradient, CommError where a peer failed.
  virtual void finish() = 0;

  /// The optimizer has updated what this rank holds of the parameters: whoever shards the update brings the parts together here.
  virtual void after_update() {}

  virtual const SynchronizationStatistics& statistics() const = 0;

  /// How many elements of each parameter that is updated `rank` of the sharding group holds, for every rank the same list; empty where all hold the same.
  virtual std::vector<int64_t> held_elements(int /*rank*/) const { return {}; }
};

}  // namespace tessera
