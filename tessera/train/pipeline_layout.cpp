#include "tessera/train/pipeline_layout.h"

#include <functional>
#include <map>
#include <string>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/roles.h"
#include "tessera/pipeline/chain_split.h"
#include "tessera/pipeline/schedules/generators.h"

namespace tessera {
namespace {

/// A schedule by its name in a configuration.
struct Named {
  int least_chunks, most_chunks;
  std::function<schedules::Schedule(int ranks, int micro_batches, int chunks)> make;
};

constexpr int kAny = 1 << 20;

const std::map<std::string, Named>& synchronous_schedules() {
  static const std::map<std::string, Named> known{
      {"naive", {1, kAny, [](int p, int m, int v) { return schedules::naive(p, m, v); }}},
      {"gpipe", {1, 1, [](int p, int m, int) { return schedules::gpipe(p, m); }}},
      {"1f1b", {1, 1, [](int p, int m, int) { return schedules::one_f_one_b(p, m); }}},
      {"interleaved", {1, kAny, [](int p, int m, int v) { return schedules::interleaved(p, m, v); }}},
      {"breadth_first", {1, kAny, [](int p, int m, int v) { return schedules::breadth_first(p, m, v); }}},
      {"zb_h1", {1, 1, [](int p, int m, int) { return schedules::zb_h1(p, m); }}},
      {"zb_v", {2, 2, [](int p, int m, int) { return schedules::zb_v(p, m); }}},
      {"dualpipev", {2, 2, [](int p, int m, int) { return schedules::dualpipev(p, m); }}},
  };
  return known;
}

const Named& schedule_named(const PipelineConfig& config) {
  const auto& known = synchronous_schedules();
  const auto found = known.find(config.schedule);
  if (found != known.end()) return found->second;
  std::string names;
  for (const auto& [name, schedule] : known) names += (names.empty() ? "" : ", ") + name;
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
  if (ranks == 1) return schedules::naive(1, micro_batches);
  const Named& named = schedule_named(config.pipeline);
  const int chunks = config.pipeline.virtual_stages;
  require(chunks >= named.least_chunks, "pipeline.virtual_stages = ", chunks, ": pipeline.schedule = ", config.pipeline.schedule, " has ", named.least_chunks,
          " chunks of the model on each rank; set pipeline.virtual_stages = ", named.least_chunks);
  require(chunks <= named.most_chunks, "pipeline.virtual_stages = ", chunks, ": pipeline.schedule = ", config.pipeline.schedule, " has ", named.most_chunks,
          named.most_chunks == 1 ? " chunk" : " chunks", " of the model on each rank; set pipeline.virtual_stages = ", named.most_chunks,
          ", or pipeline.schedule = interleaved");
  return named.make(ranks, micro_batches, chunks);
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
  pipeline_layout(config, ranks);
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  make_schedule(config, ranks, static_cast<int>(chunk(micro_batches, size_along(axes, roles.batch), 0).second));
  require(config.comm.compression != "powersgd",
          "comm.compression = powersgd: keeps state for each bucket, which a checkpoint does not tell apart between the stages of mesh.pp = ", ranks,
          "; set comm.compression = none, bf16 or fp16");
}

}  // namespace tessera
