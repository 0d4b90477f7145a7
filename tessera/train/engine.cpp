#include "tessera/train/engine.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "tessera/core/error.h"
#include "tessera/core/events.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/nn/shared_casts.h"

namespace tessera {

namespace {

using schedules::Action;
using schedules::Kind;

ActionKind announced(Kind kind) {
  return kind == Kind::Forward ? ActionKind::Forward : kind == Kind::BackwardWeight ? ActionKind::Weights : ActionKind::Backward;
}

const char* memory_mark(ActionKind kind) { return kind == ActionKind::Forward ? "forward" : kind == ActionKind::Backward ? "backward" : "weights"; }

}  // namespace

Engine::Engine(const Config& config, Composition& run, ScheduleMaker schedule)
    : seed_(static_cast<uint64_t>(config.run.seed)),
      zero_(config.zero),
      run_(run),
      schedule_(std::move(schedule)),
      forward_only_(run),
      stages_(stages_of(run)) {
  if (!schedule_) schedule_ = schedule_maker(config, run.pipeline.size());
}

Engine::Plan& Engine::plan_for(size_t micro_batches) {
  const auto known = plans_.find(micro_batches);
  if (known != plans_.end()) return known->second;
  Plan& plan = plans_[micro_batches];
  schedules::Schedule schedule = with_backwards_alike(schedule_(static_cast<int>(micro_batches)));
  if (zero_.stage == 3) {
    schedule = with_gathers(schedule, zero_.reshard_after_forward ? gathered_while_reshards(schedule) : schedules::Gathered::Step);
  }
  plan.outlooks = schedules::outlooks(schedule.actions[static_cast<size_t>(run_.pipeline.rank())]);
  int alive = 0;
  std::map<std::pair<int, Kind>, size_t> done;
  for (const Action& listed : schedule.actions[static_cast<size_t>(run_.pipeline.rank())]) {
    if (!listed.computes()) continue;
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
  pipeline::ExecutorOptions options{.ranks = run_.channels, .device = run_.device};
  options.around = [this](const Action& action, const std::function<void()>& body) { around(action, body); };
  if (schedule.is_asynchronous()) {
    invariant(stages_.size() == 1, "the schedule '", schedule.name, "' updates in its midst, on a rank with ", stages_.size(), " stages");
    plan.windows = std::make_unique<UpdateWindows>(schedule.actions[static_cast<size_t>(run_.pipeline.rank())], [this] { met_(); });
    std::vector<at::Tensor>& weights = options.weights[stages_.begin()->first];
    for (const auto& parameter : run_.updated) {
      if (parameter.tensor.requires_grad()) weights.push_back(parameter.tensor);  // what is frozen has one version
    }
    options.update = [this](int) { update_(); };
  }
  plan.executor = std::make_unique<pipeline::Executor>(schedule, pipeline::chain(schedule.stages()), pointers_to(stages_), std::move(options));
  return plan;
}

/// What synchronizes gradients hears of each action; the thread carries whose samples these are, and what memory is for.
void Engine::around(const Action& action, const std::function<void()>& body) {
  if (action.kind == Kind::Update) {
    return plan_->windows->update([&] {
      mark_memory("update");
      body();
    });
  }
  const ActionKind kind = announced(action.kind);
  if (plan_->windows) return plan_->windows->around(kind, action.micro_batch, [&] { compute(kind, action, body); });
  const Kind counted = kind == ActionKind::Backward ? Kind::Backward : action.kind;
  const data::MicroBatch& micro = batch_->micro_batches[static_cast<size_t>(action.micro_batch)];
  const schedules::Outlook& outlook = plan_->outlooks.at({action.stage, action.kind, action.micro_batch});
  std::optional<ComingAction> coming;
  if (outlook.coming) coming = {.kind = announced(outlook.coming->kind), .part = part_of(outlook.coming->stage)};
  const MicroBatchPosition position{.index = micro.index,
                                    .last = plan_->last_micro_batch.at({action.stage, counted}) == action.micro_batch,
                                    .padding = micro.weight == 0,
                                    .weights_later = plan_->executor->leaves_weights(action),
                                    .part = part_of(action.stage),
                                    .coming = coming,
                                    .stays = outlook.stays};
  run_.synchronizer->before(kind, position);
  compute(kind, action, body);
  run_.synchronizer->after(kind, position);
}

void Engine::compute(ActionKind kind, const Action& action, const std::function<void()>& body) {
  const auto i = static_cast<size_t>(action.micro_batch);
  const MemoryScope activations(MemoryCategory::Activations);
  const data::MicroBatch& micro = batch_->micro_batches[i];
  const nn::SampleScope sample({.seed = seed_,
                                .step = batch_->step,
                                .first_sample = micro.first_sample,
                                .positions = micro.positions,
                                .seq_len = micro.sample_columns(),
                                .expected_gradient = scales_[i],
                                .valid_tokens = micro.valid_tokens});
  if (run_.stream.before_each) run_.stream.before_each(pass_.size(action.micro_batch));  // a backward computes again what it had in forward
  mark_memory(memory_mark(kind));
  body();
}

double Engine::exposed_s() const { return plan_ && plan_->windows ? plan_->windows->exposed_s() : run_.synchronizer->statistics().exposed.seconds(); }

/// In a pipeline, gradients of several micro-batches are added up as they are computed, where nobody wants to see each by itself. Products then add in an order
/// of their own; what has to have the bits of another run that does without (slices on the host, updates in the midst of a step) does without. So does
/// recomputation, which can leave out the last product of a block only where autograd knows it.
Attachment Engine::add_in_place(size_t micro_batches) const {
  if (run_.pipeline.size() == 1 || zero_.stage == 3 || plan_->windows || !run_.recomputed.empty() || micro_batches < 2) return {};
  const auto tell = [this](bool adds) {
    for (const auto& parameter : run_.parameters) nn::GradientDispatcher::of(parameter.tensor).add_in_place(adds);
  };
  tell(true);
  return Attachment([tell] { tell(false); });
}

void Engine::leave_out_losses(size_t run) {
  const auto bracket = [](bool begins) {
    if (EventStream* const listener = EventStream::current()) listener->add({.what = ActionEvent{.action = std::string(kLeftOut), .begins = begins}});
  };
  bracket(true);
  pass_.repeat_losses(run);
  bracket(false);
}

at::Tensor Engine::forward_backward(const data::StepBatch& batch, StepOptions options) {
  const size_t run = options.rehearsed > 0 ? static_cast<size_t>(options.rehearsed) : batch.micro_batches.size();
  plan_ = &plan_for(run);
  batch_ = &batch;
  met_ = std::move(options.met);
  update_ = std::move(options.update);
  run_.model->head()->compute_gradients_in_backward(plan_->runs_ahead);
  // The loss is normalized once, by what the loader knows of the whole batch; sums of gradients over micro-batches and ranks are then final.
  const double scale = run_.loss_scale.value() / static_cast<double>(batch.global_valid_tokens);
  scales_ = plan_->windows ? plan_->windows->scales(batch) : std::vector<double>(batch.micro_batches.size(), scale);
  pass_.begin(batch.micro_batches, scales_);
  for (auto& [number, stage] : stages_) stage.begin(pass_);
  plan_->windows ? plan_->windows->begin(*run_.synchronizer, batch) : run_.synchronizer->begin_step();
  const Attachment adding = add_in_place(batch.micro_batches.size());
  std::optional<nn::ShareCasts> sharing;
  if (!plan_->windows) sharing.emplace();
  plan_->executor->run(options.times);
  sharing.reset();
  if (!plan_->windows) run_.synchronizer->finish();
  for (const auto& [number, stage] : stages_) {
    if (!stage.gives_loss()) continue;
    if (run < batch.micro_batches.size()) leave_out_losses(run);
    return at::stack(pass_.losses());
  }
  return at::zeros({static_cast<int64_t>(batch.micro_batches.size())}, at::TensorOptions(at::kFloat).device(run_.device));
}

}  // namespace tessera
