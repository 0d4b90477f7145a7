#pragma once

#include "tessera/config/config.h"

namespace tessera {

/// Makes of batch.per_rank what it stands for: batch.global_size = per_rank x data ranks, known once a configuration meets its `world_size` ranks. From there
/// on the run has a global_size alone. Checkpoints save that; config.toml in log.dir keeps what was asked for, which other ranks settle otherwise. Idempotent;
/// nothing without per_rank. Whoever takes a configuration from a user calls it before validate(), which refuses a per_rank that nobody settled. Expects a
/// resolved configuration. Throws ConfigError where both are given and disagree, or the axes of the mesh do not go up in the ranks.
void settle_batch(Config& config, int world_size);

}  // namespace tessera
