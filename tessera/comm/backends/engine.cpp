#include "tessera/comm/backends/engine.h"

#include <algorithm>
#include <array>

#include <fmt/ranges.h>

#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

struct Entry {
  std::string_view name;
  std::unique_ptr<Engine> (*make)(const EngineOptions& options);
  int64_t (*scratch)(const Call& call);
};

// Every backend of this build.
constexpr std::array kEngines{
    Entry{"auto", make_gloo_engine, gloo_scratch_bytes},
    Entry{"gloo", make_gloo_engine, gloo_scratch_bytes},
};

const Entry& find(const std::string& backend) {
  const auto* entry = std::find_if(kEngines.begin(), kEngines.end(), [&](const Entry& e) { return e.name == backend; });
  require(entry != kEngines.end(), "comm.backend = ", backend, ": this build has no such backend; it has ", fmt::format("{}", fmt::join(engine_names(), ", ")));
  return *entry;
}

}  // namespace

std::vector<std::string> engine_names() {
  std::vector<std::string> names;
  for (const auto& engine : kEngines) names.emplace_back(engine.name);
  return names;
}

void check_engine_name(const std::string& backend) { find(backend); }
int64_t scratch_bytes(const std::string& backend, const Call& call) { return find(backend).scratch(call); }
std::unique_ptr<Engine> make_engine(const EngineOptions& options) { return find(options.backend).make(options); }

}  // namespace tessera::comm
