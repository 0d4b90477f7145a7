#pragma once

#include <memory>
#include <optional>

#include "tessera/comm/group.h"
#include "tessera/config/config.h"
#include "tessera/expert_parallel/expert_parallel.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/model.h"
#include "tessera/nn/sharing.h"

namespace tessera {

/// The ranks that experts are dealt over (mesh.ep, mesh.expert_tp), beside those that the other layers are cut over.
struct ExpertRanks {
  comm::Group exchange;                ///< together they hold all experts of a layer once
  int sharers = 1;                     ///< neighbours of it that hold rows of the same experts
  comm::Group same_tokens;             ///< ranks that route the same tokens: those of tp, unless each has a part of the sequence
  bool apart = false;                  ///< each rank's rows are computed by themselves (run.deterministic over data ranks)
  std::optional<nn::Sharing> sharing;  ///< what the ranks of tp hold of the experts' weights; nothing where that is one rank
};

/// Collective. Without experts, or where nothing cuts them, all is of one rank.
ExpertRanks expert_ranks(const Config& config, const Mesh& mesh);

/// Deals the experts of a model on meta, and says what the ranks of tp hold of them before anybody else cuts its layers; null where each rank computes its own
/// tokens with all experts.
std::unique_ptr<ExpertParallel> deal_experts(LanguageModel& model, const ExpertRanks& ranks);

}  // namespace tessera
