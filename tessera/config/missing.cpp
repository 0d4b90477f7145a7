#include "tessera/config/missing.h"

#include <algorithm>
#include <string>
#include <vector>

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
  const auto& offload = config.offload;
  const std::vector<Setting> settings = {
      {"offload.params", offload.params, {"device", "host"}, "offloading to disk"},
      {"offload.gradients", offload.gradients, {"device", "host"}, "offloading to disk"},
      {"offload.optimizer", offload.optimizer, {"device", "host"}, "offloading to disk"},
      {"offload.activations", offload.activations, {"device"}, "offloading activations"},
      {"run.graph", config.run.graph ? "true" : "false", {"false"}, "capturing a step"},
  };
  for (const auto& [key, value, present, technique] : settings) {
    if (value.empty() || std::find(present.begin(), present.end(), value) != present.end()) continue;
    std::string way_out;
    for (const auto& choice : present) way_out += (way_out.empty() ? "" : " or ") + choice;
    throw ConfigError(key + " = " + value + ": " + technique + " is not part of this build; set " + key + " = " + way_out);
  }
}

}  // namespace tessera
