#pragma once

#include <string>
#include <vector>

namespace tessera::comm {

/// A variable of the environment by its names, the one to set first, then older ones.
struct EnvironmentDefault {
  std::vector<std::string> names;
  std::string value;
};

/// Gives variables a value, for the life of the process. One that is set already, by any of its names, is left alone. The environment has no lock: for once,
/// before there is what reads them.
void set_environment_defaults(const std::vector<EnvironmentDefault>& defaults);

}  // namespace tessera::comm
