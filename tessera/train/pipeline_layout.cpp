#include "tessera/train/pipeline_layout.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/config/schedule_kinds.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/model.h"
#include "tessera/nn/meta.h"
#include "tessera/pipeline/chain_split.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/registry.h"
#include "tessera/train/adapters.h"
#include "tessera/train/stage_costs.h"

namespace tessera {
namespace {

/// One stage of one rank. A rank may hold several all the same, which a step then takes in another order than one micro-batch after the other.
bool is_whole(const Config& config, int ranks) { return ranks == 1 && config.pipeline.virtual_stages == 1; }

bool is_known(const std::string& name) {
  const auto& known = schedules::known_schedules();
  return std::ranges::find(known, name, &schedules::KnownSchedule::name) != known.end();
}

std::string names() {
  std::string all;
  for (const auto& name : schedules::schedule_names()) all += (all.empty() ? "" : ", ") + name;
  return all;
}

/// The file that pipeline.schedule names, proven, and of the pipeline that the mesh has.
schedules::Schedule schedule_in_file(const PipelineConfig& config, int ranks) {
  const std::string& path = config.schedule;
  const std::string word = std::filesystem::path(path).filename().string();
  require(is_there(path), "pipeline.schedule = ", path, ": there is no such file, and no schedule '", word, "'; did you mean ",
          nearest(word, schedules::schedule_names()), "? train carries out CSV files and ", names());
  const auto read = [&] {
    try {
      return schedules::read_csv_file(path);
    } catch (const ConfigError& error) {
      throw ConfigError(detail::concat("pipeline.schedule = ", error.what()));
    }
  };
  schedules::Schedule schedule = read();
  require(!schedule.is_asynchronous(), "pipeline.schedule = ", path, ": updates weights in the middle of a step, which train takes from no file; leave UPDATE ",
          "and versions out, or set pipeline.schedule = pipedream or pipedream_2bw");
  require(schedule.ranks() == ranks, "pipeline.schedule = ", path, ": has ", schedule.ranks(), " rows, one a rank, and mesh.pp = ", ranks,
          "; set mesh.pp = ", schedule.ranks(), ", or give a row for each of ", ranks, " ranks");
  const int chunks = schedule.stages() / ranks;
  require(chunks * ranks == schedule.stages(), "pipeline.schedule = ", path, ": has ", schedule.stages(), " stages on ", ranks,
          " ranks, and stages are pipeline.virtual_stages for each rank, on average; give a multiple of ", ranks);
  require(chunks == config.virtual_stages, "pipeline.virtual_stages = ", config.virtual_stages, ": pipeline.schedule = ", path, " has ", schedule.stages(),
          " stages on ", ranks, " ranks; set pipeline.virtual_stages = ", chunks);
  return schedule;
}

/// The schedule in a file is of one number of micro-batches.
void check_micro_batches(const schedules::Schedule& schedule, int micro_batches) {
  require(schedule.micro_batches == micro_batches, "pipeline.schedule = ", schedule.name, ": has ", schedule.micro_batches,
          " micro-batches, and a step gives each data rank ", micro_batches,
          " (batch.global_size / batch.micro_size over the data ranks, rounded up; ranks with fewer fill up with empty ones); set batch.global_size = ",
          schedule.micro_batches, " x batch.micro_size x the data ranks, or give a file of ", micro_batches);
}

/// The tree of run.deterministic adds a rank's micro-batches up as they come.
void refuse_other_orders(const schedules::Schedule& schedule) {
  using schedules::Kind;
  std::map<std::pair<int, Kind>, int> latest;  // of each stage, by kind; whole backwards among those of inputs
  for (const auto& listed : schedule.actions) {
    for (const schedules::Action& one : listed) {
      if (!one.computes()) continue;
      for (const schedules::Action& action : schedules::parts(one)) {
        const Kind kind = action.kind == Kind::Backward ? Kind::BackwardInput : action.kind;
        int& before = latest.try_emplace({action.stage, kind}, -1).first->second;
        require(before < action.micro_batch, "run.deterministic = true: adds the gradients of micro-batches up in the order of their numbers, and ",
                "pipeline.schedule = ", schedule.name, " has the ", schedules::words_of(action.kind), " of micro-batch ", action.micro_batch,
                " behind that of ", before, " on stage ", action.stage, "; give a file that takes them in order, or set run.deterministic = false");
        before = action.micro_batch;
      }
    }
  }
}

/// A schedule by its name.
const schedules::KnownSchedule& schedule_named(const PipelineConfig& config) {
  const schedules::KnownSchedule& known = *std::ranges::find(schedules::known_schedules(), config.schedule, &schedules::KnownSchedule::name);
  const int chunks = config.virtual_stages;
  const bool any = known.chunks == 0;
  require(any || chunks >= known.chunks, "pipeline.virtual_stages = ", chunks, ": pipeline.schedule = ", known.name, " has ", known.chunks,
          " chunks of the model on each rank; set pipeline.virtual_stages = ", known.chunks);
  require(any || chunks <= known.chunks, "pipeline.virtual_stages = ", chunks, ": pipeline.schedule = ", known.name, " has ", known.chunks,
          known.chunks == 1 ? " chunk" : " chunks", " of the model on each rank; set pipeline.virtual_stages = ", known.chunks,
          ", or pipeline.schedule = interleaved");
  require(known.name != "zb_auto" || config.memory_limit > 0, "pipeline.memory_limit = ", config.memory_limit,
          ": pipeline.schedule = zb_auto is made for a limit, the micro-batches whose activations a rank may hold; set pipeline.memory_limit to 1 or more, ",
          "or pipeline.schedule = zb_1p, which takes mesh.pp of them");
  return known;
}

int micro_batches_per_update(const PipelineConfig& config, int ranks, int micro_batches) {
  const int fewest = std::min(ranks, micro_batches);
  require(config.per_update == 0 || config.per_update >= fewest, "pipeline.per_update = ", config.per_update,
          ": two versions of the weights are enough where an update sums a micro-batch for each of ", ranks, " stages; set pipeline.per_update = ", fewest,
          " or more, or 0");
  return config.per_update;
}

/// A generator knows what it was asked for, and no keys.
std::string way_out_of(const std::string& knob, int micro_batches) {
  if (knob == "micro_batches") {
    return detail::concat("; a data rank has ", micro_batches,
                          " micro-batches of a step, its share of batch.global_size / batch.micro_size: change these, or the data ranks");
  }
  const std::string key = knob == "ranks" ? "mesh.pp" : knob == "chunks" ? "pipeline.virtual_stages" : "pipeline." + knob;
  return "; set " + key;
}

/// Which rank holds each stage: what does not depend on costs or micro-batches.
std::vector<int> placement(const PipelineConfig& config, int ranks) {
  if (!is_known(config.schedule)) return schedule_in_file(config, ranks).rank_of;
  const schedules::KnownSchedule& known = schedule_named(config);
  if (is_made_for_costs(known.name)) return schedules::loop_placement(ranks, 1);
  // With a number of micro-batches that every one takes.
  return schedules::make_schedule({.name = known.name, .ranks = ranks, .micro_batches = 2 * ranks, .chunks = config.virtual_stages}).rank_of;
}

/// FLOPs of each link of the model, forward and backward, as if it were a stage by itself. Whose stages are not known yet: what each rank keeps, by
/// recompute.budget_bytes, is taken from stages of as many blocks each, and as no block is known to be one of those that are computed again, all bear the mean.
std::vector<double> costs_of_links(const Config& config, const std::vector<int>& rank_of_stage) {
  const int64_t layers = config.model.layers;
  PipelineLayout single;
  for (int64_t link = 0; link < layers + 2; ++link) {
    const int64_t block = std::clamp<int64_t>(link - 1, 0, layers - 1);
    single.links.push_back({link, link + 1});
    single.rank_of.push_back(rank_of_stage[static_cast<size_t>(block * std::ssize(rank_of_stage) / layers)]);
  }
  std::vector<double> costs;
  for (const StageFlops& link : stage_flops(config, single)) costs.push_back(link.total());
  if (config.recompute.budget_bytes > 0) {
    const auto blocks = std::span(costs).subspan(1, costs.size() - 2);
    std::ranges::fill(blocks, std::accumulate(blocks.begin(), blocks.end(), 0.0) / static_cast<double>(blocks.size()));
  }
  return costs;
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

bool is_schedule_file(const PipelineConfig& config) { return !is_known(config.schedule); }

ScheduleMaker schedule_maker(const Config& config, int ranks) {
  if (is_whole(config, ranks)) return [](int micro_batches) { return schedules::make_schedule({.name = "naive", .ranks = 1, .micro_batches = micro_batches}); };
  if (is_schedule_file(config.pipeline)) {
    const schedules::Schedule schedule = schedule_in_file(config.pipeline, ranks);
    if (config.run.deterministic) refuse_other_orders(schedule);
    return [schedule](int micro_batches) {
      check_micro_batches(schedule, micro_batches);
      return schedule;
    };
  }
  const PipelineConfig& pipeline = config.pipeline;
  schedules::Request request{.name = schedule_named(pipeline).name, .ranks = ranks, .chunks = pipeline.virtual_stages};
  if (request.name == "pipedream") request.vertical_sync = pipeline.vertical_sync;
  if (request.name == "zb_auto") request.memory_limit = pipeline.memory_limit;
  if (is_made_for_costs(request.name)) {
    request.kept = pipeline.kept;
    request.costs = costs_of(pipeline, stage_flops(config, pipeline_layout(config, ranks)));
  }
  return [request, pipeline, shares_ends = config.model.tie_embeddings](int micro_batches) {
    schedules::Request asked = request;
    asked.micro_batches = micro_batches;
    if (asked.name == "pipedream_2bw") asked.per_update = micro_batches_per_update(pipeline, asked.ranks, micro_batches);
    try {
      schedules::Schedule made = schedules::make_schedule(asked);
      const int last = made.stages() - 1;
      return shares_ends && made.is_asynchronous() ? schedules::with_late_updates(std::move(made), last) : made;
    } catch (const schedules::RefusedRequest& error) {
      throw ConfigError(detail::concat("pipeline.schedule = ", error.what(), way_out_of(error.knob(), micro_batches)));
    }
  };
}

PipelineLayout pipeline_layout(const Config& config, int ranks) {
  PipelineLayout layout;
  if (is_whole(config, ranks)) return {.links = {{0, config.model.layers + 2}}, .rank_of = {0}};
  layout.rank_of = placement(config.pipeline, ranks);
  const auto stages = static_cast<int>(layout.rank_of.size());
  const std::vector<std::string> links = link_names(config.model);
  // A wish for more stages than links is refused alike.
  const bool by_cost = config.pipeline.split == std::vector<std::string>{"cost"} && stages <= std::ssize(links);
  const auto runs =
      by_cost ? pipeline::split_by_cost(costs_of_links(config, layout.rank_of), stages) : pipeline::split_chain(links, stages, config.pipeline.split);
  for (const auto& [begin, end] : runs) layout.links.push_back({begin, end});
  return layout;
}

namespace {

/// A stage without anything to train would have no gradients to wait for, and those before it none to be sent.
void check_adapted_stages(const Config& config, const PipelineLayout& layout) {
  if (config.lora.modules.empty()) return;
  const auto model = on_meta([&] { return make_model_for_stages(config.model); });
  const Attachment adapted = add_adapters(config, *model);
  for (size_t stage = 0; stage < layout.links.size(); ++stage) {
    const ModelPart part(model, layout.links[stage]);
    const auto parameters = part->parameters();
    require(std::ranges::any_of(parameters, [](const at::Tensor& parameter) { return parameter.requires_grad(); }), "lora.modules = ", config.lora.modules,
            ": names nothing in stage ", stage, " of ", layout.links.size(), " (", model->link_name(layout.links[stage].begin), " to ",
            model->link_name(layout.links[stage].end - 1), "), which would have nothing to train; name layers of each stage, or set ",
            config.mesh.pp == 1 ? "pipeline.virtual_stages" : "mesh.pp", " to less");
  }
}

}  // namespace

void check_pipeline(const Config& config, const MeshShape& axes) {
  const MeshRoles roles = mesh_roles(config);
  const int ranks = size_along(axes, roles.stages);
  if (is_whole(config, ranks)) return;
  const PipelineLayout layout = pipeline_layout(config, ranks);  // or a refusal
  check_adapted_stages(config, layout);
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  const auto each = static_cast<int>(chunk(micro_batches, size_along(axes, roles.batch), 0).second);
  schedule_maker(config, ranks)(each);
}

}  // namespace tessera
