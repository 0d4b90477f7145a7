// docs/choosing.md and its pictures: prose is written by hand; what stands between <!-- made: NAME --> and <!-- end --> are dry runs of one model. All of it is
// made anew by TESSERA_UPDATE_DOCS=1 tessera_plan_test --gtest_filter='Choosing*'.

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "tessera/config/config.h"
#include "tessera/core/format.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/on_host.h"
#include "tessera/plan/curves.h"
#include "tessera/plan/device.h"
#include "tessera/plan/dry_run.h"
#include "tessera/plan/presets.h"
#include "tests/made_docs.h"

namespace tessera::plan {
namespace {

using Texts = std::vector<std::string>;

struct Chosen {
  std::string label;
  int world;
  int64_t batch, micro;
  Texts sets;
};

/// Formats and threads are said, so that every machine makes the same page.
Config page_model(Texts sets) {
  sets.insert(sets.begin(), {"precision.compute=bf16", "run.threads=1"});
  Config config = preset("7b", sets)->config;
  resolve(config);
  return config;
}

/// Of a device beside its context.
int64_t memory_left() {
  const Device device = find_device("h100");
  return static_cast<int64_t>(device.memory_bytes - device.context_bytes);
}

DryRun dry_run_of(const Chosen& chosen, const Machine& machine) {
  const kernels::Bf16ProductsGuard multiplies(/*native=*/true);
  const MetaAsAccelerator device;
  Texts sets = chosen.sets;
  sets.push_back("batch.global_size=" + std::to_string(chosen.batch));
  sets.push_back("batch.micro_size=" + std::to_string(std::gcd(chosen.batch, chosen.micro)));
  const Config config = page_model(sets);
  validate(config, chosen.world, Purpose::Plan);
  return dry_run(config, chosen.world, {.machine = machine, .allocator = DeviceAllocator{.within = memory_left()}, .alike_stages = true, .exact_ranks = 0});
}

Machine page_machine() { return machine_of(find_device("h100")); }

std::string code_words(const Texts& sets) {
  std::string text;
  for (const auto& set : sets) text += (text.empty() ? "`" : "<br>`") + set + "`";
  return text;
}

std::string share_text(double part, double whole) { return whole > 0 ? fmt::format("{:.0f}%", 100 * part / whole) : "-"; }

/// Of the rank that sends most over each axis: "dp_shard 50.1 GiB". What is less than a MiB (a loss, a norm) is left out.
std::string sent_by_axis(const DryRun& run) {
  std::map<std::string, int64_t> most;
  for (const RankClass& ranks : run.ranks) {
    std::map<std::string, int64_t> sent;
    for (const CollectiveSum& sum : ranks.collectives) sent[sum.axis.substr(0, sum.axis.find('.'))] += sum.sent_bytes;
    for (const auto& [axis, bytes] : sent) most[axis] = std::max(most[axis], bytes);
  }
  std::string text;
  for (const auto& [axis, bytes] : most) {
    if (bytes >= 1 << 20) text += fmt::format("{}{} {}", text.empty() ? "" : "<br>", axis, format_bytes(bytes));
  }
  return text.empty() ? "nothing" : text;
}

/// Inside a node, and between nodes.
std::array<int64_t, 2> sent_by_link(const DryRun& run) {
  std::array<int64_t, 2> most{};
  for (const RankClass& ranks : run.ranks) {
    std::array<int64_t, 2> sent{};
    for (const CollectiveSum& sum : ranks.collectives) sent[ranks.places.at(sum.axis).hosts > 1 ? 1 : 0] += sum.sent_bytes;
    for (size_t link = 0; link < most.size(); ++link) most[link] = std::max(most[link], sent[link]);
  }
  return most;
}

int64_t category_bytes(const RankClass& ranks, MemoryCategory category) { return ranks.peak_bytes[static_cast<size_t>(category)]; }

int64_t states_of(const RankClass& ranks) {
  return category_bytes(ranks, MemoryCategory::Parameters) + category_bytes(ranks, MemoryCategory::Gradients) +
         category_bytes(ranks, MemoryCategory::Optimizer);
}

int64_t peak_of(const DryRun& run) { return needed_bytes(largest_class(run)); }

bool held_by_80_gb(const DryRun& run) { return peak_of(run) <= memory_left(); }

double hidden_share(const DryRun& run) {
  double all = 0, exposed = 0;
  for (const RankClass& ranks : run.ranks) all += ranks.time.collectives, exposed += ranks.time.exposed;
  return all > 0 ? 1 - std::min(1.0, exposed / all) : 1;
}

// ---- the techniques

const std::vector<Chosen>& techniques() {
  static const std::vector<Chosen> columns{
      {"DDP", 8, 64, 1, {"zero.stage=0"}},
      {"FSDP", 8, 64, 1, {"zero.stage=3"}},
      {"TP", 8, 64, 8, {"mesh.tp=8", "tensor.sequence_parallel=true"}},
      {"2D", 8, 64, 2, {"mesh.tp=2", "tensor.sequence_parallel=true", "zero.stage=3"}},
      {"PP", 8, 64, 1, {"mesh.pp=8"}},
      {"CP", 8, 64, 8, {"mesh.cp=8", "zero.stage=3"}},
      {"EP", 8, 64, 1, {"mesh.ep=8", "zero.stage=3"}},
  };
  return columns;
}

/// Eight experts of half the width, of which a token meets two: the FLOPs of the model without.
Chosen with_experts(Chosen chosen) {
  if (chosen.label == "EP") {
    for (const auto* set : {"model.family=mixtral", "model.experts=8", "model.experts_per_token=2", "model.ffn_dim=5504"}) chosen.sets.emplace_back(set);
  }
  return chosen;
}

std::string techniques_table() {
  const Machine node = page_machine();
  Machine apart = node;
  apart.devices_per_host = 1;
  std::vector<DryRun> runs, runs_apart, of_one, of_eight;
  for (const Chosen& technique : techniques()) {
    Chosen chosen = with_experts(technique);
    runs.push_back(dry_run_of(chosen, node));
    runs_apart.push_back(dry_run_of(chosen, apart));
    chosen.batch = 8;
    of_eight.push_back(dry_run_of(chosen, node));
    chosen.batch = 1;
    of_one.push_back(dry_run_of(chosen, node));
  }
  std::string out = "|";
  for (const Chosen& technique : techniques()) out += " | " + technique.label;
  out += " |\n|---";
  for (size_t i = 0; i < techniques().size(); ++i) out += "|---";
  out += "|\n";
  const auto row = [&](const std::string& name, const std::function<std::string(size_t)>& cell) {
    out += "| " + name;
    for (size_t i = 0; i < techniques().size(); ++i) out += " | " + cell(i);
    out += " |\n";
  };
  const auto seconds = [](const DryRun& run) { return format_duration(run.time->seconds); };
  row("configuration", [&](size_t i) { return code_words(techniques()[i].sets); });
  row("sequences of a forward pass", [&](size_t i) { return std::to_string(techniques()[i].micro); });
  row("one device holds at its peak", [&](size_t i) { return format_bytes(peak_of(runs[i])); });
  row("of it parameters, gradients, moments", [&](size_t i) { return format_bytes(states_of(largest_class(runs[i]))); });
  row("of it activations", [&](size_t i) { return format_bytes(category_bytes(largest_class(runs[i]), MemoryCategory::Activations)); });
  row("fits 80 GB", [&](size_t i) { return std::string(held_by_80_gb(runs[i]) ? "yes" : "**no**"); });
  row("a device sends in a step, over", [&](size_t i) { return sent_by_axis(runs[i]); });
  row("of the collectives' time hidden",
      [&](size_t i) { return runs[i].pipeline.stages.size() > 1 ? std::string("-") : share_text(hidden_share(runs[i]), 1); });
  row("a step", [&](size_t i) { return seconds(runs[i]); });
  row("of it waiting for collectives", [&](size_t i) { return share_text(runs[i].time->exposed, runs[i].time->seconds); });
  row("of it waiting for other stages", [&](size_t i) { return share_text(runs[i].time->bubble, runs[i].time->seconds); });
  row("a step, were each device a node", [&](size_t i) { return seconds(runs_apart[i]); });
  row("a step of 8 sequences", [&](size_t i) { return seconds(of_eight[i]); });
  row("a step of 1 sequence", [&](size_t i) { return seconds(of_one[i]); });
  return out;
}

// ---- the layouts

const std::vector<std::vector<Chosen>>& layouts_by_world() {
  static const std::vector<std::vector<Chosen>> groups{
      {{"FSDP 8", 8, 64, 1, {"zero.stage=3"}}, {"TP 8 + SP", 8, 64, 8, {"mesh.tp=8", "tensor.sequence_parallel=true"}}, {"PP 8", 8, 64, 1, {"mesh.pp=8"}}},
      {{"FSDP over all 64", 64, 512, 1, {"zero.stage=3"}},
       {"FSDP 8 in a node x DP 8", 64, 512, 1, {"zero.stage=3", "mesh.dp_shard=8", "mesh.dp_replicate=8"}},
       {"DP 8 x PP 8", 64, 512, 1, {"mesh.pp=8", "zero.stage=1"}},
       {"DP 8 x TP 8", 64, 512, 8, {"mesh.tp=8", "zero.stage=1"}},
       {"FSDP 8 x TP 8 + SP", 64, 512, 8, {"mesh.tp=8", "zero.stage=3", "tensor.sequence_parallel=true"}}},
      {{"FSDP over all 1,024", 1024, 1024, 1, {"zero.stage=3"}},
       {"FSDP 8 in a node x DP 128", 1024, 1024, 1, {"zero.stage=3", "mesh.dp_shard=8", "mesh.dp_replicate=128"}},
       {"DP 16 x PP 8 x TP 8", 1024, 1024, 2, {"mesh.tp=8", "mesh.pp=8", "zero.stage=1"}},
       {"the same, with SP", 1024, 1024, 2, {"mesh.tp=8", "mesh.pp=8", "zero.stage=1", "tensor.sequence_parallel=true"}},
       {"FSDP 128 x TP 8 + SP", 1024, 1024, 8, {"mesh.tp=8", "zero.stage=3", "tensor.sequence_parallel=true"}},
       {"FSDP 512 x TP 2 + SP", 1024, 1024, 2, {"mesh.tp=2", "zero.stage=3", "tensor.sequence_parallel=true"}}},
  };
  return groups;
}

/// What it loses its time to, beside the fastest that fits.
std::string why_not(const DryRun& run, const DryRun& best) {
  if (!held_by_80_gb(run)) return "does not fit";
  if (&run == &best) return "**the fastest that fits**";
  const auto more = [&](double StepTime::* part) { return (*run.time).*part - (*best.time).*part; };
  const std::vector<std::pair<double, std::string>> parts{{more(&StepTime::computing), "more computing"},
                                                          {more(&StepTime::exposed), "more waiting for collectives"},
                                                          {more(&StepTime::bubble), "more waiting for other stages"},
                                                          {more(&StepTime::asked), "more waiting for the host"}};
  const auto& most = std::ranges::max_element(parts)->second;
  return fmt::format("{:.0f}% slower: {}", 100 * (run.time->seconds / best.time->seconds - 1), most);
}

/// Sequences of a pass, of those that deal the step evenly, with which the layout is fastest and fits; the smallest where none fits.
std::pair<DryRun, int64_t> in_its_best_micro_batch(Chosen chosen, const Machine& machine) {
  std::optional<std::pair<DryRun, int64_t>> best;
  for (const int64_t micro : {1, 2, 4, 8}) {
    chosen.micro = micro;
    DryRun run = dry_run_of(chosen, machine);
    if (run.batch.per_rank * run.batch.data_ranks * run.batch.accumulation != chosen.batch) break;
    if (!best || (held_by_80_gb(run) && run.time->seconds < best->first.time->seconds)) best.emplace(std::move(run), micro);
  }
  return *std::move(best);
}

std::string layouts_table(const std::vector<Chosen>& group) {
  const Machine node = page_machine();
  std::vector<DryRun> runs;
  const DryRun* best = nullptr;
  std::vector<int64_t> micro_sizes;
  for (const Chosen& chosen : group) {
    auto [run, micro] = in_its_best_micro_batch(chosen, node);
    runs.push_back(std::move(run));
    micro_sizes.push_back(micro);
  }
  for (const DryRun& run : runs) {
    if (held_by_80_gb(run) && (best == nullptr || run.time->seconds < best->time->seconds)) best = &run;
  }
  std::string out = fmt::format("{} devices, {} sequences a step:\n\n", group.front().world, group.front().batch) +
                    "| layout | configuration | micro-batch | a device holds | sends in a node | between nodes | a step | choice |\n"
                    "|---|---|---:|---:|---:|---:|---:|---|\n";
  for (size_t i = 0; i < group.size(); ++i) {
    const auto sent = sent_by_link(runs[i]);
    out += fmt::format("| {} | {} | {} | {} | {} | {} | {} | {} |\n", group[i].label, code_words(group[i].sets), micro_sizes[i], format_bytes(peak_of(runs[i])),
                       format_bytes(sent[0]), format_bytes(sent[1]), format_duration(runs[i].time->seconds), best ? why_not(runs[i], *best) : "does not fit");
  }
  return out;
}

// ---- the page

/// The page with what stands between the marks of `name` made anew.
std::string with_block(const std::string& page, const std::string& name, const std::string& made) {
  const std::string begins = "<!-- made: " + name + " -->\n", ends = "<!-- end -->";
  const auto begin = page.find(begins);
  const auto end = page.find(ends, begin);
  if (begin == std::string::npos || end == std::string::npos) {
    ADD_FAILURE() << "docs/choosing.md has no place for " << name;
    return page;
  }
  return page.substr(0, begin + begins.size()) + made + page.substr(end);
}

void expect_block(const std::string& name, const std::string& made) {
  testing_support::expect_in_docs("choosing.md", with_block(testing_support::text_of_docs("choosing.md"), name, made));
}

TEST(Choosing, TechniquesAreDryRuns) { expect_block("techniques", techniques_table()); }

TEST(Choosing, LayoutsAreDryRuns) {
  std::string tables;
  for (const auto& group : layouts_by_world()) tables += (tables.empty() ? "" : "\n") + layouts_table(group);
  expect_block("layouts", tables);
}

TEST(Choosing, PicturesAreDryRuns) {
  const kernels::Bf16ProductsGuard multiplies(/*native=*/true);
  const MetaAsAccelerator device;
  for (const auto& [name, world] : {std::pair("memory", 512), std::pair("latency", 8), std::pair("batch", 8), std::pair("traffic", 8)}) {
    Config config = page_model({});
    config.run.memory_limit_bytes = 80'000'000'000;
    const Curves curves = make_curves(config, name, {.world = world, .machine = page_machine()});
    testing_support::expect_picture_in_docs(std::string("curve-") + name + ".svg", svg_of(curves), "choosing.md");
  }
}

TEST(Choosing, EveryCardLeadsToAPage) {
  const std::string page = testing_support::text_of_docs("choosing.md");
  for (const std::string to :
       {"sharding.md", "tensor-parallel.md", "2d.md", "pipeline.md", "long-context.md", "moe.md", "recompute.md", "memory.md", "plan.md"}) {
    EXPECT_NE(page.find("](" + to), std::string::npos) << to;
    EXPECT_FALSE(testing_support::text_of_docs(to).empty()) << to;
  }
}

}  // namespace
}  // namespace tessera::plan
