#include <algorithm>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/bench/frame.h"
#include "cli/bench/pipeline.h"
#include "cli/common.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/world.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/registry.h"
#include "tessera/train/pipeline_layout.h"

namespace tessera::cli {
namespace {

using bench::PipelineCase;
using bench::PipelineRow;

constexpr int64_t kHeadDim = 64, kOverheadMicroBatches = 8, kBoundaryMicroBatches = 4, kMostHidden = 32768, kMostSequences = 1 << 16;

int64_t heads_of(int64_t hidden) { return std::max<int64_t>(1, hidden / kHeadDim); }

/// What to measure, after every check that needs no process.
struct PipelinePlan {
  PipelineCase overhead;
  std::vector<PipelineCase> schedules, curve, boundary;
};

/// Chunks on each rank: of schedules that take any number, one; interleaved ones are not themselves with less than two.
int chunks_of(const std::string& name) {
  for (const auto& known : schedules::known_schedules()) {
    if (known.name == name) return known.chunks > 0 ? known.chunks : name == "naive" ? 1 : 2;
  }
  return 1;
}

/// Refuses what the schedule does not take, and what this build cannot train with.
void check_case(const PipelineCase& what) {
  const Config config = bench::config_of(what);
  require(!updates_within_steps(config, what.ranks), "--schedule = ", what.schedule,
          ": updates weights in the middle of a step, and steps are measured without ", "updates; leave it out");
  schedule_maker(config, what.ranks)(static_cast<int>(what.micro_batches));
}

PipelinePlan plan_of(const BenchPpFlags& flags, int ranks) {
  require(flags.tokens >= 1 && flags.tokens <= kMostSequences, "--tokens = ", flags.tokens, ": 1 at least, and at most ", kMostSequences);
  require(flags.global_size >= 1 && flags.global_size <= kMostSequences, "--global-size = ", flags.global_size, ": 1 at least, and at most ", kMostSequences);
  const auto check_hidden = [](const char* knob, int64_t hidden) {
    require(hidden > 0 && hidden % kHeadDim == 0 && hidden <= kMostHidden, knob, " = ", hidden, ": must be a multiple of ", kHeadDim,
            ", the features of a head, and at most ", kMostHidden);
  };
  check_hidden("--dim", flags.dim);
  const PipelineCase step{.hidden = flags.dim,
                          .heads = heads_of(flags.dim),
                          .layers = flags.layers,
                          .tokens = flags.tokens,
                          .global_size = flags.global_size,
                          .micro_batches = kOverheadMicroBatches,
                          .ranks = ranks};
  PipelinePlan plan{.overhead = step};
  plan.overhead.ranks = 1;
  plan.overhead.schedule = "1f1b";
  const auto divides = [&](const char* knob, int64_t m) {
    require(m >= 1 && flags.global_size % m == 0, knob, " = ", m, ": must divide --global-size = ", flags.global_size, ", so that all micro-batches are alike");
  };
  require(flags.global_size % kOverheadMicroBatches == 0, "--global-size = ", flags.global_size, ": must be a multiple of ", kOverheadMicroBatches,
          ", the micro-batches of each schedule");
  for (const auto& name : flags.schedules) {
    require_known("--schedule", name, schedules::schedule_names());
    PipelineCase& what = plan.schedules.emplace_back(step);
    what.schedule = name;
    what.chunks = chunks_of(name);
    const int64_t most = int64_t{ranks} * what.chunks;
    require(flags.layers + 2 >= most, "--layers = ", flags.layers, ": ", name, " cuts a model into ", most, " stages; give ", most - 2, " at least");
    check_case(what);
  }
  for (const int64_t m : flags.micro_batches) {
    divides("--micro-batches", m);
    PipelineCase& what = plan.curve.emplace_back(step);
    what.schedule = "gpipe";
    what.micro_batches = m;
  }
  std::ranges::sort(plan.curve, {}, &PipelineCase::micro_batches);
  for (const int64_t hidden : flags.hidden) {
    check_hidden("--hidden", hidden);
    plan.boundary.push_back({.hidden = hidden,
                             .heads = heads_of(hidden),
                             .layers = ranks,
                             .tokens = flags.tokens,
                             .global_size = kBoundaryMicroBatches,
                             .micro_batches = kBoundaryMicroBatches,
                             .ranks = ranks});
  }
  std::ranges::sort(plan.boundary, {}, &PipelineCase::hidden);
  return plan;
}

std::vector<PipelineRow> measure_pipelines(const BenchPpFlags& flags, PipelinePlan plan) {
  const at::Device device = device_for(flags.device, static_cast<int>(bench_ranks(flags.nproc)), "--device");
  plan.overhead.device = device;
  for (auto* cases : {&plan.schedules, &plan.curve, &plan.boundary}) {
    for (auto& what : *cases) what.device = device;
  }
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto world =
      comm::World::from_environment({.backend = flags.backend, .interface = flags.interface, .device = device, .decorators = {comm::recording(recorder)}});
  const bench::Limits limits{.seconds = flags.seconds, .iterations = flags.iterations};
  std::vector<PipelineRow> rows;
  world.guard([&] {
    rows.push_back(bench::measure_overhead(plan.overhead, limits));
    for (const auto& what : plan.schedules) rows.push_back(bench::measure_step(world, what, limits));
    for (const auto& what : plan.curve) rows.push_back(bench::measure_step(world, what, limits)), rows.back().kind = "curve";
    for (const auto& what : plan.boundary) rows.push_back(bench::measure_boundary(world, *recorder, what, limits));
  });
  return rows;
}

std::vector<std::string> arguments_of(const BenchPpFlags& flags) {
  return {"--dim",           std::to_string(flags.dim),
          "--layers",        std::to_string(flags.layers),
          "--tokens",        std::to_string(flags.tokens),
          "--global-size",   std::to_string(flags.global_size),
          "--schedule",      fmt::format("{}", fmt::join(flags.schedules, ",")),
          "--micro-batches", fmt::format("{}", fmt::join(flags.micro_batches, ",")),
          "--hidden",        fmt::format("{}", fmt::join(flags.hidden, ","))};
}

}  // namespace

int bench_pp(const BenchPpFlags& flags) {
  require_known("--backend", flags.backend, comm::engine_names());
  check_limits(flags.seconds, flags.iterations);
  check_output_file("--svg", flags.svg);
  const int nproc = bench_ranks(flags.nproc);
  const auto plan = plan_of(flags, nproc);
  device_for(flags.device, nproc, "--device");  // or a refusal
  return run_bench<PipelineRow>(
      flags, nproc,
      {.name = "pp",
       .jobs = {{flags.backend, fmt::format("pipelines over {} ranks", nproc), arguments_of(flags)}},
       .measure = [&] { return measure_pipelines(flags, plan); },
       .lines = [](const auto& rows) { return bench::json_lines(rows); },
       .read = [](const auto& lines) { return bench::read_pipeline_rows(lines); },
       .present =
           [&](const auto& rows) { show_rows(flags, flags.json ? bench::json_lines(rows) : bench::format_table(rows), [&] { return bench::plot(rows); }); }});
}

}  // namespace tessera::cli
