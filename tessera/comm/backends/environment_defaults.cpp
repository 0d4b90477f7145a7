#include "tessera/comm/backends/environment_defaults.h"

#include <algorithm>
#include <cstdlib>

namespace tessera::comm {

void set_environment_defaults(const std::vector<EnvironmentDefault>& defaults) {
  for (const auto& [names, value] : defaults) {
    if (std::ranges::any_of(names, [](const std::string& name) { return std::getenv(name.c_str()) != nullptr; })) continue;
    setenv(names.front().c_str(), value.c_str(), /*overwrite=*/0);
  }
}

}  // namespace tessera::comm
