#include "tessera/plan/dry_run.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>
#include <tuple>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/data/loader.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/flops.h"
#include "tessera/nn/operators.h"
#include "tessera/plan/agreement.h"
#include "tessera/plan/rank_classes.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/memory_watch.h"
#include "tessera/train/stepper.h"

// Nothing here knows what a step does: it is that of train, on meta, over groups that take down what they are asked for. What remains is to run as few ranks as
// show all there is, one of each class that does the same, to add up what was counted, and to compare what the classes ask of each other.

namespace tessera::plan {

namespace {

constexpr int kDrySteps = 3;

std::vector<CollectiveSum> sum_up(const std::vector<comm::Record>& records) {
  std::vector<CollectiveSum> sums;
  std::map<std::tuple<std::string, std::string, std::string>, size_t> index;
  for (const auto& record : records) {
    const std::string dtype = c10::toString(record.dtype);
    const auto [at, fresh] = index.try_emplace({record.op, record.group, dtype}, sums.size());
    if (fresh) sums.push_back({.op = record.op, .axis = record.group, .dtype = dtype});
    auto& sum = sums[at->second];
    ++sum.count;
    sum.bytes += record.bytes;
    sum.sent_bytes += record.sent_bytes;
  }
  return sums;
}

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
  ProgressHooks(const DryRunOptions& options, DryRunProgress& progress, const nn::FlopCounter& counter, double expected_flops)
      : options_(options), progress_(progress), counter_(counter), expected_flops_(expected_flops) {}

  void call(nn::OperatorCall& operation) override {
    constexpr int64_t rarely = 64;
    if (++calls_ % rarely == 0) {
      progress_.share = std::min(1.0, counter_.flops() / std::max(1.0, expected_flops_));
      options_.progress(progress_);
    }
    operation.run();
  }

 private:
  const DryRunOptions& options_;
  DryRunProgress& progress_;
  const nn::FlopCounter& counter_;
  double expected_flops_;
  int64_t calls_ = 0;
};

struct RankRun {
  RankClass ranks;
  std::vector<comm::Record> records;  ///< of the last step
};

/// As `pipeline` deals the model's FLOPs to the stages.
RankRun run_rank(const Config& config, int world_size, int rank, const PipelinePlan& pipeline, const DryRunOptions& options, DryRunProgress progress) {
  auto recorder = std::make_shared<comm::Recorder>();
  auto world = comm::World::dry(world_size, rank, recorder, comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  MemoryTracker memory;
  memory.keep_details(options.largest);
  RankScope scope(config, 1, memory);
  Stepper stepper(config, mesh, at::kMeta, scope);
  std::optional<MemoryWatch> watch;
  if (options.largest) watch.emplace(memory, stepper.run());
  const data::LoaderOptions loader = loader_options(config, mesh);
  RankRun run;
  RankClass& result = run.ranks;
  result.examples = {rank};
  result.pipeline_rank = mesh.rank(mesh_roles(config).stages);
  progress.steps = kDrySteps;
  int64_t peak = -1;
  for (int step = 1; step <= kDrySteps; ++step) {
    recorder->clear();
    scope.memory().reset_peak();
    const auto batch = data::dry_batch(loader, step, at::kMeta);
    const auto counter = std::make_shared<nn::FlopCounter>();
    const auto tokens = std::accumulate(batch.micro_batches.begin(), batch.micro_batches.end(), int64_t{0},
                                        [](int64_t sum, const data::MicroBatch& micro) { return sum + micro.valid_tokens; });
    result.flops = model_flops_per_token(config.model, config.data.seq_len) * static_cast<double>(tokens) / mesh.size(mesh_roles(config).layers) *
                   pipeline.model_share_of(result.pipeline_rank);
    progress.step = step;
    {
      std::optional<nn::OperatorScope> told;
      if (options.progress) told.emplace(std::make_shared<ProgressHooks>(options, progress, *counter, step == 1 ? result.flops : result.hardware_flops));
      const nn::OperatorScope counted(counter);
      stepper.step(batch);
    }
    result.hardware_flops = counter->flops();
    result.recomputed_flops = counter->recomputed_flops();
    result.micro_batches = static_cast<int64_t>(batch.micro_batches.size());
    const MemoryByCategory host = scope.memory().host_peak_by_category();
    if (total_of(host) > total_of(result.host_bytes)) result.host_bytes = host;
    if (scope.memory().peak() <= peak) continue;
    peak = scope.memory().peak();
    result.peak_bytes = scope.memory().peak_by_category();
    result.largest = memory.largest_at_peak();
  }
  run.records = recorder->records();
  result.collectives = sum_up(run.records);
  for (const auto& p : stepper.run().parameters) result.parameters += p.tensor.numel();
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

nlohmann::json to_json(const RankClass& ranks, const PipelinePlan& pipeline) {
  nlohmann::json collectives = nlohmann::json::array();
  for (const auto& c : ranks.collectives) collectives.push_back(to_json(c));
  nlohmann::json json = {{"count", ranks.count},
                         {"examples", ranks.examples},
                         {"micro_batches", ranks.micro_batches},
                         {"parameters", ranks.parameters},
                         {"peak_bytes", to_json(ranks.peak_bytes)},
                         {"host_bytes", to_json(ranks.host_bytes)},
                         {"collectives", collectives},
                         {"flops", ranks.flops},
                         {"hardware_flops", ranks.hardware_flops},
                         {"recomputed_flops", ranks.recomputed_flops}};
  if (pipeline.stages.size() > 1) {
    json["stages"] = pipeline.stages_of(ranks.pipeline_rank);
    json["kept_alive"] = pipeline.kept_alive.at(static_cast<size_t>(ranks.pipeline_rank));
  }
  return json;
}

}  // namespace

bool DryRun::fits() const { return memory_limit == 0 || total_of(largest_class(*this).peak_bytes) <= memory_limit; }

const RankClass& largest_class(const DryRun& run) {
  return *std::max_element(run.ranks.begin(), run.ranks.end(),
                           [](const RankClass& a, const RankClass& b) { return total_of(a.peak_bytes) < total_of(b.peak_bytes); });
}

DryRun dry_run(const Config& asked, int world, const DryRunOptions& options) {
  Config config = asked;
  precision::settle_compute(config, at::kMeta, precision::Saying::Silent);
  DryRun run;
  run.world = world;
  run.memory_limit = config.run.memory_limit_bytes;
  run.tokens_per_step = config.batch.global_size * config.data.seq_len;
  run.parameters = num_parameters(config.model);
  run.active_parameters = num_active_parameters(config.model);
  run.pipeline = plan_pipeline(config, world);
  auto classes = rank_classes(config, world);
  const MeshShape shape = mesh_shape(config.mesh, config.zero.stage, world);
  Agreement agreement(shape);
  if (deals_experts(config, shape)) {
    const ExpertGrid experts = expert_grid(config, shape);
    agreement.regroup(experts.over.names, experts.into);
  }
  DryRunProgress progress{.kind = 0, .kinds = static_cast<int>(classes.size())};
  for (auto& members : classes) {
    ++progress.kind;
    auto [ranks, records] = run_rank(shortened(config), world, members.front(), run.pipeline, options, progress);
    agreement.add(members, records);
    ranks.count = static_cast<int64_t>(members.size());
    members.resize(std::min<size_t>(members.size(), 8));
    ranks.examples = std::move(members);
    run.ranks.push_back(std::move(ranks));
  }
  const std::string problem = agreement.first_disagreement();
  invariant(problem.empty(), "ranks of this layout would wait for each other in vain: ", problem);
  try {
    validate(config, world, Purpose::Train);
  } catch (const ConfigError& e) {
    run.remarks.emplace_back(e.what());
  }
  return run;
}

nlohmann::json to_json(const DryRun& run) {
  nlohmann::json ranks = nlohmann::json::array();
  for (const auto& r : run.ranks) ranks.push_back(to_json(r, run.pipeline));
  nlohmann::json json = {{"world", run.world},
                         {"tokens_per_step", run.tokens_per_step},
                         {"parameters", run.parameters},
                         {"active_parameters", run.active_parameters},
                         {"ranks", ranks},
                         {"remarks", run.remarks}};
  if (run.memory_limit > 0) json["fits"] = run.fits();
  if (run.pipeline.stages.size() > 1) {
    json["bubble_fraction"] = run.pipeline.bubble_fraction;
    json["pipeline"] = to_json(run.pipeline);
  }
  return json;
}

std::string to_string(const DryRun& run) {
  const auto count = [](int64_t number) { return format_count(static_cast<double>(number)); };
  const std::string active = run.active_parameters == run.parameters ? "" : fmt::format(" ({} active for a token)", count(run.active_parameters));
  std::string out = fmt::format("{} rank{}, {} parameters{}, {} tokens a step\n", run.world, run.world == 1 ? "" : "s", count(run.parameters), active,
                                count(run.tokens_per_step));
  for (const auto& remark : run.remarks) out += fmt::format("train would refuse this: {}\n", remark);
  if (run.memory_limit > 0) out += fmt::format("{} run.memory_limit_bytes = {}\n", run.fits() ? "fits" : "does not fit", run.memory_limit);
  out += to_string(run.pipeline);
  for (const auto& ranks : run.ranks) {
    const std::string again = ranks.recomputed_flops > 0 ? fmt::format(" ({}FLOP of them again)", format_count(ranks.recomputed_flops)) : std::string();
    out += fmt::format("\n{} rank{} like rank {}: {} micro-batch{}, {}FLOP a step, {}FLOP run{}\n", ranks.count, ranks.count == 1 ? "" : "s",
                       ranks.examples.front(), ranks.micro_batches, ranks.micro_batches == 1 ? "" : "es", format_count(ranks.flops),
                       format_count(ranks.hardware_flops), again);
    if (run.pipeline.stages.size() > 1) out += fmt::format("  {}\n", holding_of(run.pipeline, ranks.pipeline_rank));
    const bool beside = total_of(ranks.host_bytes) > 0;
    const auto row = [&](std::string_view name, int64_t device, int64_t host, std::string_view remark) {
      return fmt::format("  {:<12}{:>12}{}{}\n", name, format_bytes(device), beside ? fmt::format("{:>12}", format_bytes(host)) : "", remark);
    };
    for (int c = 0; c < num_memory_categories; ++c) {
      out += row(to_string(static_cast<MemoryCategory>(c)), ranks.peak_bytes[c], ranks.host_bytes[c], "");
    }
    out += row("total", total_of(ranks.peak_bytes), total_of(ranks.host_bytes), beside ? "  at the peak, and on the host" : "  at the peak");
    for (const auto& c : ranks.collectives)
      out +=
          fmt::format("  {:<16}{:<24}{:>6} x {:<10}{:>12}  {:>12} sent\n", c.op, c.axis, c.count, c.dtype, format_bytes(c.bytes), format_bytes(c.sent_bytes));
  }
  return out;
}

}  // namespace tessera::plan
