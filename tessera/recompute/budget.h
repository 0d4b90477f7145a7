#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/module.h>

namespace tessera {

/// What a module keeps from forward to backward, and what it costs to compute that again.
struct RecomputeCost {
  std::string path;
  int64_t input_bytes = 0;  ///< of its inputs, and of what its buffers held that it writes: kept either way
  int64_t inner_bytes = 0;  ///< of what is saved inside: kept unless the module is recomputed
  double flops = 0;         ///< of a second forward: those of matrix products, and one for every element another operator writes
};

/// Which modules to recompute, and what that leaves.
struct RecomputeChoice {
  std::vector<size_t> recomputed;  ///< indices, ascending
  int64_t kept_bytes = 0;          ///< inputs of all, inner bytes of the others
  double flops = 0;                ///< recomputed per forward pass
};

/// The cheapest set of modules, by FLOPs, whose recomputation brings what all keep down to `budget_bytes`: a knapsack, solved by dynamic programming over
/// the bytes to be freed. They are counted in units of 1/4096 of those, rounded so that the budget always holds; up to that the set is optimal.
/// Throws ConfigError where even recomputing all of them does not reach the budget.
RecomputeChoice choose_recompute(const std::vector<RecomputeCost>& costs, int64_t budget_bytes);

/// Runs `forward` once with gradients recorded, and returns the costs of the modules under `root` whose path matches, in the order of registration.
/// A tensor that several of them keep counts for the first; parameters do not count. Works on meta, where it costs milliseconds; the same on every device.
/// Throws ConfigError where the pattern matches nothing, a match cannot be intercepted or lies inside another match.
std::vector<RecomputeCost> measure_recompute(torch::nn::Module& root, const std::string& pattern, const std::function<void()>& forward);

}  // namespace tessera
