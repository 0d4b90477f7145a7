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

/// A schedule that ends where a step does.
const schedules::KnownSchedule& schedule_named(const PipelineConfig& config) {
  static const std::set<std::string> synchronous{"naive", "gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v", "dualpipev"};
  if (synchronous.contains(config.schedule)) return *std::ranges::find(schedules::known_schedules(), config.schedule, &schedules::KnownSchedule::name);
  std::string names;
  for (const auto& name : synchronous) names += (names.empty() ? "" : ", ") + name;
  require(config.schedule != "pipedream" && config.schedule != "pipedream_2bw", "pipeline.schedule = ", config.schedule,
          ": updates weights in the middle of a step, which train does not do; set one that ends where the step does: ", names);
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
  return schedules::make_schedule({.name = known.name, .ranks = ranks, .micro_batches = micro_batches, .chunks = chunks});
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

void check_pipeline(const Config& config, const MeshShape& axes) {
  const MeshRoles roles = mesh_roles(config);
  const int ranks = size_along(axes, roles.stages);
  if (ranks == 1) return;
  const PipelineLayout layout = pipeline_layout(config, ranks);
  require(!config.model.tie_embeddings || layout.rank_of.front() != layout.rank_of.back(),
          "model.tie_embeddings = true: pipeline.schedule = ", config.pipeline.schedule,
          " has the first and the last stage on one rank, which cannot keep two copies of one parameter; set pipeline.schedule = 1f1b, interleaved or zb_h1");
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  const auto each = static_cast<int>(chunk(micro_batches, size_along(axes, roles.batch), 0).second);
  try {
    make_schedule(config, ranks, each);
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat("pipeline.schedule = ", error.what(), "; a data rank has ", each, " of the ", micro_batches,
                                     " micro-batches of a step, batch.global_size / batch.micro_size: change these, or the data ranks"));
  }
  require(config.comm.compression != "powersgd",
          "comm.compression = powersgd: keeps state for each bucket, which a checkpoint does not tell apart between the stages of mesh.pp = ", ranks,
          "; set comm.compression = none, bf16 or fp16");
}

}  // namespace tessera
