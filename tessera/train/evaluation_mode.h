#pragma once

#include <torch/nn/module.h>

namespace tessera {

/// Puts a model into evaluation mode for as long as it lives: no dropout, and nothing that a forward would change.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& model) : model_(model), was_training_(model.is_training()) { model_.eval(); }
  ~EvaluationMode() { model_.train(was_training_); }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  torch::nn::Module& model_;
  bool was_training_;
};

}  // namespace tessera
