#pragma once

#include <string>
#include <vector>

namespace tessera::comm {

/// Gives variables of the environment a value while something that reads them is made, and takes it back: what is made later, or by the program itself, finds
/// its own. One that is set already, by any of its names, is left alone. Not for use while other threads read the environment.
class EnvironmentDefaults {
 public:
  struct Default {
    std::vector<std::string> names;  ///< the one to set first, then older ones
    std::string value;
  };
  explicit EnvironmentDefaults(const std::vector<Default>& defaults);
  ~EnvironmentDefaults();
  EnvironmentDefaults(const EnvironmentDefaults&) = delete;
  EnvironmentDefaults& operator=(const EnvironmentDefaults&) = delete;

 private:
  std::vector<std::string> set_;
};

}  // namespace tessera::comm
