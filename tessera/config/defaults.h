#pragma once

#include <map>
#include <string>

#include "tessera/config/config.h"

namespace tessera {

/// Keys of a resolved configuration that nobody gave and that took over another key's value ("data.seed" -> "run.seed"): where such a value is refused, the
/// other key is to blame.
std::map<std::string, std::string> followed_defaults(const Config& config);

}  // namespace tessera
