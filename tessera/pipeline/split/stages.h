#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/pipeline/split/graph.h"

/// What each stage does, keeps and is sent, from a graph and where it is cut: plain data.
namespace tessera::tape {

/// A tensor that one stage makes, or changes, and another uses: it goes straight there, past the stages between, and so does its gradient on the way back.
struct Crossing {
  int value;
  int from, to;   ///< stages
  Form form;      ///< as it is sent
  bool gradient;  ///< whether one comes back
  bool copied;    ///< what is sent shows memory that outlives the pass (a buffer's, a parameter's, an input's), and may be written before it is read
  std::string name;
};

struct StagePlan {
  int begin = 0, end = 0;       ///< nodes
  std::vector<int> again{};     ///< nodes of earlier stages that it runs for itself, ascending: what they make (positions, masks), they make of nothing
  std::vector<int> state{};     ///< parameters and buffers that it uses
  std::vector<int> fed{};       ///< which of the model's inputs it takes, by their places among them
  std::vector<int> receives{};  ///< crossings, ascending
  std::vector<int> sends{};     ///< crossings, ascending
  std::vector<int> copied{};    ///< received tensors, inputs and constants that it writes into: of copies of its own
};

/// A parameter that several stages use, each with its own copy: the sum of their gradients is its gradient.
struct SharedParameter {
  std::string name;
  std::vector<int> stages;
};

struct Stages {
  std::vector<StagePlan> stages;
  std::vector<Crossing> crossings;
  std::vector<SharedParameter> shared;

  int size() const { return static_cast<int>(stages.size()); }
};

/// The stages between `cuts`. The last one gives the graph's outputs, whichever stage makes them.
/// Throws ConfigError, naming what to change, for a buffer that a stage writes and another uses, a parameter that the pass writes into and several stages use,
/// and memory that a stage changes and that was made before it, where it is read through another tensor.
Stages plan_stages(const Graph& graph, const std::vector<int>& cuts);

/// The stage in which node number `node` runs.
int stage_of(const Stages& stages, int node);

/// All nodes of a stage, in their order.
std::vector<int> nodes_of(const StagePlan& stage);

}  // namespace tessera::tape
