#include "tessera/train/stage_costs.h"

#include <map>
#include <memory>

#include <ATen/ops/empty.h>

#include "tessera/data/loader.h"
#include "tessera/memory/memory.h"
#include "tessera/models/model.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/pipeline/executor.h"
#include "tessera/precision/compute_format.h"
#include "tessera/precision/policy.h"
#include "tessera/train/model_stage.h"
#include "tessera/train/recompute_blocks.h"

// Schedules that are made for costs, and plans of all others, need what a stage's actions cost before anything is measured. Nothing here knows what a layer
// does: the stages run on meta, all on one rank, and a counter is put around each action.

namespace tessera {
namespace {

/// Forward, backward of inputs, backward of weights of one micro-batch, with all stages on one rank.
schedules::Schedule one_micro_batch(int stages) {
  schedules::Schedule schedule{.name = "costs", .micro_batches = 1, .rank_of = std::vector<int>(static_cast<size_t>(stages)), .actions = {{}}};
  auto& actions = schedule.actions.front();
  for (int stage = 0; stage < stages; ++stage) actions.push_back({.kind = schedules::Kind::Forward, .stage = stage});
  for (int stage = stages; stage-- > 0;) {
    actions.push_back({.kind = schedules::Kind::BackwardInput, .stage = stage});
    actions.push_back({.kind = schedules::Kind::BackwardWeight, .stage = stage});
  }
  return schedule;
}

double mean(const std::vector<StageFlops>& flops, auto&& of) {
  double sum = 0;
  for (const StageFlops& stage : flops) sum += of(stage);
  return sum / static_cast<double>(flops.size());
}

}  // namespace

std::vector<StageFlops> stage_flops(const Config& asked, const PipelineLayout& layout) {
  Config config = asked;
  precision::settle_compute(config, at::kMeta, precision::Saying::Silent);  // refused or planned before the ranks have met
  MemoryTracker apart;                                                      // of whoever plans or trains, none of this is memory
  const TrackMemory tracking(apart);
  const auto model = on_meta([&] { return make_model_for_stages(config.model); });
  precision::apply(*model, precision::policy_from(config.precision));
  const Attachment recomputed = recompute_blocks(config, *model);
  std::map<int, ModelStage> stages;
  std::map<int, pipeline::Stage*> pointers;
  for (int stage = 0; stage < layout.stages(); ++stage) {
    const StreamShape stream{.dim = config.model.dim};
    const auto& made = stages.emplace(stage, ModelStage(ModelPart(model, layout.links[static_cast<size_t>(stage)]), stream)).first;
    pointers.emplace(stage, &made->second);
  }
  const at::Tensor tokens = at::empty({config.batch.micro_size, config.data.seq_len}, at::TensorOptions(at::kLong).device(at::kMeta));
  const std::vector<data::MicroBatch> batch{{.tokens = tokens, .labels = tokens, .rows = tokens.size(0), .seq_len = tokens.size(1)}};
  LossPass pass;
  pass.begin(batch, {1});
  for (auto& [number, stage] : stages) stage.begin(pass);
  std::vector<StageFlops> flops(static_cast<size_t>(layout.stages()));
  const auto counted = [&](const schedules::Action& action, const std::function<void()>& body) {
    const auto counter = std::make_shared<nn::FlopCounter>();
    {
      const nn::OperatorScope scope(counter);
      const nn::SampleScope sample({.step = 1});  // no mask draws from the run's generator
      body();
    }
    StageFlops& stage = flops[static_cast<size_t>(action.stage)];
    (action.kind == schedules::Kind::Forward         ? stage.forward
     : action.kind == schedules::Kind::BackwardInput ? stage.backward_input
                                                     : stage.backward_weight) += counter->flops();
  };
  pipeline::Executor(one_micro_batch(layout.stages()), pipeline::chain(layout.stages()), pointers,
                     {.ranks = comm::Group::self(), .device = at::kMeta, .around = counted})
      .run();
  return flops;
}

schedules::Costs costs_of(const PipelineConfig& pipeline, const std::vector<StageFlops>& flops) {
  const double forward = mean(flops, [](const StageFlops& stage) { return stage.forward; }),
               total = mean(flops, [](const StageFlops& stage) { return stage.total(); });
  schedules::Costs costs;
  if (!pipeline.costs.empty()) {
    costs.forward = pipeline.costs[0], costs.backward_input = pipeline.costs[1], costs.backward_weight = pipeline.costs[2];
    if (pipeline.costs.size() > 3) costs.communication = pipeline.costs[3];
  } else {
    costs.backward_input = mean(flops, [](const StageFlops& stage) { return stage.backward_input; }) / forward;
    costs.backward_weight = mean(flops, [](const StageFlops& stage) { return stage.backward_weight; }) / forward;
  }
  for (const StageFlops& stage : flops) costs.scale.push_back(stage.total() / total);
  return costs;
}

}  // namespace tessera
