#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/pipeline/split/cuts.h"
#include "tessera/pipeline/split/graph.h"
#include "tessera/pipeline/split/program.h"
#include "tessera/pipeline/split/recorder.h"
#include "tessera/pipeline/split/stages.h"

namespace tessera::tape {

/// A graph, cut into stages that are ready to run: for inputs of one shape, in one mode.
struct Recording {
  std::shared_ptr<const Graph> graph;
  Stages stages;
  std::vector<Program> programs;
  std::set<int> by_layout{};  ///< storages_by_layout
  uint64_t fingerprint = 0;   ///< of operators, constants, shapes and cuts: equal on ranks that will run the same

  bool goes_by_layout(int value) const { return by_layout.contains(graph->values[static_cast<size_t>(value)].storage); }
  /// Whether `tensor`, of that form's sizes, may be `value`: it lies as that did, or nothing goes by how it lies.
  bool takes_layout(int value, const at::Tensor& tensor, const Form& form) const { return lies_alike(tensor, form) || !goes_by_layout(value); }
};

/// Parameters and buffers of `root` under all their names.
State state_of(const torch::nn::Module& root);

/// `compared`: see record().
Recording make_recording(torch::nn::Module& root, const Forward& forward, const std::vector<at::Tensor>& inputs, const pipeline::SplitSpec& splits,
                         const State& state, const Graph* compared = nullptr);

/// What a recording depends on beside the inputs: the mode of every module, autocast, and whether gradients are taken.
std::string mode_of(const std::vector<std::shared_ptr<torch::nn::Module>>& modules);

/// The stage graph: for each stage its parameters, the operators by module, and what is sent from where to where.
std::string to_string(const Recording& recording, const std::string& name);

}  // namespace tessera::tape
