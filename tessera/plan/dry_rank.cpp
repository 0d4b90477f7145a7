#include "tessera/plan/dry_rank.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <unordered_map>
#include <utility>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/data/loader.h"
#include "tessera/layout/slice.h"
#include "tessera/memory/memory_events.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/positions.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/flops.h"
#include "tessera/nn/dry_documents.h"
#include "tessera/nn/record_events.h"
#include "tessera/plan/alike_stages.h"
#include "tessera/plan/caching_allocator.h"
#include "tessera/plan/cpu_memory.h"
#include "tessera/plan/dry_routing.h"
#include "tessera/plan/operator_time.h"
#include "tessera/plan/rehearsal.h"
#include "tessera/plan/stand_ins.h"
#include "tessera/plan/step_history.h"
#include "tessera/train/memory_watch.h"
#include "tessera/train/stepper.h"

// A step is taken down as a list of events, in which all that is asked of it is found: memory by category, collectives, FLOPs, time on a machine. Ranks that do
// the same at other places of a pipeline are read from one rank's list.

namespace tessera::plan {

namespace {

constexpr int kDrySteps = 3;

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
  const std::vector<std::string> axes = axes_in(group);
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

}  // namespace

RankRun run_rank(const DryPlan& dry, int rank, const std::vector<int>& alike, const DryRunOptions& options, DryRunProgress progress, Trace* trace) {
  const auto& [config, world_size, pipeline] = dry;
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
  const nn::DryDocuments documents(loader.packed ? data::dry_documents(loader) : std::vector<int64_t>(), options.documents_apart);
  const experts::DryRoutingScope routing(dry_routing(config, options.routed, mesh, loader));
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

std::optional<RankRun> read_rank(const DryPlan& dry, int rank, const std::vector<int>& alike, const DryRunOptions& options, const Trace& trace) {
  const auto& [config, world_size, pipeline] = dry;
  auto world = comm::World::dry(world_size, rank, std::make_shared<comm::Recorder>(), comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  const Axes stages = mesh_roles(config).stages;
  const int stage = mesh.rank(stages);
  const auto rehearsal = rehearsal_by(renamed_legs(trace.legs, pipeline.stages_of(trace.stage), pipeline.stages_of(stage)),
                                      schedule_maker(config, mesh.size(stages)), static_cast<int>(trace.ranks.micro_batches), stage, trace.channels,
                                      /*neighbours=*/config.zero.stage >= 2);
  if (!rehearsal) return std::nullopt;
  StepsReader reader(config, mesh, alike, pipeline, options, &*rehearsal, trace.channels, trace.ranks, trace.beginning);
  for (const DryStep& step : trace.steps) reader.read(step, &step == &trace.steps.back());
  RankRun run = std::move(reader).take();
  name_stand_ins(run.ranks, trace.stood_in);
  if (!readdress(run.events, rehearsal->whole, stage, static_cast<int>(pipeline.stages.size()), trace.channels)) return std::nullopt;
  return run;
}

}  // namespace tessera::plan
