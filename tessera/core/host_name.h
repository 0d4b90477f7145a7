#pragma once

#include <string>

namespace tessera {

/// What this host calls itself; `otherwise` where it has no name.
std::string host_name(const std::string& otherwise);

/// What this host's processor is called; empty where that cannot be read.
std::string processor_name();

}  // namespace tessera
