#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "tessera/data/loader.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/parameter.h"

namespace tessera {

/// Throws ConfigError, naming run.graph, where a device has no graphs: a CPU, and any under a libtorch that has none for all devices alike.
void require_graphs(at::Device device);

/// run.graph: the passes of a step as one launch. The first steps run as without it, until buckets and units have their order; then one is captured (forward,
/// backward, gradients that meet, their norm), and from then on replayed: the same kernels on the same memory, without the host in between. What follows,
/// clipping and update, is asked for as always: a few kernels, with a learning rate of each step's own.
///
///   memory  every batch is copied into one that stays, 16 bytes a token; and what the passes use between forward and backward stays the graph's between steps,
///           where without one a validation would use it again. Counted is what is alive, and in each step the peak of the one that was captured.
///   bits    those of the step without
///
/// A batch of another form than the captured one's (other sizes, another number of valid tokens) runs as without. On meta nothing is captured, and the memory
/// is counted.
class StepGraph {
 public:
  struct Result {
    at::Tensor losses, norm;
  };
  /// The passes over this batch, whose tensors stay; afterwards each parameter has its gradient.
  using Passes = std::function<Result(const data::StepBatch&)>;

  /// Steps before the capture: in the first FLOPs are counted and buckets put in order, which the second one uses first.
  static constexpr int kWarmUp = 3;

  StepGraph(at::Device device, MemoryTracker memory);  ///< require_graphs(device), but for meta
  ~StepGraph();

  /// `updated`: whose gradients the passes make. Throws ConfigError naming run.graph where they cannot be captured; lost peers,
  /// used up memory and failed invariants stay the errors that they are.
  Result run(const data::StepBatch& batch, const std::vector<nn::NamedParameter>& updated, const Passes& passes);

  int64_t replays() const { return replays_; }

 private:
  void keep(const data::StepBatch& batch);
  void capture(const std::vector<nn::NamedParameter>& updated, const Passes& passes);

  struct Captured;
  at::Device device_;
  MemoryTracker memory_;
  data::StepBatch batch_;  ///< on tensors that stay
  int steps_ = 0;
  int64_t replays_ = 0;
  std::unique_ptr<Captured> captured_;
};

}  // namespace tessera
