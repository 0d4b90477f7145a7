#include "tessera/plan/pipeline_plan.h"

#include <algorithm>
#include <filesystem>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "tessera/core/columns.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/pipeline/schedules/simulate.h"
#include "tessera/train/pipeline_layout.h"
#include "tessera/train/stage_costs.h"

namespace tessera::plan {
namespace {

/// Of a model with `blocks` blocks.
std::string links_text(const ChainRange& links, int64_t blocks) {
  std::vector<std::string> names;
  if (links.begin == 0) names.emplace_back("embed_tokens");
  const int64_t first = std::max<int64_t>(links.begin, 1) - 1, last = std::min(links.end - 1, blocks) - 1;
  if (first == last) names.push_back(fmt::format("layers.{}", first));
  if (first < last) names.push_back(fmt::format("layers.{}-{}", first, last));
  if (links.end == blocks + 2) names.emplace_back("head");
  return fmt::format("{}", fmt::join(names, ", "));
}

std::string name_of(const PipelineConfig& pipeline) {
  return is_schedule_file(pipeline) ? std::filesystem::path(pipeline.schedule).filename().string() : pipeline.schedule;
}

}  // namespace

std::vector<int> PipelinePlan::stages_of(int rank) const {
  std::vector<int> held;
  for (size_t stage = 0; stage < stages.size(); ++stage) {
    if (stages[stage].rank == rank) held.push_back(static_cast<int>(stage));
  }
  return held;
}

double PipelinePlan::model_share_of(int rank) const {
  double share = 0;
  for (const Stage& stage : stages) share += stage.rank == rank ? stage.model_share : 0;
  return share;
}

PipelinePlan plan_pipeline(const Config& config, int world) {
  const MeshShape axes = mesh_shape(config.mesh, config.zero.stage, world);
  const MeshRoles roles = mesh_roles(config);
  const int ranks = size_along(axes, roles.stages);
  PipelinePlan plan;
  if (ranks == 1) {
    plan.stages.push_back({.flops_share = 1, .model_share = 1});
    return plan;
  }
  const PipelineLayout layout = pipeline_layout(config, ranks);
  const std::vector<StageFlops> flops = stage_flops(config, layout);
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  plan.micro_batches = static_cast<int>(chunk(micro_batches, size_along(axes, roles.batch), 0).second);
  plan.schedule = name_of(config.pipeline);
  plan.actions = schedule_maker(config, ranks)(plan.micro_batches);
  const schedules::Measures measures = measure(plan.actions, simulate(plan.actions, costs_of(config.pipeline, flops)));
  plan.bubble_fraction = measures.bubble_fraction;
  plan.kept_alive = measures.peak_activations;
  StageFlops all;
  for (const StageFlops& stage : flops) all.forward += stage.forward, all.backward_input += stage.backward_input, all.backward_weight += stage.backward_weight;
  for (int stage = 0; stage < layout.stages(); ++stage) {
    const auto i = static_cast<size_t>(stage);
    plan.stages.push_back({.rank = layout.rank_of[i],
                           .links = links_text(layout.links[i], config.model.layers),
                           .flops_share = flops[i].total() / all.total(),
                           .model_share = flops[i].forward / all.forward});
  }
  return plan;
}

nlohmann::json to_json(const PipelinePlan& plan) {
  nlohmann::json stages = nlohmann::json::array();
  for (const auto& stage : plan.stages) stages.push_back({{"rank", stage.rank}, {"links", stage.links}, {"flops_share", stage.flops_share}});
  return {{"schedule", plan.schedule}, {"micro_batches", plan.micro_batches}, {"stages", std::move(stages)}};
}

std::string to_string(const PipelinePlan& plan) {
  if (plan.stages.size() == 1) return {};
  std::vector<std::vector<std::string>> rows{{"stage", "rank of pp", "links", "FLOPs"}};
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    const auto& each = plan.stages[stage];
    rows.push_back({std::to_string(stage), std::to_string(each.rank), each.links, fmt::format("{:.1f}%", 100 * each.flops_share)});
  }
  return fmt::format("\npipeline {}: {} stages, {} micro-batches, of a step's forwards and backwards ranks idle {:.1f}%, by FLOPs\n{}", plan.schedule,
                     plan.stages.size(), plan.micro_batches, 100 * plan.bubble_fraction, format_columns(rows, {2}));
}

std::string holding_of(const PipelinePlan& plan, int rank) {
  const std::vector<int> held = plan.stages_of(rank);
  return fmt::format("{} {}, activations of at most {:.3g} micro-batches", held.size() == 1 ? "stage" : "stages", fmt::join(held, " and "),
                     plan.kept_alive[static_cast<size_t>(rank)]);
}

}  // namespace tessera::plan
