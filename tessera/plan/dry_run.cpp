#include "tessera/plan/dry_run.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_map>

#include <fmt/format.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/data/loader.h"
#include "tessera/layout/slice.h"
#include "tessera/memory/memory_events.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/positions.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/flops.h"
#include "tessera/nn/dry_documents.h"
#include "tessera/nn/record_events.h"
#include "tessera/plan/agreement.h"
#include "tessera/plan/alike_stages.h"
#include "tessera/plan/caching_allocator.h"
#include "tessera/plan/cpu_memory.h"
#include "tessera/plan/operator_time.h"
#include "tessera/plan/rehearsal.h"
#include "tessera/plan/stand_ins.h"
#include "tessera/plan/step_history.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/memory_watch.h"
#include "tessera/train/stepper.h"

// Nothing here knows what a step does: it is that of train, on meta, over groups that do nothing, and all that it does is taken down as a list of events. What
// remains is to run as few ranks, and as few micro-batches, as show all there is, to read the lists, and to compare what the classes ask of each other.

namespace tessera::plan {

namespace {

constexpr int kDrySteps = 3;

// Three steps must show what a long run does: PowerSGD, if it begins at all, begins after the first of them.
Config shortened(Config config) {
  config.run.memory_limit_bytes = 0;
  auto& start = config.comm.powersgd_start;
  if (start < config.run.steps) start = std::min<int64_t>(start, 1);
  return config;
}

/// Says how far a step is while its operators pass.
class ProgressHooks final : public nn::OperatorHooks {
 public:
  ProgressHooks(const DryRunOptions& options, DryRunProgress& progress, const EventStream& events, double expected_flops)
      : options_(options), progress_(progress), events_(events), before_(events.flops()), expected_flops_(expected_flops) {}

  void call(nn::OperatorCall& operation) override {
    constexpr int64_t rarely = 64;
    if (++calls_ % rarely == 0) {
      progress_.share = std::min(1.0, (events_.flops() - before_) / std::max(1.0, expected_flops_));
      options_.progress(progress_);
    }
    operation.run();
  }

 private:
  const DryRunOptions& options_;
  DryRunProgress& progress_;
  const EventStream& events_;
  double before_, expected_flops_;
  int64_t calls_ = 0;
};

struct RankRun {
  RankClass ranks;
  Events events;           ///< of the last step: its collectives and the waits for them, or all where they are asked for
  bool consistent = true;  ///< with what the tracker saw; else the rehearsal has left something out
};

/// A dry step as it was taken down.
struct DryStep {
  double tokens = 0;  ///< of this rank's columns, those that a run has targets for
  Alive before, after;
  Events shown;
  std::vector<MemoryBlock> largest;  ///< at the peak, where they are asked for
};

/// What a rank's dry steps have shown, from which steps of ranks that do the same are read, too.
struct Trace {
  int stage = 0;                    ///< of mesh.pp
  std::vector<pipeline::Leg> legs;  ///< of a step that was run
  std::vector<std::string> channels;
  RankClass ranks;                 ///< what needs no events
  Events beginning;                ///< memory that is held before the first step
  std::set<std::string> stood_in;  ///< operators without a meta kernel
  std::vector<DryStep> steps;
};

/// Micro-batches that do the same are run once, but where a step looks at each by itself: the deterministic tree adds them up in an order of its own, a rank's
/// padding has none of its own, and details are of real tensors.
std::optional<Rehearsal> rehearsal_of(const Config& config, const data::StepBatch& batch, const Composition& run, const DryRunOptions& options) {
  const bool padded = std::ranges::any_of(batch.micro_batches, [](const data::MicroBatch& micro) { return micro.weight == 0; });
  const bool on_disk = config.offload.activations.uses("disk");  // a file holds those of all micro-batches that are alive
  if (!options.rehearse || options.largest || config.run.deterministic || padded || on_disk) return std::nullopt;
  return shortest_rehearsal(schedule_maker(config, run.pipeline.size()), static_cast<int>(batch.micro_batches.size()), run.pipeline.rank(),
                            {run.channels.ahead.name(), run.channels.back.name()}, /*neighbours=*/config.zero.stage >= 2);
}

/// Of the groups along `axes` in which `ranks` are, the one whose members lie worst: ranks that do the same wait for the slowest of them.
Placement worst_placed(const Mesh& grid, const Axes& axes, const std::vector<int>& ranks, int per_host) {
  std::optional<Placement> worst;
  std::vector<bool> known;
  for (const int rank : ranks) {
    if (static_cast<size_t>(rank) < known.size() && known[static_cast<size_t>(rank)]) continue;
    const std::vector<int> members = grid.members(rank, axes);
    for (const int member : members) {
      if (static_cast<size_t>(member) >= known.size()) known.resize(2 * static_cast<size_t>(member) + 1);
      known[static_cast<size_t>(member)] = true;
    }
    const Placement placement = placement_of(members, per_host);
    if (!worst || placement.is_slower_than(*worst)) worst = placement;
  }
  return worst.value();
}

/// "dp_shard+tp", of this grid or of the experts', or with the name of a further group of the same ranks behind a dot; the world for what names no axes.
/// `ranks`: which all do what this one does.
Placement placed(const std::string& group, const Config& config, const Mesh& mesh, int per_host, const std::vector<int>& ranks) {
  const std::vector<std::string> axes = axes_in(group.substr(0, group.find('.')));
  const auto has_all = [&](const Mesh& grid) { return std::ranges::all_of(axes, [&](const auto& axis) { return grid.has(axis); }); };
  if (has_all(mesh)) return worst_placed(mesh, axes, ranks, per_host);
  if (deals_experts(config, mesh.shape())) {
    if (const Mesh experts = expert_mesh(config, mesh); has_all(experts)) return worst_placed(experts, axes, ranks, per_host);
  }
  return placement_of(mesh.members(mesh_roles(config).world), per_host);
}

std::vector<std::string> channel_names(const Composition& run) {
  if (run.pipeline.size() == 1) return {};
  return {run.channels.ahead.name(), run.channels.back.name()};
}

/// Reads what there is to say of a rank from its dry steps, one after the other.
class StepsReader {
 public:
  /// `alike`: the ranks that do what it does. `known`: what needs no events. `beginning`: before the steps. `rehearsal`: of this rank, null where its steps are
  /// whole.
  StepsReader(const Config& config, const Mesh& mesh, const std::vector<int>& alike, const PipelinePlan& pipeline, const DryRunOptions& options,
              const Rehearsal* rehearsal, std::vector<std::string> channels, RankClass known, const Events& beginning)
      : config_(config), mesh_(mesh), alike_(alike), options_(options), rehearsal_(rehearsal), channels_(std::move(channels)) {
    if (options.allocator) allocator_.emplace(options.allocator->within);
    if (allocator_) std::ranges::for_each(beginning, [&](const Event& event) { allocator_->read(event); });
    run_.ranks = std::move(known);
    run_.ranks.pipeline_rank = mesh.rank(mesh_roles(config).stages);
    share_ = pipeline.model_share_of(run_.ranks.pipeline_rank);
    in_flight_ = pipeline.stages.size() > 1;
  }

  double flops(double tokens) const {
    return model_flops_per_token(config_.model, config_.data.seq_len) * tokens / mesh_.size(mesh_roles(config_).layers) * share_;
  }

  void read(const DryStep& step, bool last) {
    RankClass& result = run_.ranks;
    result.flops = flops(step.tokens);
    EventReader of_step(step.before);
    std::optional<RankClock> clock;
    if (options_.machine && last) {
      clock.emplace(*options_.machine, [this](const std::string& group) { return place_of(group); }, channels_, config_.offload.delayed_update);
    }
    StepHistory history(step.before.device);
    const auto read = [&](const Event& event) {
      of_step.read(event);
      if (allocator_ && in_flight_) allocator_->read(event);
      if (last) count_guess(event);
      if (clock) clock->read(event);
      if (options_.history && last) history.read(event, of_step.alive().device, clock ? std::optional(clock->now()) : std::nullopt);
    };
    if (rehearsal_ != nullptr) {
      for_each_event(step.shown, *rehearsal_, [&](const Event& event, int, int) { read(event); });
    } else {
      std::ranges::for_each(step.shown, read);
    }
    if (clock) result.time = clock->time();
    if (allocator_ && !in_flight_) std::ranges::for_each(step.shown, [&](const Event& event) { allocator_->read(event); });
    if (allocator_) result.reserved_bytes = allocator_->peak();
    if (last) keep_guesses();
    if (options_.history && last) result.history = std::move(history).take();
    run_.consistent = run_.consistent && of_step.alive() == step.after;
    if (last) keep(step.shown, of_step);
    if (total_of(of_step.peak().host) > total_of(result.host_bytes)) result.host_bytes = of_step.peak().host;
    if (total_of(of_step.peak().device) <= peak_) return;
    peak_ = total_of(of_step.peak().device);
    result.peak_bytes = of_step.peak().device;
    result.largest = step.largest;
  }

  RankRun take() && { return std::move(run_); }

 private:
  void count_guess(const Event& event) {
    const auto* ran = std::get_if<OperatorEvent>(&event.what);
    if (ran == nullptr || ran->flops > 0) return;
    const auto [known, fresh] = costs_.try_emplace(ran->name, true);
    if (fresh) known->second = has_cost(*ran, options_.machine ? options_.machine->habits.of(ran->name) : nullptr);
    if (known->second) return;
    GuessedOperator& guess = guessed_[ran->name];
    ++guess.count;
    guess.bytes += ran->read_bytes + ran->written_bytes;
  }

  void keep_guesses() {
    for (auto& [name, guess] : guessed_) {
      guess.name = name;
      if (const auto taken = run_.ranks.time.guessed.find(name); taken != run_.ranks.time.guessed.end()) guess.seconds = taken->second;
      run_.ranks.guessed.push_back(guess);
    }
  }

  /// Looked for once: of many ranks it takes a while.
  Placement place_of(const std::string& group) {
    const auto [known, fresh] = run_.ranks.places.try_emplace(group);
    if (fresh) known->second = placed(group, config_, mesh_, options_.machine->devices_per_host, alike_);
    return known->second;
  }

  /// What the last step alone says.
  void keep(const Events& shown, const EventReader& of_step) {
    const auto kept = [&](const Event& event) {
      return options_.events || std::holds_alternative<CollectiveEvent>(event.what) || std::holds_alternative<WaitEvent>(event.what);
    };
    if (rehearsal_ != nullptr) {
      run_.events = whole_step(shown, *rehearsal_, kept);
    } else {
      std::ranges::copy_if(shown, std::back_inserter(run_.events), kept);
    }
    RankClass& result = run_.ranks;
    result.hardware_flops = of_step.flops();
    result.flops_beside = of_step.flops_beside();
    result.recomputed_flops = of_step.recomputed_flops();
    result.collectives = collectives_of(run_.events);
    if (!options_.machine) return;
    for (const auto& sum : result.collectives) place_of(sum.axis);
  }

  const Config& config_;
  const Mesh& mesh_;
  const std::vector<int>& alike_;
  const DryRunOptions& options_;
  const Rehearsal* rehearsal_;
  std::vector<std::string> channels_;
  std::optional<CachingAllocator> allocator_;
  bool in_flight_ = false;  ///< several micro-batches may be: how many, only the whole step says; else as many as are shown do to the allocator what all do
  RankRun run_;
  std::unordered_map<std::string, bool> costs_;  ///< of operators, whether they are known
  std::map<std::string, GuessedOperator> guessed_;
  double share_ = 1;
  int64_t peak_ = -1;
};

experts::DryRouting routing_of(const Config& config, const DryRunOptions& options, const Mesh& mesh, const data::LoaderOptions& loader) {
  experts::DryRouting routing{.load = options.routed,
                              .alike = config.model.router == "expert_choice" || config.model.experts_per_token == config.model.experts,
                              .per_token = std::max<int64_t>(1, config.model.experts_per_token),
                              .capacity_factor = config.moe.capacity_factor};
  const MeshRoles roles = mesh_roles(config);
  const int layers = mesh.size(roles.layers);
  const bool apart = config.tensor.sequence_parallel && layers > 1;  // ranks that share layers route other positions each
  if (loader.columns.cut() || apart) {
    const data::MicroBatch micro = data::dry_batch(loader, 1, at::kMeta).micro_batches.front();
    routing.tokens = [=, rows = micro.rows, all = micro.seq_len, cut = micro.cut](int world_rank) {
      const int64_t own = cut ? cut->columns(mesh.rank(world_rank, roles.columns)) : all;
      return rows * (apart ? chunk(own, layers, mesh.rank(world_rank, roles.layers)).second : own);
    };
  }
  routing.part = [=](int world_rank) { return mesh.rank(world_rank, roles.layers); };
  return routing;
}

void name_stand_ins(RankClass& ranks, const std::set<std::string>& stood_in) {
  for (GuessedOperator& guess : ranks.guessed) guess.has_meta_kernel = !stood_in.contains(guess.name);
}

/// Documents that are cut over ranks are counted with columns beyond their tokens, as many as any may need to be dealt evenly: no target lies in those.
double targets_of(const Config& config, const data::MicroBatch& micro) {
  if (!micro.cut || config.data.documents == "none") return static_cast<double>(micro.valid_tokens);
  return static_cast<double>(micro.valid_tokens * config.batch.micro_size * config.data.seq_len) / static_cast<double>(micro.rows * micro.cut->length);
}

/// Of memory that was taken while a model was made, what is held when it is done, in the order in which it came. The rest a run never has on its device: there
/// the whole model is made on meta, as here all is.
Events still_held(const Events& events) {
  std::map<int64_t, size_t> taken;
  for (size_t i = 0; i < events.size(); ++i) {
    const auto* change = std::get_if<MemoryChange>(&events[i].what);
    if (change == nullptr || events[i].writes.empty()) continue;
    if (change->bytes > 0) {
      taken[events[i].writes.front()] = i;
    } else {
      taken.erase(events[i].writes.front());
    }
  }
  Events held;
  for (const auto& [id, i] : taken) held.push_back(events[i]);
  return held;
}

/// As `pipeline` deals the model's FLOPs to the stages. What its steps have shown goes to `trace`, if it is given.
RankRun run_rank(const Config& config, int world_size, int rank, const std::vector<int>& alike, const PipelinePlan& pipeline, const DryRunOptions& options,
                 DryRunProgress progress, Trace* trace = nullptr) {
  auto world = comm::World::dry(world_size, rank, std::make_shared<comm::Recorder>(), comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  MemoryTracker memory;
  memory.keep_details(options.largest);
  RankScope scope(config, 1, memory);
  EventStream before_steps;
  std::optional<MemoryEvents> of_allocations;
  if (options.allocator) of_allocations.emplace(before_steps);
  Stepper stepper(config, mesh, at::kMeta, scope);
  of_allocations.reset();
  Events beginning = still_held(before_steps.take());
  const auto stand_ins = std::make_shared<StandIns>();
  const nn::OperatorScope standing_in(stand_ins);
  const nn::OperatorScope taking(std::make_shared<CpuMemory>());
  std::optional<MemoryWatch> watch;
  if (options.largest) watch.emplace(memory, stepper.run());
  data::LoaderOptions loader = loader_options(config, mesh);
  loader.dry_documents = options.documents;
  const nn::DryDocuments documents(loader.packed ? data::dry_documents(loader) : std::vector<int64_t>());
  const experts::DryRoutingScope routing(routing_of(config, options, mesh, loader));
  progress.steps = kDrySteps;
  RankClass known;
  for (const auto& p : stepper.run().parameters) known.parameters += p.tensor.numel();
  double expected_flops = 0;
  std::optional<Rehearsal> rehearsal;
  std::optional<StepsReader> reader;
  const auto alive = [&] { return Alive{.device = memory.current_by_category(), .host = memory.host_by_category()}; };
  for (int step = 1; step <= kDrySteps; ++step) {
    memory.reset_peak();
    const auto batch = data::dry_batch(loader, step, at::kMeta);
    DryStep taken{.before = alive()};
    taken.tokens = std::accumulate(batch.micro_batches.begin(), batch.micro_batches.end(), 0.0,
                                   [&](double sum, const data::MicroBatch& micro) { return sum + targets_of(config, micro); });
    if (step == 1) {
      known.micro_batches = static_cast<int64_t>(batch.micro_batches.size());
      rehearsal = rehearsal_of(config, batch, stepper.run(), options);
      reader.emplace(config, mesh, alike, pipeline, options, rehearsal ? &*rehearsal : nullptr, channel_names(stepper.run()), known, beginning);
    }
    const int run_of_them = rehearsal ? rehearsal->micro_batches : 0;
    if (step == 1) expected_flops = reader->flops(taken.tokens) * (rehearsal ? run_of_them / static_cast<double>(known.micro_batches) : 1);
    progress.step = step;
    EventStream stream;
    {
      std::optional<nn::OperatorScope> told;
      if (options.progress) told.emplace(std::make_shared<ProgressHooks>(options, progress, stream, expected_flops));
      const nn::RecordEvents listening(stream);
      stepper.step(batch, {.rehearsed = run_of_them});
    }
    expected_flops = stream.flops();
    taken.shown = stream.take();
    taken.after = alive();
    taken.largest = memory.largest_at_peak();
    reader->read(taken, step == kDrySteps);
    if (trace != nullptr && rehearsal) trace->steps.push_back(std::move(taken));
  }
  known.disk_bytes = stepper.run().disk.value();
  RankRun run = std::move(*reader).take();
  run.ranks.disk_bytes = known.disk_bytes;
  name_stand_ins(run.ranks, stand_ins->names());
  if (trace != nullptr && rehearsal) {
    trace->stage = mesh.rank(mesh_roles(config).stages);
    trace->legs = std::move(rehearsal->shown);
    trace->channels = channel_names(stepper.run());
    trace->ranks = std::move(known);
    trace->beginning = std::move(beginning);
    trace->stood_in = stand_ins->names();
  }
  return run;
}

/// The same of a rank between the ends of a pipeline, from the trace of another that holds as many layers: nothing is run. Nothing where it does another thing.
std::optional<RankRun> read_rank(const Config& config, int world_size, int rank, const std::vector<int>& alike, const PipelinePlan& pipeline,
                                 const DryRunOptions& options, const Trace& trace) {
  auto world = comm::World::dry(world_size, rank, std::make_shared<comm::Recorder>(), comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  const Axes stages = mesh_roles(config).stages;
  const int stage = mesh.rank(stages);
  const auto rehearsal = shortest_rehearsal(schedule_maker(config, mesh.size(stages)), static_cast<int>(trace.ranks.micro_batches), stage, trace.channels,
                                            /*neighbours=*/config.zero.stage >= 2);
  if (!rehearsal || !same_legs(trace.legs, pipeline.stages_of(trace.stage), rehearsal->shown, pipeline.stages_of(stage))) return std::nullopt;
  StepsReader reader(config, mesh, alike, pipeline, options, &*rehearsal, trace.channels, trace.ranks, trace.beginning);
  for (const DryStep& step : trace.steps) reader.read(step, &step == &trace.steps.back());
  RankRun run = std::move(reader).take();
  name_stand_ins(run.ranks, trace.stood_in);
  if (!readdress(run.events, rehearsal->whole, stage, static_cast<int>(pipeline.stages.size()), trace.channels)) return std::nullopt;
  return run;
}

nlohmann::json to_json(const CollectiveSum& sum) {
  return {{"op", sum.op}, {"axis", sum.axis}, {"dtype", sum.dtype}, {"count", sum.count}, {"bytes", sum.bytes}, {"sent_bytes", sum.sent_bytes}};
}

nlohmann::json to_json(const MemoryByCategory& bytes) {
  nlohmann::json json;
  for (int c = 0; c < num_memory_categories; ++c) json[std::string(to_string(static_cast<MemoryCategory>(c)))] = bytes[c];
  json["total"] = total_of(bytes);
  return json;
}

nlohmann::json to_json(const GuessedOperator& guess) {
  return {{"name", guess.name}, {"count", guess.count}, {"bytes", guess.bytes}, {"seconds", guess.seconds}, {"has_meta_kernel", guess.has_meta_kernel}};
}

nlohmann::json to_json(const RankClass& ranks, const PipelinePlan& pipeline) {
  nlohmann::json guessed = nlohmann::json::array();
  for (const auto& guess : ranks.guessed) guessed.push_back(to_json(guess));
  nlohmann::json collectives = nlohmann::json::array();
  for (const auto& c : ranks.collectives) collectives.push_back(to_json(c));
  nlohmann::json json = {{"count", ranks.count},
                         {"examples", ranks.examples},
                         {"micro_batches", ranks.micro_batches},
                         {"parameters", ranks.parameters},
                         {"peak_bytes", to_json(ranks.peak_bytes)},
                         {"reserved_bytes", ranks.reserved_bytes},
                         {"host_bytes", to_json(ranks.host_bytes)},
                         {"disk_bytes", ranks.disk_bytes},
                         {"collectives", collectives},
                         {"flops", ranks.flops},
                         {"hardware_flops", ranks.hardware_flops},
                         {"recomputed_flops", ranks.recomputed_flops},
                         {"flops_beside", ranks.flops_beside},
                         {"guessed", guessed}};
  if (pipeline.stages.size() > 1) {
    json["stages"] = pipeline.stages_of(ranks.pipeline_rank);
    json["kept_alive"] = pipeline.kept_alive.at(static_cast<size_t>(ranks.pipeline_rank));
  }
  if (!ranks.events.empty()) json["events"] = plan::to_json(ranks.events);
  return json;
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

nlohmann::json to_json(const EffectiveBatch& batch) {
  return {{"per_rank", batch.per_rank}, {"data_ranks", batch.data_ranks}, {"accumulation", batch.accumulation}, {"global", batch.global}};
}

std::string to_string(const EffectiveBatch& batch) {
  const bool even = batch.per_rank * batch.data_ranks * batch.accumulation == batch.global;
  return fmt::format("a step: {} sequence{}, {} a rank x {} data rank{} x {} micro-batch{}{}\n", batch.global, batch.global == 1 ? "" : "s", batch.per_rank,
                     batch.data_ranks, batch.data_ranks == 1 ? "" : "s", batch.accumulation, batch.accumulation == 1 ? "" : "es",
                     even ? "" : ", some of them empty on the ranks that have fewer");
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

/// "fp32", of libtorch's "Float"; what has no name among our formats keeps its own.
std::string format_name(const std::string& dtype) {
  static const std::map<std::string, std::string> names{{"Float", "fp32"}, {"BFloat16", "bf16"},      {"Half", "fp16"}, {"Double", "fp64"},
                                                        {"Long", "int64"}, {"Float8_e4m3fn", "e4m3"}, {"Int", "int32"}, {"Byte", "uint8"}};
  const auto known = names.find(dtype);
  return known == names.end() ? dtype : known->second;
}

/// What a rank does and needs, without saying which ranks these are.
std::string text_of(const RankClass& ranks, const PipelinePlan& pipeline) {
  const std::string again = ranks.recomputed_flops > 0 ? fmt::format(", {}FLOP of them again", format_count(ranks.recomputed_flops)) : std::string();
  std::string out = fmt::format("{} micro-batch{} a step, {}FLOP of the model ({}FLOP are run{})\n", ranks.micro_batches, ranks.micro_batches == 1 ? "" : "es",
                                format_count(ranks.flops), format_count(ranks.hardware_flops), again);
  if (pipeline.stages.size() > 1) out += fmt::format("  {}\n", holding_of(pipeline, ranks.pipeline_rank));
  const bool beside = total_of(ranks.host_bytes) > 0;
  const auto row = [&](std::string_view name, int64_t device, int64_t host, std::string_view remark) {
    return fmt::format("  {:<12}{:>12}{}{}\n", name, format_bytes(device), beside ? fmt::format("{:>12}", format_bytes(host)) : "", remark);
  };
  for (int c = 0; c < num_memory_categories; ++c) out += row(to_string(static_cast<MemoryCategory>(c)), ranks.peak_bytes[c], ranks.host_bytes[c], "");
  out += row("total", total_of(ranks.peak_bytes), total_of(ranks.host_bytes), beside ? "  at the peak, and on the host" : "  at the peak");
  if (ranks.reserved_bytes > 0) out += fmt::format("  {:<12}{:>12}  by the device's allocator, for those\n", "reserved", format_bytes(ranks.reserved_bytes));
  if (ranks.disk_bytes > 0) out += fmt::format("  {:<12}{:>12}  on disk, in offload.dir\n", "files", format_bytes(ranks.disk_bytes));
  if (!ranks.collectives.empty()) {
    out += fmt::format("  {:<16}{:<24}{:>6}   {:<7}{:>12}  {:>12}\n", "collectives", "over", "calls", "format", "of tensors", "sent");
  }
  for (const CollectiveSum& c : ranks.collectives) {
    out += fmt::format("  {:<16}{:<24}{:>6} x {:<7}{:>12}  {:>12}\n", c.op, c.axis, c.count, format_name(c.dtype), format_bytes(c.bytes),
                       format_bytes(c.sent_bytes));
  }
  return out;
}

/// Whether it fits, and by how much.
std::string verdict_text(const DryRun& run) {
  const RankClass& most = largest_class(run);
  const std::string verdict = run.fits() ? "fits" : "does not fit", limit = format_bytes(run.memory_limit);
  if (most.reserved_bytes == 0) {
    return fmt::format("{} run.memory_limit_bytes = {}: {} of {} on the rank that needs most", verdict, run.memory_limit, format_bytes(needed_bytes(most)),
                       limit);
  }
  return fmt::format(
      "{}: {} of the {} {}, on the rank that needs most ({} of tensors, the rest held by its allocator)", verdict, format_bytes(needed_bytes(most)), limit,
      !run.allocator || run.allocator->all ? "that the device has beside its context" : "of run.memory_limit_bytes", format_bytes(total_of(most.peak_bytes)));
}

}  // namespace

bool DryRun::fits() const { return memory_limit == 0 || needed_bytes(largest_class(*this)) <= memory_limit; }

int64_t needed_bytes(const RankClass& ranks) { return std::max(ranks.reserved_bytes, total_of(ranks.peak_bytes)); }

std::string guesses_of(const DryRun& run) {
  std::map<std::string, GuessedOperator> most;  // of the class that runs it most often
  for (const RankClass& ranks : run.ranks) {
    for (const GuessedOperator& guess : ranks.guessed) {
      GuessedOperator& known = most[guess.name];
      if (guess.count > known.count) known = guess;
    }
  }
  if (most.empty()) return "";
  std::string names;
  for (const auto& [name, guess] : most) {
    names += fmt::format("{}{} ({} x, {}{})", names.empty() ? "" : ", ", name, guess.count, format_bytes(guess.bytes),
                         guess.has_meta_kernel ? "" : "; no meta kernel: shapes are those that a CPU's kernel makes of zeros");
  }
  const std::string share = run.time ? fmt::format("{:.2g}% of the step is a guess: ", 100 * run.time->guessed / run.time->seconds) : "";
  return share + "what these operators take is not known, and counted as the bytes that they read and write: " + names;
}

const RankClass& largest_class(const DryRun& run) { return *std::ranges::max_element(run.ranks, std::ranges::less(), needed_bytes); }

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
  auto classes = rank_classes(config, world, options.exact_ranks, options.documents);
  const MeshShape shape = mesh_shape(config.mesh, config.zero.stage, world);
  Agreement agreement(shape);
  if (deals_experts(config, shape)) {
    const ExpertGrid experts = expert_grid(config, shape);
    agreement.regroup(experts.over.names, experts.into);
  }
  DryRunOptions whole = options;
  whole.rehearse = false;
  DryRunProgress progress{.kind = 0, .kinds = static_cast<int>(classes.size())};
  std::map<StageKind, size_t> known;
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
  const Config short_run = shortened(config);
  const auto config_of = [&](int rank) { return options.told ? options.told(short_run, rank) : short_run; };
  const auto of_class = [&](int rank, const std::vector<int>& alike, const std::optional<StageKind>& kind) {
    if (share && kind) {
      for (auto [at, end] = traces.equal_range(*kind); at != end; ++at) {
        if (auto one = read_rank(short_run, world, rank, alike, run.pipeline, options, at->second); one && one->consistent) return std::move(*one);
      }
    }
    Trace trace;
    RankRun one = run_rank(config_of(rank), world, rank, alike, run.pipeline, options, progress, share && kind ? &trace : nullptr);
    if (!one.consistent) return run_rank(config_of(rank), world, rank, alike, run.pipeline, whole, progress);
    if (!trace.steps.empty()) traces.emplace(*kind, std::move(trace));
    return one;
  };
  for (auto& members : classes) {
    ++progress.kind;
    const auto kind = kinds(members.front());
    if (options.alike_stages && kind && known.contains(*kind)) {
      run.ranks.push_back(moved(run.ranks[known.at(*kind)], kinds.pipeline_rank(members.front()), run.pipeline));
      run.ranks.back().count = static_cast<int64_t>(members.size());
      run.ranks.back().examples = {members.front()};
      continue;
    }
    if (kind) known.try_emplace(*kind, run.ranks.size());
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
  return run;
}

nlohmann::json to_json(const DryRun& run) {
  nlohmann::json ranks = nlohmann::json::array();
  for (const auto& r : run.ranks) ranks.push_back(to_json(r, run.pipeline));
  nlohmann::json json = {{"world", run.world},
                         {"batch", to_json(run.batch)},
                         {"tokens_per_step", run.tokens_per_step},
                         {"parameters", run.parameters},
                         {"active_parameters", run.active_parameters},
                         {"ranks", ranks},
                         {"remarks", run.remarks}};
  if (run.memory_limit > 0) json["fits"] = run.fits();
  if (run.time) {
    json["step_s"] = run.time->seconds;
    json["tokens_per_s"] = static_cast<double>(run.tokens_per_step) / run.time->seconds;
    json["tflops_per_device"] = run.time->model_flops / 1e12;
    json["mfu"] = run.time->mfu;
    json["hfu"] = run.time->hfu;
    json["time"] = to_json(*run.time);
  }
  const bool pipelined = run.pipeline.stages.size() > 1;
  json["bubble_fraction"] = pipelined ? run.pipeline.bubble_fraction : 0;
  if (pipelined) json["pipeline"] = to_json(run.pipeline);
  return json;
}

std::string to_string(const DryRun& run) {
  const auto count = [](int64_t number) { return format_count(static_cast<double>(number)); };
  const std::string active = run.active_parameters == run.parameters ? "" : fmt::format(" ({} active for a token)", count(run.active_parameters));
  std::string out = fmt::format("{} rank{}, {} parameters{}, {} tokens a step\n", run.world, run.world == 1 ? "" : "s", count(run.parameters), active,
                                count(run.tokens_per_step));
  out += to_string(run.batch);
  for (const auto& remark : run.remarks) out += fmt::format("train would refuse this: {}\n", remark);
  if (run.memory_limit > 0) out += verdict_text(run) + "\n";
  if (run.time) out += to_string(*run.time);
  if (const std::string guesses = guesses_of(run); !guesses.empty()) out += guesses + "\n";
  out += to_string(run.pipeline);
  struct Shown {
    std::string text;
    int first;
    int64_t ranks;  ///< of all classes that read alike
  };
  std::vector<Shown> shown;
  for (const RankClass& ranks : run.ranks) {
    std::string text = text_of(ranks, run.pipeline);
    if (const auto known = std::ranges::find(shown, text, &Shown::text); known != shown.end()) {
      known->ranks += ranks.count;
    } else {
      shown.push_back({std::move(text), ranks.examples.front(), ranks.count});
    }
  }
  for (const auto& [text, first, ranks] : shown) out += fmt::format("\n{} rank{} like rank {}: {}", ranks, ranks == 1 ? "" : "s", first, text);
  return out;
}

}  // namespace tessera::plan
