#include "tessera/train/stage_costs.h"

#include <map>
#include <memory>

#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/data/loader.h"
#include "tessera/memory/memory.h"
#include "tessera/models/model.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/operators.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/pipeline/executor.h"
#include "tessera/pipeline/schedules/timed.h"
#include "tessera/precision/compute_format.h"
#include "tessera/precision/policy.h"
#include "tessera/train/adapters.h"
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

double mean(const std::vector<StageFlops>& flops, double StageFlops::* kind) {
  double sum = 0;
  for (const StageFlops& stage : flops) sum += stage.*kind;
  return sum / static_cast<double>(flops.size());
}

}  // namespace

std::vector<StageFlops> stage_flops(const Config& asked, const PipelineLayout& layout) {
  Config config = asked;
  precision::settle_compute(config, at::kMeta, precision::Saying::Silent);  // refused or planned before the ranks have met
  MemoryTracker apart;                                                      // of whoever plans or trains, none of this is memory
  const TrackMemory tracking(apart);
  const auto model = on_meta([&] { return make_model_for_stages(config.model); });
  const Attachment adapted = add_adapters(config, *model);
  precision::apply(*model, precision::policy_from(config.precision));
  const Attachment recomputed = recompute_blocks(config, *model, layout);
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

namespace {

schedules::Costs measured_costs(const std::string& from, const std::vector<StageFlops>& flops) {
  const auto read = [&] {
    try {
      return schedules::read_timeline(from);
    } catch (const ConfigError& error) {
      throw ConfigError(detail::concat("pipeline.costs_from = ", error.what()));
    }
  };
  const schedules::Timed timed = read();
  require(timed.measured(), "pipeline.costs_from = ", from, ": holds a schedule that nobody has timed; name a run with log.timeline_every");
  schedules::Costs costs = [&] {
    try {
      return schedules::measured_costs(timed);
    } catch (const ConfigError& error) {
      throw ConfigError(detail::concat("pipeline.costs_from = ", from, ": ", error.what()));
    }
  }();
  require(costs.stages.size() == flops.size(), "pipeline.costs_from = ", from, ": was measured with ", costs.stages.size(), " stages, and this run has ",
          flops.size(), "; measure one with the same mesh.pp, pipeline.virtual_stages and pipeline.split, or leave it out");
  for (size_t i = 0; i < flops.size() && !timed.schedule.splits_backward(); ++i) {
    const double both = flops[i].backward_input + flops[i].backward_weight;
    if (both > 0) costs.stages[i].backward_input = costs.stages[i].backward * flops[i].backward_input / both;
    costs.stages[i].backward_weight = costs.stages[i].backward - costs.stages[i].backward_input;
  }
  return costs;
}

}  // namespace

schedules::Costs costs_of(const PipelineConfig& pipeline, const std::vector<StageFlops>& flops) {
  if (!pipeline.costs_from.empty()) return measured_costs(pipeline.costs_from, flops);
  const StageFlops average{.forward = mean(flops, &StageFlops::forward),
                           .backward_input = mean(flops, &StageFlops::backward_input),
                           .backward_weight = mean(flops, &StageFlops::backward_weight)};
  const auto& given = pipeline.costs;
  schedules::Costs costs{.communication = given.size() > 3 ? given[3] : 0};
  for (const StageFlops& stage : flops) {
    const auto cost = [&](double StageFlops::* kind, size_t place) {
      if (given.empty()) return stage.*kind / average.forward;
      return average.*kind > 0 ? given[place] * stage.*kind / average.*kind : given[place];
    };
    schedules::StageCosts& of_stage = costs.stages.emplace_back();
    of_stage.forward = cost(&StageFlops::forward, 0);
    of_stage.backward_input = cost(&StageFlops::backward_input, 1);
    of_stage.backward_weight = cost(&StageFlops::backward_weight, 2);
    of_stage.backward = of_stage.backward_input + of_stage.backward_weight;
  }
  return costs;
}

}  // namespace tessera
