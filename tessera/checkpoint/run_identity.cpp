#include "tessera/checkpoint/run_identity.h"

#include <algorithm>
#include <utility>

#include "tessera/checkpoint/json_file.h"
#include "tessera/core/drawn_name.h"
#include "tessera/core/json_integer.h"

namespace tessera::checkpoint {

RunIdentity RunIdentity::fresh(std::string job) { return {.run = drawn_name(), .start = drawn_name(), .job = std::move(job), .lineage = {}}; }

RunIdentity RunIdentity::continued(int64_t step, std::string job) const {
  RunIdentity next{.run = run, .start = drawn_name(), .job = std::move(job), .lineage = lineage};
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
  return {{"run", identity.run}, {"start", identity.start}, {"job", identity.job}, {"lineage", std::move(lineage)}};
}

RunIdentity run_identity_from(const nlohmann::json& json) {
  RunIdentity identity{
      .run = json.at("run").get<std::string>(), .start = json.at("start").get<std::string>(), .job = json.value("job", std::string()), .lineage = {}};
  for (const auto& ancestor : json.at("lineage")) identity.lineage.push_back({ancestor.at(0).get<std::string>(), to_integer(ancestor.at(1))});
  return identity;
}

}  // namespace tessera::checkpoint
