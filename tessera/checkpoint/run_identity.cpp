#include "tessera/checkpoint/run_identity.h"

#include <algorithm>
#include <random>

#include "tessera/checkpoint/json_file.h"
#include "tessera/core/hash.h"
#include "tessera/core/json_integer.h"

namespace tessera::checkpoint {
namespace {

std::string draw_name() {
  std::random_device device;
  return to_hex(uint64_t{device()} << 32 | device());
}

}  // namespace

RunIdentity RunIdentity::fresh() { return {.run = draw_name(), .start = draw_name(), .lineage = {}}; }

RunIdentity RunIdentity::continued(int64_t step) const {
  RunIdentity next{.run = run, .start = draw_name(), .lineage = lineage};
  next.lineage.push_back({start, step});
  return next;
}

bool RunIdentity::holds(const RunIdentity& writer, int64_t step) const {
  if (writer.run != run) return false;
  return writer.start == start ||
         std::ranges::any_of(lineage, [&](const Ancestor& ancestor) { return ancestor.start == writer.start && step <= ancestor.step; });
}

bool RunIdentity::descends_from(const RunIdentity& writer, int64_t step) const {
  return writer.run == run && std::ranges::find(lineage, Ancestor{writer.start, step}) != lineage.end();
}

nlohmann::json to_json(const RunIdentity& identity) {
  nlohmann::json lineage = nlohmann::json::array();
  for (const auto& [start, step] : identity.lineage) lineage.push_back({start, step});
  return {{"run", identity.run}, {"start", identity.start}, {"lineage", std::move(lineage)}};
}

RunIdentity run_identity_from(const nlohmann::json& json) {
  RunIdentity identity{.run = json.at("run").get<std::string>(), .start = json.at("start").get<std::string>(), .lineage = {}};
  for (const auto& ancestor : json.at("lineage")) identity.lineage.push_back({ancestor.at(0).get<std::string>(), to_integer(ancestor.at(1))});
  return identity;
}

}  // namespace tessera::checkpoint
