#include "tessera/comm/backends/environment_defaults.h"

#include <algorithm>
#include <cstdlib>

namespace tessera::comm {

EnvironmentDefaults::EnvironmentDefaults(const std::vector<Default>& defaults) {
  for (const auto& [names, value] : defaults) {
    if (std::ranges::any_of(names, [](const std::string& name) { return std::getenv(name.c_str()) != nullptr; })) continue;
    if (setenv(names.front().c_str(), value.c_str(), /*overwrite=*/0) == 0) set_.push_back(names.front());
  }
}

EnvironmentDefaults::~EnvironmentDefaults() {
  for (const auto& name : set_) unsetenv(name.c_str());
}

}  // namespace tessera::comm
