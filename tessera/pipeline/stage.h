#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

/// What an executor knows of a model that is cut into stages. A stage is a piece of it, numbered from its input to its output; whoever cuts a model (a chain of
/// blocks, a recorded graph) implements Stage, and says which values cross between stages.
namespace tessera::pipeline {

/// A value that one stage makes and a later one uses: output number `output` of stage `from` is input number `input` of stage `to`. It goes there directly,
/// past the stages between; one that several stages use crosses once for each.
struct Crossing {
  int from = 0, to = 1;
  int output = 0, input = 0;
  bool takes_gradient = true;  ///< false: integers, masks. Otherwise a gradient always comes back, zeros where the value had no part in the loss
  bool announced = false;      ///< its shape and type travel ahead of it, since the receiving stage cannot know them (Stage::input_spec)

  bool operator==(const Crossing&) const = default;
};

/// Of the whole model, the same list on every rank. Each input of a stage is named once.
using Crossings = std::vector<Crossing>;

/// One value from each stage to the next.
Crossings chain(int stages);

/// Throws InternalError for a crossing that goes backwards or nowhere, and for inputs of a stage that are not numbered 0, 1, ... once each.
void check_crossings(const Crossings& crossings, int stages);

/// What a tensor needs room for.
struct TensorSpec {
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;

  bool operator==(const TensorSpec&) const = default;
};

struct StageOutputs {
  std::vector<at::Tensor> values;  ///< by output number; those that do not cross may be undefined
  at::Tensor loss{};               ///< a scalar from which backward starts, with a gradient of 1, beside the gradients that come for `values`; may be undefined
};

/// One stage, on the rank that holds it. Its own data (tokens, labels, what it returns to whoever trains) is the implementer's business. One rank, one thread.
class Stage {
 public:
  virtual ~Stage() = default;

  /// Runs the stage on micro-batch `micro_batch` of this rank's in the step, from 0. `inputs`: by input number, contiguous; leaves that want a gradient where
  /// the value takes one and gradients are recorded. Outputs that cross keep their graph and not their data: what the graph needs of them, it has saved.
  virtual StageOutputs forward(int micro_batch, const std::vector<at::Tensor>& inputs) = 0;

  /// Shape and type of what is about to come in, for each crossing that is not announced.
  virtual std::optional<TensorSpec> input_spec(int /*micro_batch*/, int /*input*/) const { return std::nullopt; }
};

}  // namespace tessera::pipeline
