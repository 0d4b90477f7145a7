#include "tessera/train/engine.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/train/evaluation_mode.h"

namespace tessera {

namespace {

using schedules::Action;
using schedules::Kind;

std::map<int, ModelStage> stages_of(Composition& run) {
  std::map<int, ModelStage> stages;
  if (run.parts.empty()) stages.emplace(0, ModelStage(*run.model));
  for (const ModelShare& part : run.parts) stages.emplace(part.stage, ModelStage(part.module, run.stream));
  return stages;
}

std::map<int, pipeline::Stage*> pointers_to(std::map<int, ModelStage>& stages) {
  std::map<int, pipeline::Stage*> pointers;
  for (auto& [number, stage] : stages) pointers.emplace(number, &stage);
  return pointers;
}

at::Device device_of(const Composition& run) { return run.parameters.empty() ? at::Device(at::kCPU) : run.parameters.front().tensor.device(); }

ActionKind announced(Kind kind) {
  return kind == Kind::Forward ? ActionKind::Forward : kind == Kind::BackwardWeight ? ActionKind::Weights : ActionKind::Backward;
}

const char* memory_mark(ActionKind kind) { return kind == ActionKind::Forward ? "forward" : kind == ActionKind::Backward ? "backward" : "weights"; }

/// Forwards alone, of one micro-batch, through every stage.
schedules::Schedule forwards_only(const std::vector<int>& rank_of, int ranks) {
  schedules::Schedule schedule{.name = "forward", .micro_batches = 1, .rank_of = rank_of, .actions = {}};
  schedule.actions.resize(static_cast<size_t>(ranks));
  for (int stage = 0; stage < schedule.stages(); ++stage) {
    schedule.actions[static_cast<size_t>(rank_of[static_cast<size_t>(stage)])].push_back({.kind = Kind::Forward, .stage = stage, .micro_batch = 0});
  }
  return schedule;
}

}  // namespace

at::Tensor ForwardEngine::loss_sum(const at::Tensor& tokens, const at::Tensor& labels) {
  const EvaluationMode mode(model_);
  const at::NoGradGuard no_grad;
  if (run_ == nullptr) return model_.loss_sum(tokens, labels);
  const comm::Group& ranks = run_->pipeline;
  std::map<int, ModelStage> stages = stages_of(*run_);
  const std::vector<data::MicroBatch> batch{{.tokens = tokens, .labels = labels}};
  for (auto& [number, stage] : stages) stage.begin(batch, 1);
  pipeline::Executor executor(forwards_only(run_->rank_of_stage, ranks.size()), pipeline::chain(static_cast<int>(run_->rank_of_stage.size())),
                              pointers_to(stages), {.ranks = ranks, .device = device_of(*run_)});
  executor.run();
  at::Tensor loss = at::zeros({}, at::TensorOptions(at::kFloat).device(device_of(*run_)));
  if (const auto last = stages.find(static_cast<int>(run_->rank_of_stage.size()) - 1); last != stages.end()) loss = last->second.losses().front();
  const comm::CallSite site("pipeline.loss");
  comm::broadcast(ranks, loss, run_->rank_of_stage.back());
  return loss;
}

at::Tensor ForwardEngine::logits(const at::Tensor& tokens) {
  invariant(run_ == nullptr, "logits of a model that is cut into stages");
  const EvaluationMode mode(model_);
  const at::NoGradGuard no_grad;
  return model_.logits(tokens);
}

Engine::Engine(const Config& config, Composition& run, ScheduleMaker schedule)
    : seed_(static_cast<uint64_t>(config.run.seed)), run_(run), schedule_(std::move(schedule)), stages_(stages_of(run)) {
  if (!schedule_) schedule_ = schedule_maker(config, run.pipeline.size());
}

Engine::Plan& Engine::plan_for(size_t micro_batches) {
  const auto known = plans_.find(micro_batches);
  if (known != plans_.end()) return known->second;
  Plan& plan = plans_[micro_batches];
  const schedules::Schedule schedule = with_backwards_alike(schedule_(static_cast<int>(micro_batches)));
  int alive = 0;
  std::map<std::pair<int, Kind>, size_t> done;
  for (const Action& listed : schedule.actions[static_cast<size_t>(run_.pipeline.rank())]) {
    for (const Action& action : schedules::parts(listed)) {
      const bool backward = action.kind == Kind::Backward || action.kind == Kind::BackwardInput;
      const Kind kind = backward ? Kind::Backward : action.kind;
      plan.last_micro_batch[{action.stage, kind}] = action.micro_batch;
      ++done[{action.stage, kind}];
      if (!schedule.is_last(action.stage)) continue;
      alive += kind == Kind::Forward ? 1 : backward ? -1 : 0;
      plan.runs_ahead |= alive > 1;
    }
  }
  for (const auto& [number, stage] : stages_) {
    invariant(done[{number, Kind::Forward}] == micro_batches && done[{number, Kind::Backward}] == micro_batches, "the schedule '", schedule.name, "' of ",
              micro_batches, " micro-batches leaves some of them out on stage ", number);
  }
  plan.executor = std::make_unique<pipeline::Executor>(
      schedule, pipeline::chain(schedule.stages()), pointers_to(stages_),
      pipeline::ExecutorOptions{.ranks = run_.pipeline, .device = device_of(run_), .around = [this](const Action& action, const std::function<void()>& body) {
                                  around(action, body);
                                }});
  return plan;
}

/// What synchronizes gradients hears of each action; the thread carries whose samples these are, and what memory is for.
void Engine::around(const Action& action, const std::function<void()>& body) {
  const ActionKind kind = announced(action.kind);
  const Kind counted = kind == ActionKind::Backward ? Kind::Backward : action.kind;
  const data::MicroBatch& micro = batch_->micro_batches[static_cast<size_t>(action.micro_batch)];
  const MicroBatchPosition position{.index = micro.index,
                                    .last = plan_->last_micro_batch.at({action.stage, counted}) == action.micro_batch,
                                    .padding = micro.weight == 0,
                                    .weights_later = plan_->executor->leaves_weights(action),
                                    .part = static_cast<int>(std::distance(stages_.begin(), stages_.find(action.stage)))};
  run_.synchronizer->before(kind, position);
  {
    const MemoryScope activations(MemoryCategory::Activations);
    const nn::SampleScope sample({.seed = seed_, .step = batch_->step, .first_sample = micro.first_sample, .expected_gradient = scale_});
    mark_memory(memory_mark(kind));
    body();
  }
  run_.synchronizer->after(kind, position);
}

at::Tensor Engine::forward_backward(const data::StepBatch& batch) {
  plan_ = &plan_for(batch.micro_batches.size());
  batch_ = &batch;
  run_.model->head()->compute_gradients_in_backward(plan_->runs_ahead);
  // The loss is normalized once, by what the loader knows of the whole batch; sums of gradients over micro-batches and ranks are then final.
  scale_ = run_.loss_scale.value() / static_cast<double>(batch.global_valid_tokens);
  for (auto& [number, stage] : stages_) stage.begin(batch.micro_batches, scale_);
  run_.synchronizer->begin_step();
  plan_->executor->run();
  run_.synchronizer->finish();
  for (const auto& [number, stage] : stages_) {
    if (stage.gives_loss()) return at::stack(stage.losses());
  }
  return at::zeros({static_cast<int64_t>(batch.micro_batches.size())}, at::TensorOptions(at::kFloat).device(device_of(run_)));
}

}  // namespace tessera
