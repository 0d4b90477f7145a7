#include "cli/bench/pipeline.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randint.h>

#include "cli/bench/measure.h"
#include "cli/bench/workload.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/operators.h"
#include "tessera/pipeline/schedules/timed.h"
#include "tessera/train/compose.h"
#include "tessera/train/engine.h"
#include "tessera/train/timeline.h"

namespace tessera::bench {
namespace {

constexpr int64_t kVocabulary = 32;  // a head that costs next to nothing beside the blocks
constexpr int kTimedSteps = 5;

/// The same on all ranks.
data::StepBatch batch_of(const PipelineCase& what) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
  data::StepBatch batch{.step = 1, .micro_batches = {}, .global_valid_tokens = what.global_size * what.tokens};
  const int64_t rows = what.global_size / what.micro_batches;
  for (int64_t i = 0; i < what.micro_batches; ++i) {
    const auto draw = [&] { return at::randint(kVocabulary, {rows, what.tokens}, generator, at::device(at::kCPU).dtype(at::kLong)).to(what.device); };
    batch.micro_batches.push_back(
        {.tokens = draw(), .labels = draw(), .rows = rows, .seq_len = what.tokens, .index = i, .first_sample = i * rows, .valid_tokens = rows * what.tokens});
  }
  return batch;
}

/// A rank's stages and the engine that runs them, as in training; without clipping and update.
class PipelinedStep {
 public:
  PipelinedStep(const comm::World& world, const PipelineCase& what)
      : config_(config_of(what)),
        mesh_(world, mesh_shape(config_.mesh, config_.zero.stage, world.size())),
        run_(compose(config_, mesh_, what.device)),
        engine_(config_, run_),
        batch_(batch_of(what)) {}

  /// Gradients are made anew, as after zero_grad. The device is done with it then.
  void run(pipeline::StepTimes* times = nullptr) {
    engine_.forward_backward(batch_, {.times = times});
    wait_for(run_.device);
  }

  const comm::Group& ranks() const { return run_.pipeline; }

 private:
  Config config_;
  Mesh mesh_;
  Composition run_;
  Engine engine_;
  data::StepBatch batch_;
};

/// What everybody would write for one rank.
class PlainStep {
 public:
  explicit PlainStep(const PipelineCase& what) : model_(on_meta([&] { return make_model(config_of(what).model); })), batch_(batch_of(what)) {
    materialize(*model_, /*seed=*/0, what.device);
  }

  void run() {
    const double scale = 1.0 / static_cast<double>(batch_.global_valid_tokens);
    for (const auto& micro : batch_.micro_batches) model_->loss_sum(micro.tokens, micro.labels).mul(scale).backward();
    for (auto& parameter : model_->parameters()) parameter.mutable_grad().reset();
    wait_for(batch_.micro_batches.front().tokens.device());
  }

 private:
  std::shared_ptr<LanguageModel> model_;
  data::StepBatch batch_;
};

double middle_of(std::vector<double> numbers) {
  const auto middle = numbers.begin() + static_cast<std::ptrdiff_t>(numbers.size() / 2);
  std::ranges::nth_element(numbers, middle);
  return *middle;
}

double seconds_of_one(auto&& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// A few steps with their times; on rank 0.
std::vector<schedules::Timed> timelines_of(const comm::World& world, PipelinedStep& step) {
  std::vector<schedules::Timed> timelines;
  for (int i = 0; i < kTimedSteps; ++i) {
    pipeline::StepTimes times;
    step.run(&times);
    if (const auto all = gather_timelines(world.group(), step.ranks(), times, i + 1)) timelines.push_back(all->front());
  }
  return timelines;
}

}  // namespace

Config config_of(const PipelineCase& what) {
  Config config;
  config.model.family = "llama";
  config.model.dim = what.hidden;
  config.model.heads = what.heads;
  config.model.layers = what.layers;
  config.model.vocab_size = kVocabulary;
  config.data.seq_len = what.tokens;
  config.batch.global_size = what.global_size;
  config.batch.micro_size = what.global_size / what.micro_batches;
  config.optim.lr = 1;
  config.mesh.pp = what.ranks;
  config.pipeline.schedule = what.schedule;
  config.pipeline.virtual_stages = what.chunks;
  if (what.schedule == "zb_auto") config.pipeline.memory_limit = what.ranks;
  resolve(config);
  return config;
}

PipelineRow measure_overhead(const PipelineCase& what, const Limits& limits) {
  const auto world = comm::World::alone();
  PipelinedStep engine(world, what);
  PlainStep plain(what);
  for (int i = 0; i < 2; ++i) engine.run(), plain.run();
  std::vector<double> ratios, of_engine, of_plain;
  const double pair = seconds_of_one([&] { plain.run(); }) + seconds_of_one([&] { engine.run(); });
  const SamplingPlan sampling = plan_calls(pair, limits);
  for (int64_t i = 0; i < sampling.samples * sampling.batch; ++i) {
    double ours = 0, theirs = 0;
    for (const bool first : {i % 2 == 0, i % 2 != 0}) first ? ours = seconds_of_one([&] { engine.run(); }) : theirs = seconds_of_one([&] { plain.run(); });
    ratios.push_back(ours / theirs);
    of_engine.push_back(ours);
    of_plain.push_back(theirs);
  }
  return {.kind = "overhead", .what = what, .step_us = 1e6 * middle_of(of_engine), .plain_us = 1e6 * middle_of(of_plain), .overhead = middle_of(ratios) - 1};
}

PipelineRow measure_step(const comm::World& world, const PipelineCase& what, const Limits& limits) {
  PipelinedStep step(world, what);
  PipelineRow row{.kind = "schedule", .what = what, .backend = engine_for(world.group(), what.device)};
  row.step_us = measure(world.group(), [&] { step.run(); }, limits).median_us;
  std::vector<double> bubbles, foretold;
  for (const auto& timed : timelines_of(world, step)) {
    bubbles.push_back(schedules::measure(timed.schedule, timed.timeline).bubble_fraction);
    foretold.push_back(schedules::measure(timed.schedule, simulate(timed.schedule, {.stages = costs_of(timed)})).bubble_fraction);
    row.formula = schedules::measure(timed.schedule, simulate(timed.schedule)).bubble_fraction;
  }
  if (world.rank() > 0) return row;
  row.bubble = middle_of(bubbles);
  row.foretold = middle_of(foretold);
  return row;
}

PipelineRow measure_boundary(const comm::World& world, comm::Recorder& recorder, const PipelineCase& what, const Limits& limits) {
  PipelinedStep step(world, what);
  PipelineRow row{.kind = "boundary", .what = what, .backend = engine_for(world.group(), what.device)};
  const auto per_token = [&](double of_step) { return of_step / static_cast<double>(what.global_size * what.tokens); };
  const auto counter = std::make_shared<nn::FlopCounter>();
  recorder.clear();
  {
    const nn::OperatorScope counted(counter);
    step.run();
  }
  double sent = 0;
  for (const auto& record : recorder.records()) sent += record.op == "send" ? static_cast<double>(record.sent_bytes) : 0;
  // Every rank runs one block and rank 0 sends over one boundary, one way; the gradient comes back as large.
  row.flops_per_token = per_token(counter->flops());
  row.bytes_per_token = per_token(2 * sent);
  measure(world.group(), [&] { step.run(); }, {.seconds = limits.seconds / 2, .iterations = limits.iterations});
  std::vector<double> compute;
  for (const auto& timed : timelines_of(world, step)) {
    double most = 0;
    for (const auto& cost : costs_of(timed)) most = std::max(most, cost.forward + cost.backward);
    compute.push_back(1000 * most);
  }
  if (!compute.empty()) row.compute_us = middle_of(compute);
  const int64_t bytes = what.global_size / what.micro_batches * what.tokens * what.hidden * 4;
  Workload message(world.group(), {.op = "send", .bytes = bytes, .device = what.device});
  row.message_us = measure(world.group(), [&] { message.run(); }, limits).median_us;
  return row;
}

}  // namespace tessera::bench
