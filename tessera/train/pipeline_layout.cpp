#include "tessera/train/pipeline_layout.h"

#include <algorithm>
#include <set>
#include <string>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/roles.h"
#include "tessera/pipeline/chain_split.h"
#include "tessera/pipeline/schedules/registry.h"

namespace tessera {
namespace {

/// A schedule that train carries out.
const schedules::KnownSchedule& schedule_named(const PipelineConfig& config) {
  static const std::set<std::string> executed{"naive",       "gpipe",         "1f1b",  "pipedream", "pipedream_2bw",
                                              "interleaved", "breadth_first", "zb_h1", "zb_v",      "dualpipev"};
  if (executed.contains(config.schedule)) return *std::ranges::find(schedules::known_schedules(), config.schedule, &schedules::KnownSchedule::name);
  std::string names;
  for (const auto& name : executed) names += (names.empty() ? "" : ", ") + name;
  throw ConfigError(detail::concat("pipeline.schedule = ", config.schedule, ": train carries out ", names, "; set pipeline.schedule to one of them"));
}

std::vector<std::string> link_names(const ModelConfig& model) {
  std::vector<std::string> names{"embed_tokens"};
  for (int64_t block = 0; block < model.layers; ++block) names.push_back(detail::concat("layers.", block));
  names.push_back("head");
  return names;
}

}  // namespace

std::vector<int> PipelineLayout::stages_of(int rank) const {
  std::vector<int> held;
  for (int stage = 0; stage < stages(); ++stage) {
    if (rank_of[static_cast<size_t>(stage)] == rank) held.push_back(stage);
  }
  return held;
}

schedules::Schedule make_schedule(const Config& config, int ranks, int micro_batches) {
  if (ranks == 1) return schedules::make_schedule({.name = "naive", .ranks = 1, .micro_batches = micro_batches});
  const schedules::KnownSchedule& known = schedule_named(config.pipeline);
  const int chunks = config.pipeline.virtual_stages;
  const bool any = known.chunks == 0;
  require(any || chunks >= known.chunks, "pipeline.virtual_stages = ", chunks, ": pipeline.schedule = ", known.name, " has ", known.chunks,
          " chunks of the model on each rank; set pipeline.virtual_stages = ", known.chunks);
  require(any || chunks <= known.chunks, "pipeline.virtual_stages = ", chunks, ": pipeline.schedule = ", known.name, " has ", known.chunks,
          known.chunks == 1 ? " chunk" : " chunks", " of the model on each rank; set pipeline.virtual_stages = ", known.chunks,
          ", or pipeline.schedule = interleaved");
  schedules::Request request{.name = known.name, .ranks = ranks, .micro_batches = micro_batches, .chunks = chunks};
  if (known.name == "pipedream") request.vertical_sync = config.pipeline.vertical_sync;
  if (known.name == "pipedream_2bw") {
    const int fewest = std::min(ranks, micro_batches);
    require(config.pipeline.per_update == 0 || config.pipeline.per_update >= fewest, "pipeline.per_update = ", config.pipeline.per_update,
            ": two versions of the weights are enough where an update sums a micro-batch for each of ", ranks, " stages; set pipeline.per_update = ", fewest,
            " or more, or 0");
    request.per_update = config.pipeline.per_update;
  }
  return schedules::make_schedule(request);
}

PipelineLayout pipeline_layout(const Config& config, int ranks) {
  PipelineLayout layout;
  if (ranks == 1) return {.links = {{0, config.model.layers + 2}}, .rank_of = {0}};
  const schedules::Schedule schedule = make_schedule(config, ranks, 2 * ranks);  // a number that every one takes: who holds what does not depend on it
  for (const auto& [begin, end] : pipeline::split_chain(link_names(config.model), schedule.stages(), config.pipeline.split))
    layout.links.push_back({begin, end});
  layout.rank_of = schedule.rank_of;
  return layout;
}

void check_stages(const Config& config, int ranks) {
  if (ranks == 1) return;
  const PipelineLayout layout = pipeline_layout(config, ranks);
  require(!config.model.tie_embeddings || layout.rank_of.front() != layout.rank_of.back(),
          "model.tie_embeddings = true: pipeline.schedule = ", config.pipeline.schedule,
          " has the first and the last stage on one rank, which cannot keep two copies of one parameter; set pipeline.schedule = 1f1b, interleaved or zb_h1");
}

void check_pipeline(const Config& config, const MeshShape& axes) {
  const MeshRoles roles = mesh_roles(config);
  const int ranks = size_along(axes, roles.stages);
  if (ranks == 1) return;
  check_stages(config, ranks);
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  make_schedule(config, ranks, static_cast<int>(chunk(micro_batches, size_along(axes, roles.batch), 0).second));
}

}  // namespace tessera
