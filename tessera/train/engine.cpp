#include "tessera/train/engine.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/stack.h>

#include "tessera/memory/memory.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/nn/weight_gradients.h"
#include "tessera/train/evaluation_mode.h"

namespace tessera {

at::Tensor ForwardEngine::loss_sum(const at::Tensor& tokens, const at::Tensor& labels) {
  const EvaluationMode mode(model_);
  const at::NoGradGuard no_grad;
  return model_.loss_sum(tokens, labels);
}

at::Tensor ForwardEngine::logits(const at::Tensor& tokens) {
  const EvaluationMode mode(model_);
  const at::NoGradGuard no_grad;
  return model_.logits(tokens);
}

/// A micro-batch from its forward to the last of its gradients.
struct Engine::InFlight {
  at::Tensor loss;
  std::shared_ptr<nn::WeightGradients> later;
};

at::Tensor Engine::forward_backward(const data::StepBatch& batch) {
  const size_t count = batch.micro_batches.size();
  const Schedule schedule = schedule_(count);
  check_schedule(schedule, count);
  const bool weights_later = std::ranges::any_of(schedule, [](const Action& action) { return action.kind == ActionKind::Weights; });
  run_.model->head()->compute_gradients_in_backward(most_alive(schedule) > 1);

  // The loss is normalized once, by what the loader knows of the whole batch; sums of gradients over micro-batches and ranks are then final.
  const double scale = run_.loss_scale.value() / static_cast<double>(batch.global_valid_tokens);
  std::vector<InFlight> in_flight(count);
  std::vector<at::Tensor> losses(count);
  run_.synchronizer->begin_step();
  for (const auto& [kind, i] : schedule) {
    const data::MicroBatch& micro = batch.micro_batches[i];
    InFlight& here = in_flight[i];
    const MicroBatchPosition position{.index = micro.index, .last = i + 1 == count, .padding = micro.weight == 0, .weights_later = weights_later};
    run_.synchronizer->before(kind, position);
    {
      const MemoryScope activations(MemoryCategory::Activations);
      const nn::SampleScope sample({.seed = seed_, .step = batch.step, .first_sample = micro.first_sample, .expected_gradient = scale});
      if (kind == ActionKind::Forward && weights_later) here.later = std::make_shared<nn::WeightGradients>();
      const nn::LeaveWeightGradients leave(kind == ActionKind::Forward ? here.later : nullptr);  // recomputation takes it along
      switch (kind) {
        case ActionKind::Forward:
          mark_memory("forward");
          here.loss = run_.model->loss_sum(micro.tokens, micro.labels);
          losses[i] = here.loss.detach();
          break;
        case ActionKind::Backward:
          mark_memory("backward");
          std::exchange(here.loss, {}).mul(scale).backward();
          break;
        case ActionKind::Weights:
          mark_memory("weights");
          std::exchange(here.later, {})->compute();
          break;
      }
    }
    run_.synchronizer->after(kind, position);
  }
  run_.synchronizer->finish();
  return at::stack(losses);
}

}  // namespace tessera
