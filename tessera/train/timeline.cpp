#include "tessera/train/timeline.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/gather_json.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/clock_offset.h"

namespace tessera {
namespace {

using nlohmann::json;

/// Of one rank, by the clock of the world's first.
json laps_of(const pipeline::StepTimes& mine, double offset) {
  json actions = json::array(), times = json::array(), asked = json::array(), collectives = json::array();
  for (const pipeline::Lap& lap : mine.laps) {
    actions.push_back(to_string(lap.action));
    times.push_back({lap.start + offset, lap.end + offset});
    asked.push_back(lap.asked + offset);
    collectives.push_back(lap.collectives);
  }
  return {{"actions", actions}, {"timeline", times}, {"asked", asked}, {"collectives", collectives}};
}

/// Seconds of a clock that has run for days become milliseconds from where the step began, to the nanosecond.
schedules::Timed merged(const pipeline::StepTimes& mine, const std::vector<json>& ranks) {
  double began = std::numeric_limits<double>::infinity();
  for (const json& rank : ranks) {
    for (const json& span : rank.at("timeline")) began = std::min(began, span.at(0).get<double>());
  }
  const auto milliseconds = [](double seconds) { return std::round(seconds * 1e9) / 1e6; };
  schedules::Timed timed{.schedule = {.name = mine.schedule, .micro_batches = mine.micro_batches, .rank_of = mine.rank_of, .actions = {}}};
  for (const json& rank : ranks) {
    auto& actions = timed.schedule.actions.emplace_back();
    auto& spans = timed.timeline.emplace_back();
    auto& asked = timed.asked.emplace_back();
    auto& collectives = timed.collectives.emplace_back();
    for (size_t i = 0; i < rank.at("actions").size(); ++i) {
      actions.push_back(schedules::parse_action(rank["actions"][i].get<std::string>()));
      spans.push_back({milliseconds(rank["timeline"][i][0].get<double>() - began), milliseconds(rank["timeline"][i][1].get<double>() - began)});
      asked.push_back(milliseconds(rank["asked"][i].get<double>() - began));
      collectives.push_back(milliseconds(rank["collectives"][i].get<double>()));
    }
  }
  return timed;
}

}  // namespace

std::shared_ptr<const std::vector<schedules::Timed>> gather_timelines(const comm::Group& world, const comm::Group& pipeline, pipeline::StepTimes& mine,
                                                                      int64_t step) {
  const comm::CallSite site("timeline");
  mine.read();
  const auto ranks = checkpoint::gather_json(pipeline, laps_of(mine, comm::clock_offset(world, pipeline::lap_clock)));
  json whole;
  if (pipeline.rank() == 0) {
    schedules::Timed timed = merged(mine, ranks);
    timed.step = step;
    timed.rank = world.rank();
    whole = to_json(timed);
  }
  const auto all = checkpoint::gather_json(world, whole);
  if (world.rank() > 0) return nullptr;
  auto timelines = std::make_shared<std::vector<schedules::Timed>>();
  for (const json& each : all) {
    if (!each.is_null()) timelines->push_back(schedules::timed_from_json(each, "a pipeline of this run"));
  }
  return timelines;
}

}  // namespace tessera
