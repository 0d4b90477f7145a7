#pragma once

#include <cstdint>
#include <optional>

#include "tessera/config/config.h"
#include "tessera/plan/dry_run.h"

namespace tessera::plan {

/// A length of sequences, and what the rank that needs most has at its peak with it.
struct LongestSequence {
  int64_t seq_len = 0;
  int64_t peak = 0;    ///< bytes of tensors
  int64_t needed = 0;  ///< of its device (needed_bytes)
};

/// The longest data.seq_len with which no rank needs more than run.memory_limit_bytes, to within 1/256 of it, by dry runs: some twenty of them. The batch
/// stays, and so do all other settings but model.max_seq_len, which grows along where it does not stand for what was trained (from_hf). Throws ConfigError
/// where no limit is set, and where not even the shortest sequence that the layout takes fits. `allocator`: of the device, whose reserve counts then.
LongestSequence longest_sequence(const Config& config, int world, const std::optional<DeviceAllocator>& allocator = std::nullopt);

}  // namespace tessera::plan
