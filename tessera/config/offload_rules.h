#pragma once

#include <string>

#include "tessera/config/config.h"

namespace tessera {

/// Ranks that share what offload moves.
struct OffloadRanks {
  int cut = 1;     ///< over which parameters that are updated are cut
  int stages = 1;  ///< of a pipeline
};

/// What [offload] asks for, beside the rest of the configuration. Throws ConfigError.
void validate_offload(const Config& config, const OffloadRanks& ranks);

/// Refuses what no table of patterns may say; of a model that is only read, too. Throws ConfigError.
void validate_places(const OffloadConfig& offload);

/// What is said of a pattern of `key` whose place is the device, where it takes back nothing that another sends elsewhere.
std::string idle_exception(const std::string& key, const std::string& pattern);

}  // namespace tessera
