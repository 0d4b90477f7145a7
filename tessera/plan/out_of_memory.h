#pragma once

#include <optional>
#include <string>

#include "tessera/config/config.h"
#include "tessera/memory/history.h"
#include "tessera/plan/fit.h"

namespace tessera::plan {

/// A rank that got no more memory.
struct OutOfMemory {
  int rank = 0;
  int world = 1;
  MemoryRefusal refusal;  ///< what its tracker took down
};

/// What to tell of it.
struct OutOfMemoryReport {
  /// One line: rank, what was asked for, what was in use, what the run took beyond a plan that fits, and the cheapest setting that would fit.
  std::string sentence;
  std::string tables;  ///< by category and the largest tensors, as they were; the prediction by formula and by dry run; the settings tried
};

/// Explains it by dry runs of the same step (find_fit). `config` is the run's; its threads are those of this rank.
OutOfMemoryReport explain(const Config& config, const OutOfMemory& failure);

/// What a rank of `world` keeps from step to step by formula (docs/memory.md), which holds `held` elements (RankClass::parameters): mesh.tp, mesh.pp and
/// experts over ranks leave it a part of the model's.
std::string formula_text(const Config& config, int world, int64_t held);

/// The settings tried, one a line, with their peak, and FLOPs and bytes sent beside what they are now; at last the one to take.
std::string settings_text(const FitSearch& search);

}  // namespace tessera::plan
