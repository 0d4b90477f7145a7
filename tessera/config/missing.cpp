#include "tessera/config/missing.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tessera/config/detail.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

/// A setting: refused unless it is not set, or its value is one of `present`.
struct Setting {
  std::string key;
  std::string value;
  std::vector<std::string> present;
  std::string technique;
};

}  // namespace

void refuse_missing_techniques(const Config& config) {
  const std::vector<Setting> settings = {
      {"offload.params", config.offload.params.everywhere, {"device", "host"}, "offloading to disk"},
      {"offload.gradients", config.offload.gradients.everywhere, {"device", "host"}, "offloading to disk"},
  };
  for (const auto& [key, value, present, technique] : settings) {
    if (value.empty() || std::find(present.begin(), present.end(), value) != present.end()) continue;
    std::string way_out;
    for (const auto& choice : present) way_out += (way_out.empty() ? "" : " or ") + choice;
    throw ConfigError(key + " = " + value + ": " + technique + " is not part of this build; set " + key + " = " + way_out);
  }
  for (const auto& [key, places] : {std::pair{"offload.params", &config.offload.params},
                                    {"offload.gradients", &config.offload.gradients},
                                    {"offload.optimizer", &config.offload.optimizer}}) {
    require(places->by_pattern.empty(), key, ": a table of patterns is not part of this build; give one place for all of them, such as ", key, " = host");
  }
}

}  // namespace tessera
