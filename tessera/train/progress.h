#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/comm/world.h"
#include "tessera/config/config.h"
#include "tessera/data/loader.h"
#include "tessera/nn/bucket_layout.h"

namespace tessera {

/// What a checkpoint keeps beside tensors so that a run goes on as if it had never stopped: the whole configuration (for eval and generate), the place in the
/// data, and what orders the sums: the bucket layout and the choice of collective algorithms (comm::recorded_choice), with the number of data ranks that they
/// belong to. `plans`: as JSON the plan, or a list of them, stage by stage and in each by rank of the axis that cuts layers, where these differ.
nlohmann::json progress_json(const Config& config, const data::Cursor& cursor, const nlohmann::json& plans, const nlohmann::json& algorithms, int data_ranks);

/// Patterns of what was trained beside adapters (lora.trained) in this run and in those that it goes on from, of one without adapters all
/// (checkpoint::kWholeModel): in a checkpoint, progress.lora_trained.
std::vector<std::string> trained_beside_adapters(const Config& config, const nlohmann::json& progress, const std::string& source);

/// Each reads its part back. Throw ConfigError naming `source` where it is missing or damaged; a program of somebody's own saves no configuration.
data::Cursor cursor_of(const nlohmann::json& progress, const std::string& source);
Config config_of(const nlohmann::json& progress, const std::string& source);
int data_ranks_of(const nlohmann::json& progress, const std::string& source);
/// Nothing where there is none: what a program of somebody's own saved may call anything "config".
std::optional<Config> config_if_any(const nlohmann::json& progress);

/// What a bucket layout was made of, beside the gradients themselves.
struct PlanLayout {
  int data_ranks = 1;
  int stages = 1, stage = 0;              ///< of the model: each has a plan of its own
  int tensor_ranks = 1, tensor_rank = 0;  ///< of the axis that cuts layers
  BucketSizes sizes{};
};

/// The saved plan, where it was made in this layout for these gradients; anything else makes its own. `other` is set where there was a plan, but another's.
std::optional<BucketLayout> bucket_plan_of(const nlohmann::json& progress, const PlanLayout& layout, std::span<const GradientSpec> gradients,
                                           const std::string& source, bool& other);

/// How to make the world of a run. One that resumes with comm.algorithm = auto on as many data ranks goes on with the saved choice, over comm.table; another
/// comm.algorithm wins, and a remark says that sums change their order. `progress`: null for a run that starts afresh.
comm::WorldOptions world_options_of(const Config& config, int data_ranks, const nlohmann::json& progress, const std::string& source,
                                    std::vector<std::string>& remarks);

}  // namespace tessera
