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
  std::string sentence;  ///< one line: rank, what was asked for, what was in use, and the cheapest setting that would fit
  std::string tables;    ///< by category and the largest tensors, as they were; the prediction by formula and by dry run; the settings tried
};

/// Explains it by dry runs of the same step (find_fit). `config` is the run's; its threads are those of this rank.
OutOfMemoryReport explain(const Config& config, const OutOfMemory& failure);

/// "1.00 M parameters x (4 weight + 4 gradient + 4 optimizer) bytes = 11.4 MiB a rank ..." (docs/memory.md).
std::string formula_text(const Config& config, int world);

/// The settings tried, one a line, with their peak, and FLOPs and bytes sent beside what they are now; at last the one to take.
std::string settings_text(const FitSearch& search);

}  // namespace tessera::plan
