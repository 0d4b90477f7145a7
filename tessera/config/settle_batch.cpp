#include "tessera/config/settle_batch.h"

#include "tessera/core/error.h"

namespace tessera {

void settle_batch(Config& config, int world_size) {
  BatchConfig& batch = config.batch;
  if (batch.per_rank == 0) return;
  require(batch.per_rank > 0, "batch.per_rank = ", batch.per_rank,
          ": expected at least 1 sequence for each data rank, or 0 for none given; set batch.per_rank");
  int64_t data_ranks = 1;
  for (const auto& [axis, size] : resolve_mesh(config.mesh, config.zero.stage, world_size)) {
    if (axis == "dp_replicate" || axis == "dp_shard") data_ranks *= size;
  }
  constexpr int64_t most = 1'000'000'000;
  require(batch.per_rank <= most / data_ranks, "batch.per_rank = ", batch.per_rank, ": over ", data_ranks, " data ranks that is a step of more than ", most,
          " sequences, which are the most; lower batch.per_rank");
  const int64_t global = batch.per_rank * data_ranks;
  require(batch.global_size == 0 || batch.global_size == global, "batch.per_rank = ", batch.per_rank, ": over ", data_ranks, " data rank",
          data_ranks == 1 ? "" : "s", " that is a step of ", global, " sequences, and batch.global_size = ", batch.global_size,
          " says another; leave one of the two out");
  require(batch.micro_size < 1 || global % batch.micro_size == 0, "batch.per_rank = ", batch.per_rank, ": the step's ", global,
          " sequences are no whole number of forward passes of batch.micro_size = ", batch.micro_size, "; set batch.per_rank to a multiple of it");
  batch.global_size = global;
  batch.per_rank = 0;
}

}  // namespace tessera
