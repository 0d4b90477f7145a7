#pragma once

#include <ranges>
#include <set>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

namespace tessera {

/// Puts a model into evaluation mode for as long as it lives: no dropout, and nothing that a forward would change. Each module then is in the mode that it was
/// in: a program may have frozen some of them in evaluation mode.
class EvaluationMode {
 public:
  explicit EvaluationMode(torch::nn::Module& model) {
    std::set<const torch::nn::Module*> seen;
    remember(model, seen);
    model.eval();
  }
  ~EvaluationMode() {
    for (const auto& [module, was_training] : std::views::reverse(modules_)) {
      if (module->is_training() != was_training) module->train(was_training);
    }
  }
  EvaluationMode(const EvaluationMode&) = delete;
  EvaluationMode& operator=(const EvaluationMode&) = delete;

 private:
  /// Behind all that it is made of, also where several share that: train() goes to children as well, so each is told before they are.
  void remember(torch::nn::Module& module, std::set<const torch::nn::Module*>& seen) {
    if (!seen.insert(&module).second) return;
    for (const auto& child : module.children()) remember(*child, seen);
    modules_.emplace_back(&module, module.is_training());
  }

  std::vector<std::pair<torch::nn::Module*, bool>> modules_;
};

}  // namespace tessera
