#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/pipeline/split/graph.h"
#include "tessera/pipeline/split/stages.h"

namespace tessera::tape {

/// Parameters and buffers by every name that they have.
using State = std::unordered_map<std::string, at::Tensor>;

/// One stage's part of a graph, ready to be run again: the same operators on the same memory in the same order, so the same bits as the whole model's forward
/// gives, with autograd's graph as eager execution makes it. A tensor is let go of as soon as nothing needs it. Costs some 0.1 us an operator.
///
/// Immutable: several passes may be under way. Called modules are called anew, with whatever is attached to them by then.
class Program {
 public:
  Program(std::shared_ptr<const Graph> graph, const Stages& stages, int stage, const State& state);

  struct Given {
    int value;
    at::Tensor tensor;
  };
  /// From what the stage is fed and receives to `results()`, in that order.
  std::vector<at::Tensor> run(const std::vector<Given>& fed) const;

  const std::vector<int>& results() const { return results_; }  ///< what is sent, once each, and in the last stage the outputs
  int result_number(int value) const;                           ///< its place among them

 private:
  struct Step {
    const Node* node;
    std::vector<int> dead{};    ///< of what it takes, what nobody needs any more
    std::vector<int> unused{};  ///< of what it gives, what nobody needs
    /// Of what a module gave back as it was given it, what several use behind the call, or another stage: whether they use what it was given or what it gives,
    /// the list does not tell.
    std::vector<int> given_back{};
    /// Of what a module is given and was not seen to hook, what has a gradient of which this stage sees a part.
    std::vector<int> torn{};
  };

  std::shared_ptr<const Graph> graph_;
  std::vector<Step> steps_;
  std::vector<at::Tensor> first_registers_;  ///< state and constants
  std::vector<int> results_;
  std::vector<bool> is_stored_;  ///< not constants, which the program filled by hand
  std::vector<bool> copied_;
  std::vector<int> without_gradient_;  ///< of what is received, what has a gradient that nothing took when the pass was recorded, so that none is sent back
};

}  // namespace tessera::tape
