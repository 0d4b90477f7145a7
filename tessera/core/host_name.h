#pragma once

#include <string>

namespace tessera {

/// What this host calls itself; `otherwise` where it has no name.
std::string host_name(const std::string& otherwise);

}  // namespace tessera
