#pragma once

#include <optional>

#include <nlohmann/json.hpp>

#include "tessera/core/config.h"
#include "tessera/data/loader.h"
#include "tessera/data_parallel/bucket_plan.h"

namespace tessera {

/// What a checkpoint keeps beside tensors so that a run goes on as if it had never stopped: the whole configuration (for eval and generate), the place in the
/// data, and the bucket plan with the number of data ranks that it belongs to.
nlohmann::json progress_json(const Config& config, const data::Cursor& cursor, const BucketPlan& plan, int data_ranks);

/// Each reads its part back. Throw ConfigError naming `source` where it is missing or damaged.
data::Cursor cursor_of(const nlohmann::json& progress, const std::string& source);
Config config_of(const nlohmann::json& progress, const std::string& source);

/// The saved plan, where it was made for `data_ranks` ranks; another layout makes its own.
std::optional<BucketPlan> bucket_plan_of(const nlohmann::json& progress, int data_ranks, const std::string& source);

}  // namespace tessera
