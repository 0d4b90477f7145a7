#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config.h"

namespace tessera::plan {

/// A model that is known by a name, or by its number of parameters alone, with a plain recipe around it, for planning.
struct Preset {
  Config config;
  double parameters = 0;  ///< that its name speaks of: 7e9 for "7b"; its shape may have some percent more or less
  std::string source;     ///< of the shape
};

/// Of a published model ("7b"): its shape and its sequence length. Of a plain count ("7e9", "125000000"): a LLaMA with the proportions of the published ones
/// whose count is nearest, 32,000 words, sequences of 2,048. Nothing where it is neither. Throws ConfigError for a count that no such shape has (below 1e7 or
/// above 1e14).
std::optional<Preset> preset(const std::string& name, const std::vector<std::string>& sets);

/// Every preset's name.
std::vector<std::string> preset_names();

}  // namespace tessera::plan
