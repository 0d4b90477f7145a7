#include "tessera/config/defaults.h"

namespace tessera {

std::map<std::string, std::string> followed_defaults(const Config& config) {
  std::map<std::string, std::string> followed;
  const auto add = [&](const char* key, const auto& value, const char* other, const auto& others) {
    if (!config.given.contains(key) && value == others) followed.emplace(key, other);
  };
  if (config.model.from_hf.empty()) {
    add("model.max_seq_len", config.model.max_seq_len, "data.seq_len", config.data.seq_len);
    add("model.kv_heads", config.model.kv_heads, "model.heads", config.model.heads);
  }
  add("data.seed", config.data.seed, "run.seed", config.run.seed);
  return followed;
}

}  // namespace tessera
