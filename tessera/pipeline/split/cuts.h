#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/pipeline/split/graph.h"

namespace tessera::pipeline {

/// Which side of a module begins a new stage.
enum class SplitPoint : uint8_t { Beginning, End };

/// A split point: `{"layers.4", SplitPoint::Beginning}`.
struct Split {
  std::string path;
  SplitPoint point = SplitPoint::Beginning;
  int call = -1;  ///< which of the module's calls, from 0, where there are several
};
using SplitSpec = std::vector<Split>;
std::string to_string(const Split& split);  ///< "beginning of 'layers.4'"

}  // namespace tessera::pipeline

namespace tessera::tape {

/// Throws ConfigError for a path that names no module (naming the nearest), one that is given twice, and more stages than `root` has modules with parameters.
void check_split_points(const torch::nn::Module& root, const pipeline::SplitSpec& splits);

/// Where to cut `graph`: ascending positions, one for each split point; a stage's nodes lie from one to before the next.
///
/// A module that announces its calls has exact ends. Of any other, only the operators that use its parameters and buffers are known, so that each position
/// between them and the neighbours' is right; taken is the one that the fewest bytes cross, the last of equals: an activation and a residual sum stay with the
/// layer before. Passed over are positions that would tear memory apart that is written later on and read through two tensors.
///
/// Throws ConfigError for a module that uses no parameters and does not announce itself, one that the pass does not call, one that it calls several times where
/// the split point does not say which, and stages that would have nothing to do.
std::vector<int> choose_cuts(const torch::nn::Module& root, const Graph& graph, const pipeline::SplitSpec& splits);

}  // namespace tessera::tape
