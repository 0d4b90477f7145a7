#include <charconv>
#include <cstdlib>

#include "tessera/comm/world.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

// Reads numbers with the variable's name in every refusal.
class Variables {
 public:
  explicit Variables(const Lookup& lookup) : lookup_(lookup) {}

  bool has(const std::string& name) const { return lookup_(name).has_value(); }
  std::string text(const std::string& name) const { return lookup_(name).value_or(""); }

  int number(const std::string& name, int low, int64_t high, const std::string& rule) const {
    const auto value = text(name);
    int64_t parsed = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), parsed);
    require(!value.empty() && error == std::errc() && end == value.data() + value.size(), name, " = \"", value, "\" is not a whole number; it must be ", rule);
    require(parsed >= low && parsed <= high, name, " = ", parsed, " must be ", rule);
    return static_cast<int>(parsed);
  }

 private:
  const Lookup& lookup_;
};

}  // namespace

Environment read_environment(const Lookup& lookup) {
  constexpr int kMostRanks = 1 << 24;
  const Variables variables(lookup);
  Environment environment;
  for (const auto* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}) environment.launched |= variables.has(name);
  if (!environment.launched) return environment;

  const std::string way_out = "; set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, or none of them to run alone";
  for (const auto* name : {"RANK", "WORLD_SIZE"}) require(variables.has(name), name, " is not set while other variables of a launcher are", way_out);

  environment.size = variables.number("WORLD_SIZE", 1, kMostRanks, "at least 1");
  environment.rank = variables.number("RANK", 0, environment.size - 1, detail::concat("between 0 and WORLD_SIZE - 1 = ", environment.size - 1));
  environment.local_size = environment.size;
  if (variables.has("LOCAL_WORLD_SIZE")) {
    environment.local_size = variables.number("LOCAL_WORLD_SIZE", 1, environment.size, detail::concat("between 1 and WORLD_SIZE = ", environment.size));
  }
  environment.local_rank = environment.rank % environment.local_size;
  if (variables.has("LOCAL_RANK")) {
    environment.local_rank =
        variables.number("LOCAL_RANK", 0, environment.local_size - 1, detail::concat("between 0 and LOCAL_WORLD_SIZE - 1 = ", environment.local_size - 1));
  }
  if (variables.has("TORCHELASTIC_RESTART_COUNT")) {
    environment.restart_count = variables.number("TORCHELASTIC_RESTART_COUNT", 0, kMostRanks, "0 or more");
  }
  const auto agent = variables.text("TORCHELASTIC_USE_AGENT_STORE");
  environment.agent_store = agent == "True" || agent == "true" || agent == "1";

  if (environment.size == 1) return environment;  // meets nobody
  for (const auto* name : {"MASTER_ADDR", "MASTER_PORT"}) {
    require(!variables.text(name).empty(), name, " is not set while WORLD_SIZE = ", environment.size, way_out);
  }
  environment.master_addr = variables.text("MASTER_ADDR");
  environment.master_port = variables.number("MASTER_PORT", 1, 65535, "a port, 1 to 65535");
  return environment;
}

Environment read_environment() {
  return read_environment([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    return value ? std::optional<std::string>(value) : std::nullopt;
  });
}

}  // namespace tessera::comm
