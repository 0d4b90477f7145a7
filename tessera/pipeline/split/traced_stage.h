#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/pipeline/split/split.h"
#include "tessera/pipeline/stage.h"

namespace tessera::pipeline {

/// One stage of a split model, as an executor runs it (SplitModel::crossings() are what crosses).
class TracedStage final : public Stage {
 public:
  /// The model's inputs for a micro-batch; those that this stage does not take (SplitModel::takes) may be undefined.
  using Inputs = std::function<std::vector<at::Tensor>(int micro_batch)>;
  /// In the last stage: of what the model gives for a micro-batch, the loss from which backward starts; undefined where there is none to start.
  using Loss = std::function<at::Tensor(int micro_batch, const std::vector<at::Tensor>& outputs)>;

  TracedStage(SplitModel model, int stage, Inputs inputs, Loss loss = {});

  /// Throws ConfigError where an input has another shape or dtype than expect() said.
  StageOutputs forward(int micro_batch, const std::vector<at::Tensor>& inputs) override;
  std::optional<TensorSpec> input_spec(int micro_batch, int input) const override;

 private:
  SplitModel model_;
  int stage_;
  Inputs inputs_;
  Loss loss_;
};

}  // namespace tessera::pipeline
