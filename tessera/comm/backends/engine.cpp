#include "tessera/comm/backends/engine.h"

#include <algorithm>

#include <fmt/ranges.h>

#include "tessera/core/error.h"

namespace tessera::comm {

std::vector<std::string> engine_names() { return {"gloo"}; }

void check_engine_name(const std::string& backend) {
  const auto names = engine_names();
  require(backend == "auto" || std::find(names.begin(), names.end(), backend) != names.end(), "comm.backend = ", backend,
          ": this build has no such backend; it has auto, ", fmt::format("{}", fmt::join(names, ", ")));
}

int64_t scratch_bytes(const std::string& backend, const Call& call) {
  check_engine_name(backend);
  return gloo_scratch_bytes(call);
}

std::unique_ptr<Engine> make_engine(const std::string& backend, const std::string& interface) {
  check_engine_name(backend);
  return make_gloo_engine(interface);
}

}  // namespace tessera::comm
