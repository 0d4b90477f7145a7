#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config.h"

namespace tessera::plan {

/// The configuration of a published model, for planning: its shape, its sequence length and a plain recipe around it. Nothing where there is none of that name.
std::optional<Config> preset(const std::string& name, const std::vector<std::string>& sets);

/// Every preset's name.
std::vector<std::string> preset_names();

}  // namespace tessera::plan
