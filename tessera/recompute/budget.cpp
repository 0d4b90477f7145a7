#include "tessera/recompute/budget.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "tessera/core/error.h"
#include "tessera/core/format.h"

// Choosing the cheapest modules that free enough is a knapsack with a lower bound. Taking them by FLOPs per byte would be simpler, and wrong where one large
// module frees what two small ones do at more cost. Exact in bytes the table would be as wide as memory; in units its width is fixed, and what rounding costs
// is below a unit for each module.

namespace tessera {

namespace {

constexpr int64_t kUnits = 4096;

int64_t sum_of(const std::vector<RecomputeCost>& costs, int64_t RecomputeCost::* bytes) {
  return std::accumulate(costs.begin(), costs.end(), int64_t{0}, [&](int64_t sum, const RecomputeCost& cost) { return sum + cost.*bytes; });
}

/// Indices of the cheapest set that frees `wanted` units; `units[i]` is what i frees. Empty where none does.
std::vector<size_t> cheapest_cover(const std::vector<RecomputeCost>& costs, const std::vector<int64_t>& units, int64_t wanted) {
  constexpr double never = std::numeric_limits<double>::infinity();
  const auto width = static_cast<size_t>(wanted) + 1;
  // least[u]: FLOPs of the cheapest set of the first i modules that frees at least u units; taken[i][u]: whether module i is in it.
  std::vector<double> least(width, never);
  least[0] = 0;
  std::vector<std::vector<bool>> taken(costs.size(), std::vector<bool>(width));
  for (size_t i = 0; i < costs.size(); ++i) {
    for (size_t u = width; u-- > 1;) {  // downwards: least[rest] is still that of the modules before i
      const size_t rest = u > static_cast<size_t>(units[i]) ? u - static_cast<size_t>(units[i]) : 0;
      if (units[i] == 0 || least[rest] + costs[i].flops >= least[u]) continue;
      least[u] = least[rest] + costs[i].flops;
      taken[i][u] = true;
    }
  }
  std::vector<size_t> chosen;
  if (least[width - 1] == never) return chosen;
  for (size_t i = costs.size(), u = width - 1; i-- > 0 && u > 0;) {
    if (!taken[i][u]) continue;
    chosen.push_back(i);
    u = u > static_cast<size_t>(units[i]) ? u - static_cast<size_t>(units[i]) : 0;
  }
  std::reverse(chosen.begin(), chosen.end());
  return chosen;
}

}  // namespace

RecomputeChoice choose_recompute(const std::vector<RecomputeCost>& costs, int64_t budget_bytes) {
  const int64_t inputs = sum_of(costs, &RecomputeCost::input_bytes), inner = sum_of(costs, &RecomputeCost::inner_bytes);
  require(inputs <= budget_bytes, "recompute.budget_bytes = ", budget_bytes, ": the inputs of the ", costs.size(),
          " modules alone, which recomputation needs, are ", inputs, " bytes (", format_bytes(inputs),
          "); set at least that, or recompute larger parts (recompute.modules)");
  RecomputeChoice choice{.kept_bytes = inputs + inner};
  const int64_t excess = choice.kept_bytes - budget_bytes;
  if (excess <= 0) return choice;

  const int64_t unit = std::max<int64_t>(1, excess / kUnits);
  std::vector<int64_t> units;  // rounded down, what is wanted up: so the budget holds
  for (const auto& cost : costs) units.push_back(std::min(cost.inner_bytes / unit, excess / unit + 1));
  choice.recomputed = cheapest_cover(costs, units, (excess + unit - 1) / unit);
  if (choice.recomputed.empty()) {  // the rounding: all of them free enough, for the inputs fit
    choice.recomputed.resize(costs.size());
    std::iota(choice.recomputed.begin(), choice.recomputed.end(), size_t{0});
  }
  for (const size_t i : choice.recomputed) {
    choice.kept_bytes -= costs[i].inner_bytes;
    choice.flops += costs[i].flops;
  }
  return choice;
}

}  // namespace tessera
