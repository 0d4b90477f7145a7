#include "tessera/train/engine.h"

#include <ATen/ops/stack.h>

#include "tessera/core/memory.h"
#include "tessera/nn/sample_scope.h"

namespace tessera {

at::Tensor PlainEngine::forward_backward(const data::StepBatch& batch) {
  // The loss is normalized once, by what the loader knows of the whole batch; sums of gradients over micro-batches and ranks are then final.
  const double scale = run_.loss_scale.value() / static_cast<double>(batch.global_valid_tokens);
  std::vector<at::Tensor> losses;
  run_.synchronizer->begin_step();
  for (size_t i = 0; i < batch.micro_batches.size(); ++i) {
    const auto& micro = batch.micro_batches[i];
    const MicroBatchPosition position{.index = micro.index, .last = i + 1 == batch.micro_batches.size(), .padding = micro.weight == 0};
    run_.synchronizer->before_micro_batch(position);
    {
      MemoryScope activations(MemoryCategory::Activations);
      nn::SampleScope sample({.seed = seed_, .step = batch.step, .first_sample = micro.first_sample, .expected_gradient = scale});
      mark_memory("forward");
      at::Tensor loss = run_.model->loss_sum(micro.tokens, micro.labels);
      losses.push_back(loss.detach());
      mark_memory("backward");
      loss.mul(scale).backward();
    }
    run_.synchronizer->after_micro_batch(position);
  }
  run_.synchronizer->finish();
  return at::stack(losses);
}

std::unique_ptr<Engine> make_engine(const Config& config, Composition& run) { return std::make_unique<PlainEngine>(config, run); }

}  // namespace tessera
