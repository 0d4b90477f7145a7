#include "tessera/plan/longest.h"

#include <algorithm>
#include <limits>

#include "tessera/core/error.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"

// What a rank needs grows with the length, so doubling finds a length that does not fit, and halving the gap the last that does.

namespace tessera::plan {

LongestSequence longest_sequence(const Config& config, int world, const std::optional<DeviceAllocator>& allocator) {
  const int64_t limit = config.run.memory_limit_bytes;
  require(limit > 0, "--longest: run.memory_limit_bytes is not set, and any length fits; set it to what a rank may need");
  const auto with = [&](int64_t seq_len) {
    Config changed = config;
    changed.data.seq_len = seq_len;
    if (config.model.from_hf.empty()) changed.model.max_seq_len = seq_len;
    const DryRun run = dry_run(changed, world, {.allocator = allocator});
    const RankClass& most = largest_class(run);
    return LongestSequence{.seq_len = seq_len, .peak = total_of(most.peak_bytes), .needed = needed_bytes(most)};
  };
  const bool grows = config.model.from_hf.empty();
  const int64_t most = grows ? std::numeric_limits<int64_t>::max() / 4 : config.model.max_seq_len.value_or(config.data.seq_len);
  const MeshShape axes = mesh_shape(config.mesh, config.zero.stage, world);
  // A column for every rank, in head and tail.
  LongestSequence fits = with(std::min(most, int64_t{2} * size_along(axes, mesh_roles(config).columns) * size_along(axes, mesh_roles(config).layers)));
  require(fits.needed <= limit, "run.memory_limit_bytes = ", limit, ": ", fits.seq_len, " tokens alone need ", fits.needed,
          " on a rank; raise it, or see tessera plan without --longest for settings that need less");
  int64_t too_long = most + 1;
  for (int64_t next = std::min(most, 2 * fits.seq_len); too_long - fits.seq_len > std::max<int64_t>(1, fits.seq_len / 256);) {
    if (const LongestSequence longer = with(next); longer.needed <= limit) {
      fits = longer;
    } else {
      too_long = next;
    }
    next = too_long > most ? std::min(most, 2 * fits.seq_len) : fits.seq_len + (too_long - fits.seq_len) / 2;
  }
  return fits;
}

}  // namespace tessera::plan
