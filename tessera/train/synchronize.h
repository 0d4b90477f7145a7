#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "tessera/config/config.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/gradient_relay.h"
#include "tessera/nn/parameter.h"
#include "tessera/precision/policy.h"
#include "tessera/train/compose.h"

/// What compose() does about gradients: who sums those of which parameters, over which ranks, and who updates what.
namespace tessera {

/// What is synchronized by itself: each stage of the model that this rank holds, or the whole.
std::vector<torch::nn::Module*> roots_of(const Composition& run);

/// Without those that follow others.
std::vector<nn::NamedParameter> trained(const std::vector<nn::NamedParameter>& parameters);

/// How stage 3 shards `model`, or would.
FullyShardOptions stage_3_options(const Config& config, const precision::Policy& policy, LanguageModel& model);

/// Stage 3, of a model on meta, so that no rank ever holds the whole of it: outside of a step each parameter is this rank's slice.
void shard_parameters(const Config& config, const precision::Policy& policy, const Mesh& mesh, at::Device device, Composition& run);

/// Stages 1 and 2: parameters stay whole, and what the optimizer updates is one part of them on each rank of dp_shard x cp.
/// `relay` takes gradients away as they come, where it is one; so below.
void shard_updates(const Config& config, const precision::Policy& policy, const Mesh& mesh, const std::shared_ptr<GradientRelay>& relay, Composition& run);

/// Stage 0: whole gradients meet on every rank.
void synchronize_replicas(const Config& config, const Mesh& mesh, const std::optional<ResumePoint>& resume, const std::shared_ptr<GradientRelay>& relay,
                          Composition& run);

/// What was read may be another file on another host. Stage 0 compares its replicas itself, where it has them by then.
void check_loaded(const Config& config, const Mesh& mesh, const Composition& run);

}  // namespace tessera
