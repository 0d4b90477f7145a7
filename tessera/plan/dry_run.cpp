#include "tessera/plan/dry_run.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/flops.h"
#include "tessera/plan/agreement.h"
#include "tessera/plan/alike_stages.h"
#include "tessera/plan/dry_rank.h"
#include "tessera/precision/compute_format.h"

// Nothing here knows what a step does: it is that of train, on meta, over groups that do nothing, and all that it does is taken down as a list of events. What
// remains is to run as few ranks, and as few micro-batches, as show all there is, to read the lists, and to compare what the classes ask of each other.

namespace tessera::plan {

namespace {

// Three steps must show what a long run does: PowerSGD, if it begins at all, begins after the first of them.
Config shortened(Config config) {
  config.run.memory_limit_bytes = 0;
  auto& start = config.comm.powersgd_start;
  if (start < config.run.steps) start = std::min<int64_t>(start, 1);
  return config;
}

StepTime timed(const Config& config, const DryRun& run, const Machine& machine) {
  std::vector<TimedClass> classes;
  double model = 0, hardware = 0;
  for (const RankClass& ranks : run.ranks) {
    classes.push_back({.pipeline_rank = ranks.pipeline_rank, .time = &ranks.time});
    model += ranks.flops * static_cast<double>(ranks.count);
    hardware += ranks.hardware_flops * static_cast<double>(ranks.count);
  }
  StepTime time = step_time(classes, run.pipeline.actions);
  time.tokens_per_second = static_cast<double>(run.tokens_per_step) / time.seconds / run.world;
  const std::map<std::string, at::ScalarType> types{{"bf16", at::kBFloat16}, {"fp16", at::kHalf}, {"fp8", at::kFloat8_e4m3fn}};
  const auto type = types.find(config.precision.compute);
  const auto peak = machine.device.flops.find(type == types.end() ? at::kFloat : type->second);
  time.model_flops = model / time.seconds / run.world;
  if (peak != machine.device.flops.end()) {
    time.mfu = time.model_flops / peak->second;
    time.hfu = hardware / time.seconds / run.world / peak->second;
  }
  return time;
}

EffectiveBatch effective_batch(const Config& config, int world) {
  const MeshShape shape = mesh_shape(config.mesh, config.zero.stage, world);
  const int ranks = size_along(shape, mesh_roles(config).batch);
  return {.per_rank = config.batch.micro_size,
          .data_ranks = ranks,
          .accumulation = chunk(config.batch.global_size / config.batch.micro_size, ranks, 0).second,
          .global = config.batch.global_size};
}

/// The class of ranks that are one pipeline rank further along, or several.
RankClass moved(RankClass ranks, int to, const PipelinePlan& pipeline) {
  const std::vector<int> before = pipeline.stages_of(ranks.pipeline_rank), after = pipeline.stages_of(to);
  std::map<std::pair<schedules::Kind, int>, RankTime::Mean> actions;
  for (const auto& [what, mean] : ranks.time.actions) {
    const auto held = std::ranges::find(before, what.second);
    if (held != before.end()) actions[{what.first, after.at(static_cast<size_t>(held - before.begin()))}] = mean;
  }
  ranks.time.actions = std::move(actions);
  ranks.pipeline_rank = to;
  return ranks;
}

/// Where `other` needs more of its device, its memory in place of this run's. Of ranks that other documents sort into other classes, each class is held against
/// the one that needs most.
void take_larger(DryRun& run, const DryRun& other) {
  const bool alike = run.ranks.size() == other.ranks.size() && std::ranges::equal(run.ranks, other.ranks, {}, &RankClass::examples, &RankClass::examples);
  for (size_t i = 0; i < run.ranks.size(); ++i) {
    RankClass& ranks = run.ranks[i];
    const RankClass& more = alike ? other.ranks[i] : largest_class(other);
    if (needed_bytes(more) <= needed_bytes(ranks) || (!alike && &ranks != &largest_class(run))) continue;
    ranks.peak_bytes = more.peak_bytes, ranks.reserved_bytes = more.reserved_bytes, ranks.host_bytes = more.host_bytes;
    ranks.largest = more.largest, ranks.history = more.history;
  }
}

}  // namespace

int64_t documents_that_fill(const Config& config, int world) {
  const int64_t columns = config.data.seq_len, window = config.model.sliding_window;
  if (config.data.documents == "none" || window == 0 || window >= columns) return 1;
  const int64_t fewest = (columns + window - 1) / window;
  // Roughly: what a kernel takes for the gradients of a row, and for its blocks of 32 queries by 512 keys.
  const int64_t row_bytes = 16 * config.model.dim / size_along(mesh_shape(config.mesh, config.zero.stage, world), mesh_roles(config).layers);
  int64_t best = fewest, most = 0;
  for (int64_t count = fewest; count <= columns; ++count) {
    // Behind a rest those of the next window of a micro-batch begin at another distance, and are rows of another call.
    const int64_t together = columns % count == 0 ? config.batch.micro_size * columns : columns - columns % count, length = columns / count;
    const int64_t bytes = together * row_bytes + 8 * std::min<int64_t>(32, length) * std::min<int64_t>(512, length);
    if (bytes > most) most = bytes, best = count;
  }
  return best;
}

bool DryRun::fits() const { return memory_limit == 0 || needed_bytes(largest_class(*this)) <= memory_limit; }

int64_t needed_bytes(const RankClass& ranks) { return std::max(ranks.reserved_bytes, total_of(ranks.peak_bytes)); }

const RankClass& largest_class(const DryRun& run) {
  // What is reserved comes in large pieces, and is the same for ranks that need more of it than others.
  const auto bytes = [](const RankClass& ranks) { return std::pair(needed_bytes(ranks), total_of(ranks.peak_bytes)); };
  return *std::ranges::max_element(run.ranks, std::ranges::less(), bytes);
}

DryRun dry_run(const Config& asked, int world, const DryRunOptions& options) {
  Config config = asked;
  precision::settle_compute(config, at::kMeta, precision::Saying::Silent);
  DryRun run;
  run.world = world;
  run.memory_limit = config.run.memory_limit_bytes;
  run.allocator = options.allocator;
  run.batch = effective_batch(config, world);
  run.tokens_per_step = config.batch.global_size * config.data.seq_len;
  run.parameters = num_parameters(config.model);
  run.active_parameters = num_active_parameters(config.model);
  run.pipeline = plan_pipeline(config, world);
  const Config short_run = shortened(config);
  auto classes = rank_classes(options.limits_units ? config : short_run, world, run.pipeline, options.exact_ranks, options.documents, options.routed);
  const MeshShape shape = mesh_shape(config.mesh, config.zero.stage, world);
  Agreement agreement(shape);
  if (deals_experts(config, shape)) {
    const ExpertGrid experts = expert_grid(config, shape);
    agreement.regroup(experts.over.names, experts.into);
  }
  DryRunOptions whole = options;
  whole.rehearse = false;
  DryRunProgress progress{.kind = 0, .kinds = static_cast<int>(classes.size())};
  const StageKinds kinds(run.pipeline, shape, mesh_roles(config).stages);
  std::multimap<StageKind, Trace> traces;
  std::map<StageKind, std::vector<int>> of_kind;  // ranks for all of which one class stands
  for (const auto& members : classes) {
    if (const auto kind = kinds(members.front()); options.alike_stages && kind) {
      auto& all = of_kind[*kind];
      all.insert(all.end(), members.begin(), members.end());
    }
  }
  const bool share = options.share_traces && !options.told && !options.events && options.rehearse && treats_layers_alike(config);
  const auto config_of = [&](int rank) { return options.told ? options.told(short_run, rank) : short_run; };
  const auto of_class = [&](int rank, const std::vector<int>& alike, const std::optional<StageKind>& kind) {
    if (share && kind) {
      for (auto [at, end] = traces.equal_range(*kind); at != end; ++at) {
        if (auto one = read_rank({short_run, world, run.pipeline}, rank, alike, options, at->second); one && one->consistent) return std::move(*one);
      }
    }
    Trace trace;
    const Config told = config_of(rank);
    const DryPlan dry{told, world, run.pipeline};
    RankRun one = run_rank(dry, rank, alike, options, progress, share && kind ? &trace : nullptr);
    if (!one.consistent) return run_rank(dry, rank, alike, whole, progress);
    if (!trace.steps.empty()) traces.emplace(*kind, std::move(trace));
    return one;
  };
  std::map<StageKind, size_t> standing;  // of ranks that hold as much, the class that keeps most micro-batches alive, for all
  for (size_t i = 0; options.alike_stages && i < classes.size(); ++i) {
    const auto kept = [&](size_t of) { return run.pipeline.kept_alive.at(static_cast<size_t>(kinds.pipeline_rank(classes[of].front()))); };
    const auto kind = kinds(classes[i].front());
    if (!kind) continue;
    const auto [known, fresh] = standing.try_emplace(*kind, i);
    if (!fresh && kept(i) > kept(known->second)) known->second = i;
  }
  std::vector<std::pair<size_t, size_t>> told;  // classes, and those that stand for them
  run.class_of.resize(static_cast<size_t>(world));
  for (auto& members : classes) {
    ++progress.kind;
    for (const int rank : members) run.class_of[static_cast<size_t>(rank)] = static_cast<int>(run.ranks.size());
    const auto kind = kinds(members.front());
    if (const auto stands = kind ? standing.find(*kind) : standing.end(); stands != standing.end() && stands->second != run.ranks.size()) {
      told.emplace_back(run.ranks.size(), stands->second);
      run.ranks.push_back({.pipeline_rank = kinds.pipeline_rank(members.front())});
      run.ranks.back().count = static_cast<int64_t>(members.size());
      run.ranks.back().examples = {members.front()};
      continue;
    }
    const auto stands_for = kind ? of_kind.find(*kind) : of_kind.end();
    RankRun one = of_class(members.front(), stands_for == of_kind.end() ? members : stands_for->second, kind);
    agreement.add(members, one.events);
    RankClass ranks = std::move(one.ranks);
    if (options.events) ranks.events = std::move(one.events);
    ranks.count = static_cast<int64_t>(members.size());
    members.resize(std::min<size_t>(members.size(), 8));
    ranks.examples = std::move(members);
    run.ranks.push_back(std::move(ranks));
  }
  for (const auto& [one, standing_for_it] : told) {
    RankClass ranks = moved(run.ranks[standing_for_it], run.ranks[one].pipeline_rank, run.pipeline);
    ranks.count = run.ranks[one].count;
    ranks.examples = std::move(run.ranks[one].examples);
    run.ranks[one] = std::move(ranks);
  }
  if (options.machine) run.time = timed(config, run, *options.machine);
  const std::string problem = agreement.first_disagreement();
  if (!problem.empty() && !traces.empty()) {  // told by the call sites of each rank's own modules
    DryRunOptions each = options;
    each.share_traces = false;
    return dry_run(asked, world, each);
  }
  require(problem.empty(), "mesh: ranks of this layout would wait for each other in vain: ", problem,
          "; choose another layout, for no run of this one would end (and say so to tessera's authors)");
  try {
    Config runnable = config;
    if (options.text_to_come && runnable.data.files.empty()) runnable.data.files = {"text"};
    validate(runnable, world, Purpose::Train);
  } catch (const ConfigError& e) {
    run.remarks.emplace_back(e.what());
  }
  if (const int64_t filling = options.documents == 1 && !options.documents_apart ? documents_that_fill(config, world) : 1; filling > 1) {
    DryRunOptions equal = options;
    equal.documents = filling;
    take_larger(run, dry_run(asked, world, equal));
  }
  return run;
}

}  // namespace tessera::plan
