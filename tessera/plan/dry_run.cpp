#include "tessera/plan/dry_run.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/data/loader.h"
#include "tessera/data_parallel/tree_schedule.h"
#include "tessera/layout/slice.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/flops.h"
#include "tessera/train/stepper.h"

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
  auto& start = config.comm.powersgd_start;
  if (start < config.run.steps) start = std::min<int64_t>(start, 1);
  return config;
}

RankClass run_rank(const Config& config, int world_size, int rank) {
  auto recorder = std::make_shared<comm::Recorder>();
  auto world = comm::World::dry(world_size, rank, recorder, comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  RankScope scope(config, 1);
  Stepper stepper(config, mesh, at::kMeta, scope);
  const data::LoaderOptions loader = loader_options(config, mesh);
  RankClass result;
  result.examples = {rank};
  int64_t peak = -1;
  for (int step = 1; step <= kDrySteps; ++step) {
    recorder->clear();
    scope.memory().reset_peak();
    const auto batch = data::dry_batch(loader, step, at::kMeta);
    stepper.step(batch);
    result.micro_batches = static_cast<int64_t>(batch.micro_batches.size());
    if (scope.memory().peak() <= peak) continue;
    peak = scope.memory().peak();
    result.peak_bytes = scope.memory().peak_by_category();
  }
  result.collectives = sum_up(recorder->records());
  for (const auto& p : stepper.run().parameters) result.parameters += p.tensor.numel();
  result.flops =
      model_flops_per_token(config.model, config.data.seq_len) * static_cast<double>(result.micro_batches * config.batch.micro_size * config.data.seq_len);
  return result;
}

// What a rank does in the deterministic tree, peers left out: the levels it keeps, and in which order it adds, sends and receives.
std::vector<int64_t> tree_role(const TreeSchedule& schedule, int rank) {
  std::vector<int64_t> role;
  for (const auto& node : schedule.kept[static_cast<size_t>(rank)]) role.push_back(node.level);
  for (const auto& merge : schedule.merges)
    if (merge.owner == rank || merge.right_owner == rank) role.push_back(merge.owner == merge.right_owner ? -1 : merge.owner == rank ? -2 : -3);
  role.push_back(schedule.root_owner == rank ? -4 : -5);
  return role;
}

// Ranks differ in what they do only where they hold another number of micro-batches, or another role in the deterministic tree.
std::vector<std::vector<int>> rank_classes(const Config& config, int world_size) {
  auto recorder = std::make_shared<comm::Recorder>();
  const auto world = comm::World::dry(world_size, 0, recorder, comm::world_options(config.comm));
  const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, world_size));
  const int data_ranks = mesh.size(data_axes());
  const int64_t micro_batches = config.batch.global_size / config.batch.micro_size;
  const TreeSchedule schedule = config.run.deterministic ? make_tree_schedule(micro_batches, data_ranks) : TreeSchedule{};
  std::map<std::vector<int64_t>, std::vector<int>> classes;
  for (int rank = 0; rank < world_size; ++rank) {
    std::vector<int64_t> key{chunk(micro_batches, data_ranks, rank).second};
    if (config.run.deterministic) {
      const auto role = tree_role(schedule, rank);
      key.insert(key.end(), role.begin(), role.end());
    }
    classes[key].push_back(rank);
  }
  std::vector<std::vector<int>> result;
  for (auto& [key, ranks] : classes) result.push_back(std::move(ranks));
  std::sort(result.begin(), result.end());
  return result;
}

nlohmann::json to_json(const CollectiveSum& sum) {
  return {{"op", sum.op}, {"axis", sum.axis}, {"dtype", sum.dtype}, {"count", sum.count}, {"bytes", sum.bytes}, {"sent_bytes", sum.sent_bytes}};
}

nlohmann::json to_json(const RankClass& ranks) {
  nlohmann::json peak;
  int64_t total = 0;
  for (int c = 0; c < num_memory_categories; ++c) {
    peak[std::string(to_string(static_cast<MemoryCategory>(c)))] = ranks.peak_bytes[c];
    total += ranks.peak_bytes[c];
  }
  peak["total"] = total;
  nlohmann::json collectives = nlohmann::json::array();
  for (const auto& c : ranks.collectives) collectives.push_back(to_json(c));
  return {{"count", ranks.count},
          {"examples", ranks.examples},
          {"micro_batches", ranks.micro_batches},
          {"parameters", ranks.parameters},
          {"peak_bytes", peak},
          {"collectives", collectives},
          {"flops", ranks.flops}};
}

}  // namespace

DryRun dry_run(const Config& config, int world) {
  DryRun run;
  run.world = world;
  run.tokens_per_step = config.batch.global_size * config.data.seq_len;
  for (auto& members : rank_classes(config, world)) {
    RankClass ranks = run_rank(shortened(config), world, members.front());
    ranks.count = static_cast<int64_t>(members.size());
    members.resize(std::min<size_t>(members.size(), 8));
    ranks.examples = std::move(members);
    run.parameters = std::max(run.parameters, ranks.parameters);
    run.ranks.push_back(std::move(ranks));
  }
  try {
    validate(config, world, Purpose::Train);
  } catch (const ConfigError& e) {
    run.remarks.emplace_back(e.what());
  }
  return run;
}

nlohmann::json to_json(const DryRun& run) {
  nlohmann::json ranks = nlohmann::json::array();
  for (const auto& r : run.ranks) ranks.push_back(to_json(r));
  return {{"world", run.world}, {"tokens_per_step", run.tokens_per_step}, {"parameters", run.parameters}, {"ranks", ranks}, {"remarks", run.remarks}};
}

std::string to_string(const DryRun& run) {
  std::string out = fmt::format("{} rank{}, {} parameters, {} tokens a step\n", run.world, run.world == 1 ? "" : "s",
                                format_count(static_cast<double>(run.parameters)), format_count(static_cast<double>(run.tokens_per_step)));
  for (const auto& remark : run.remarks) out += fmt::format("train would refuse this: {}\n", remark);
  for (const auto& ranks : run.ranks) {
    out += fmt::format("\n{} rank{} like rank {}: {} micro-batches, {}FLOP a step\n", ranks.count, ranks.count == 1 ? "" : "s", ranks.examples.front(),
                       ranks.micro_batches, format_count(ranks.flops));
    int64_t total = 0;
    for (int c = 0; c < num_memory_categories; ++c) {
      total += ranks.peak_bytes[c];
      out += fmt::format("  {:<12}{:>12}\n", to_string(static_cast<MemoryCategory>(c)), format_bytes(ranks.peak_bytes[c]));
    }
    out += fmt::format("  {:<12}{:>12}  at the peak\n", "total", format_bytes(total));
    for (const auto& c : ranks.collectives)
      out +=
          fmt::format("  {:<16}{:<24}{:>6} x {:<10}{:>12}  {:>12} sent\n", c.op, c.axis, c.count, c.dtype, format_bytes(c.bytes), format_bytes(c.sent_bytes));
  }
  return out;
}

}  // namespace tessera::plan
