#pragma once

#include <cstdint>

#include "tessera/config/config.h"

namespace tessera::plan {

/// A length of sequences, and what the rank that needs most has at its peak with it.
struct LongestSequence {
  int64_t seq_len = 0;
  int64_t peak = 0;  ///< bytes
};

/// The longest data.seq_len with which no rank needs more than run.memory_limit_bytes, to within 1/256 of it, by dry runs: some twenty of them. The batch
/// stays, and so do all other settings but model.max_seq_len, which grows along where it does not stand for what was trained (from_hf). Throws ConfigError
/// where no limit is set, and where not even the shortest sequence that the layout takes fits.
LongestSequence longest_sequence(const Config& config, int world);

}  // namespace tessera::plan
