#pragma once

#include <cstdint>
#include <string>

#include "tessera/config/config.h"
#include "tessera/plan/dry_run.h"

namespace tessera::plan {

/// A dry run of the step that `world` ranks are about to train, `local_ranks` of them on this host: throws ConfigError where a rank needs more than
/// run.memory_limit_bytes (with the cheapest setting that would fit), where the ranks of a host need more than the `host_memory` bytes of this one (0: not
/// asked; of several hosts, that which needs most, with so many ranks one after another), and where ranks would wait for each other in vain (agreement.h). Else
/// one sentence that says what was found. Cost: a dry run; where it does not fit, those of find_fit. `options`: of that dry run.
std::string preflight(const Config& config, int world, int local_ranks, int64_t host_memory, const DryRunOptions& options = {});

/// What the files of a host's ranks grow to in offload.dir, on the host where they grow most: a dry run.
int64_t disk_bytes_of_host(const Config& config, int world, int local_ranks);

}  // namespace tessera::plan
