#pragma once

#include <optional>
#include <string>

#include "tessera/config/config.h"

namespace tessera {

/// Threads that a rank computes with: run.threads; else 1 with run.deterministic, where their number is part of the arithmetic and must follow neither from how
/// many ranks share a machine nor from a variable; else what OMP_NUM_THREADS says (`omp`; of a list, its first), which launchers set for their ranks; else
/// `cores` / `local_ranks`. Throws ConfigError for an OMP_NUM_THREADS beyond what run.threads takes; what is no count there says nothing.
int threads_per_rank(const RunConfig& run, int local_ranks, int cores, const std::optional<std::string>& omp);

/// The same, of this machine and this process's environment.
int threads_per_rank(const RunConfig& run, int local_ranks);

}  // namespace tessera
