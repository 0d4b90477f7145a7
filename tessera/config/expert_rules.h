#pragma once

namespace tessera {

struct Config;
struct ModelConfig;

/// Whether the experts of a layer take as many tokens each, whatever routers learn: they choose, or every token goes to all.
bool experts_have_alike(const ModelConfig& model);

/// What mesh.ep and mesh.expert_tp ask of a model whose experts are dealt over `ranks`: those of dp_shard x cp x tp, or, with zero.stage = 0, of tp, or of
/// dp_replicate (`over_replicas`, run.deterministic); of a model that is only read (`reads`), over tp alone. Throws ConfigError.
void validate_experts_over_ranks(const Config& config, int ranks, bool over_replicas = false, bool reads = false);

/// Experts that choose their tokens choose among all of a forward pass, which no rank has where mesh.cp (`columns`) or tensor.sequence_parallel cuts the
/// sequence: they would choose among a part, without a word, and the loss be another. Also of a model that is only read (`reads`), whose router is what it was
/// trained with. Throws ConfigError.
void validate_expert_choice(const Config& config, bool columns, bool reads = false);

}  // namespace tessera
