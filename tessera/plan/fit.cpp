#include "tessera/plan/fit.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <utility>

#include "tessera/config/schedule_kinds.h"
#include "tessera/core/error.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/settings.h"
#include "tessera/train/pipeline_layout.h"

// Which settings fit is measured by dry runs; in which order to try them is a table of prices. A model of time would be another description of the system, and
// wrong on other machines; the order has to be right only roughly, for the first that fits ends the search. Rules of the configuration are not repeated here:
// what they refuse is passed over.

namespace tessera::plan {

namespace {

using Sets = std::vector<std::string>;

/// One knob's position, and what turning it there costs beside others.
struct Choice {
  Sets sets{};
  int price = 0;
};

constexpr int kShardState = 1, kShardGradients = 2, kShardParameters = 8;       // stages 1, 2 and 3; above 1 accumulation sends more, stage 3 gathers twice
constexpr int kOffload = 16;                                                    // slices cross to the device with every unit, and the host updates them
constexpr int kState = 12, kStateAndGradients = 13;                             // a gradient out and a parameter back; with each micro-batch
constexpr int kHalfMicroBatch = 4;                                              // products of half the size are less efficient
constexpr int kSelective = 3, kFull = 10;                                       // a share of the FLOPs, and up to a third of them
constexpr int kOneForwardOneBackward = 1, kHalfMemory = 3, kThirdOfMemory = 5;  // larger bubbles
constexpr int kPipeline = 9;                                                    // idle for a fifth of a step at most, with so many micro-batches:
constexpr int kMicroBatchesAStage = 4;

std::vector<Choice> stages(const Config& config, int world) {
  std::vector<Choice> choices{{}};
  const MeshShape shape = mesh_shape(config.mesh, config.zero.stage, world);
  const MeshRoles roles = mesh_roles(config);
  const int shard = size_along(shape, roles.shard), replicate = size_along(shape, roles.replicate);
  Sets mesh;
  if (shard == 1 && replicate > 1 && config.mesh.dp_replicate) mesh = {"mesh.dp_replicate=1", "mesh.dp_shard=" + std::to_string(replicate)};
  for (const auto& [stage, price] : {std::pair{1, kShardState}, {2, kShardGradients}, {3, kShardParameters}}) {
    if (stage <= config.zero.stage || shard * replicate == 1) continue;
    Choice choice{.sets = {"zero.stage=" + std::to_string(stage)}, .price = price};
    choice.sets.insert(choice.sets.end(), mesh.begin(), mesh.end());
    choices.push_back(std::move(choice));
  }
  if (config.offload.params.is("host") || config.offload.params.is("disk")) return choices;
  if (config.offload.optimizer.is("device")) {
    choices.push_back({.sets = {"offload.optimizer=host"}, .price = kState});
    if (config.zero.stage < 3) choices.push_back({.sets = {"offload.gradients=host", "offload.optimizer=host"}, .price = kStateAndGradients});
  }
  Choice host{.price = kOffload};  // of one rank, too
  if (config.zero.stage < 3) {
    host = {.sets = {"zero.stage=3"}, .price = kOffload + kShardParameters};
    host.sets.insert(host.sets.end(), mesh.begin(), mesh.end());
  }
  host.sets.insert(host.sets.end(), {"offload.params=host", "offload.gradients=host", "offload.optimizer=host"});
  choices.push_back(std::move(host));
  return choices;
}

/// What makes of another batch.micro_size another training run; empty where nothing does.
std::string bound_to_micro_size(const Config& config) {
  if (config.mesh.pp != 1 && is_asynchronous(config.pipeline.schedule)) {  // -1 takes what is left
    return "pipeline.schedule = " + config.pipeline.schedule;              // of whose updates it is the batch
  }
  return terms_of_a_micro_batch(config);
}

std::vector<Choice> micro_batches(const Config& config) {
  std::vector<Choice> choices{{}};
  if (!bound_to_micro_size(config).empty()) return choices;
  int price = 0;
  for (int64_t size = config.batch.micro_size / 2; size >= 1; size /= 2) {
    price += kHalfMicroBatch;
    if (config.batch.global_size % size == 0) choices.push_back({.sets = {"batch.micro_size=" + std::to_string(size)}, .price = price});
  }
  return choices;
}

std::vector<Choice> recomputations(const Config& config) {
  const auto& now = config.recompute;
  std::vector<Choice> choices{{}};
  if (now.mode == "none") choices.push_back({.sets = {"recompute.mode=selective"}, .price = kSelective});
  if (now.mode != "full") {
    Choice full{.sets = {"recompute.mode=full"}, .price = kFull};
    if (!now.keep.empty()) full.sets.push_back("recompute.keep=[]");
    choices.push_back(std::move(full));
  } else if (now.every > 1 || now.budget_bytes > 0) {
    choices.push_back({.sets = {"recompute.every=1", "recompute.budget_bytes=0"}, .price = kFull});
  }
  return choices;
}

/// Over another number of data ranks the same step, where the file says what each of them has.
Sets whole_step(const Config& config) {
  if (!config.given.contains("batch.per_rank")) return {};
  return {"batch.per_rank=0", "batch.global_size=" + std::to_string(config.batch.global_size)};
}

/// Schedules that hold fewer micro-batches' activations; where there are no stages yet, a pipeline over the data ranks, which divides what each parameter
/// keeps.
std::vector<Choice> pipelines(const Config& config, int world) {
  std::vector<Choice> choices{{}};
  if (is_asynchronous(config.pipeline.schedule)) return choices;  // it says what is trained, and where there are no stages yet, another number would
  const MeshShape shape = mesh_shape(config.mesh, config.zero.stage, world);
  const MeshRoles roles = mesh_roles(config);
  if (size_along(shape, roles.stages) > 1) {
    const std::string& now = config.pipeline.schedule;
    const auto is_one_of = [&](std::initializer_list<std::string_view> names) { return std::ranges::find(names, now) != names.end(); };
    const auto add = [&](const char* schedule, int chunks, int price) {
      choices.push_back({.sets = {std::string("pipeline.schedule=") + schedule, "pipeline.virtual_stages=" + std::to_string(chunks)}, .price = price});
    };
    if (is_one_of({"gpipe", "breadth_first", "interleaved", "zb_h2", "zb_2p", "zb_auto"})) add("1f1b", 1, kOneForwardOneBackward);
    if (!is_one_of({"naive", "v_half", "v_min"})) add("v_half", 2, kHalfMemory);
    if (!is_one_of({"naive", "v_min"})) add("v_min", 2, kThirdOfMemory);
    return choices;
  }
  const int data = size_along(shape, roles.batch);
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  if (config.mesh.dp_replicate || config.mesh.dp_shard) return choices;  // as many as was asked for
  for (int stages = 2; stages <= data; stages *= 2) {
    const bool many = micro_batches / (data / stages) >= kMicroBatchesAStage * stages;
    if (data % stages != 0 || !many || stages > config.model.layers) continue;
    Choice piped{.sets = {"mesh.pp=" + std::to_string(stages)}, .price = kPipeline};
    std::ranges::copy(whole_step(config), std::back_inserter(piped.sets));
    choices.push_back(std::move(piped));
  }
  return choices;
}

Setting tried(const DryRun& run, Sets sets) {
  const RankClass& largest = largest_class(run);
  Setting setting{.sets = std::move(sets), .peak = largest.peak_bytes, .needed = needed_bytes(largest), .parameters = largest.parameters};
  for (const auto& ranks : run.ranks) {
    const auto count = static_cast<double>(ranks.count);
    setting.flops += count * ranks.hardware_flops;
    for (const auto& sum : ranks.collectives) setting.sent_bytes += count * static_cast<double>(sum.sent_bytes);
  }
  return setting;
}

}  // namespace

const Setting* FitSearch::best() const {
  if (fits) return &tried.back();
  const auto least = std::ranges::min_element(tried, {}, &Setting::needed);
  return least == tried.end() ? nullptr : &*least;
}

std::vector<Sets> cheaper_settings(const Config& config, int world) {
  std::vector<Choice> all;
  for (const auto& stage : stages(config, world)) {
    for (const auto& micro : micro_batches(config)) {
      for (const auto& recompute : recomputations(config)) {
        for (const auto& pipeline : pipelines(config, world)) {
          Choice choice{.price = stage.price + micro.price + recompute.price + pipeline.price};
          for (const auto* part : {&stage, &micro, &recompute, &pipeline}) choice.sets.insert(choice.sets.end(), part->sets.begin(), part->sets.end());
          if (!choice.sets.empty()) all.push_back(std::move(choice));
        }
      }
    }
  }
  std::stable_sort(all.begin(), all.end(), [](const Choice& a, const Choice& b) { return a.price < b.price; });
  std::vector<Sets> sets;
  for (auto& choice : all) sets.push_back(std::move(choice.sets));
  return sets;
}

FitSearch find_fit(const Config& config, int world, int64_t limit, std::chrono::seconds patience, const std::optional<DeviceAllocator>& allocator,
                   int64_t seen) {
  const auto until = std::chrono::steady_clock::now() + patience;
  FitSearch search{.now = tried(dry_run(config, world, {.allocator = allocator}), {}), .limit = limit};
  if (seen > limit && search.now.needed <= limit) search.beyond = seen - search.now.needed, search.limit -= search.beyond;
  if (config.batch.micro_size > 1) search.bound_to_micro_size = bound_to_micro_size(config);
  for (auto& sets : cheaper_settings(config, world)) {
    if (std::chrono::steady_clock::now() > until) {
      search.complete = false;
      break;
    }
    try {
      const Config changed = with_settings(config, sets);
      validate(changed, world, Purpose::Plan);
      check_pipeline(changed, mesh_shape(changed.mesh, changed.zero.stage, world));
      search.tried.push_back(tried(dry_run(changed, world, {.allocator = allocator, .limits_units = true}), std::move(sets)));
    } catch (const ConfigError&) {
      continue;  // these settings do not go together
    }
    search.fits = search.tried.back().needed <= search.limit;
    if (search.fits) break;
  }
  return search;
}

}  // namespace tessera::plan
