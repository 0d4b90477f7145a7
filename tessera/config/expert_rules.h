#pragma once

namespace tessera {

struct Config;

/// What mesh.ep and mesh.expert_tp ask of a model whose experts are dealt over `ranks`: those of dp_shard x cp x tp, or, with zero.stage = 0, of tp, or of
/// dp_replicate (`over_replicas`, run.deterministic). Throws ConfigError.
void validate_experts_over_ranks(const Config& config, int ranks, bool over_replicas = false);

}  // namespace tessera
