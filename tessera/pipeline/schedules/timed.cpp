#include "tessera/pipeline/schedules/timed.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <sstream>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tessera/core/json_integer.h"
#include "tessera/core/json_reason.h"
#include "tessera/core/text_file.h"
#include "tessera/pipeline/schedules/check.h"
#include "tessera/pipeline/schedules/events.h"

namespace tessera::schedules {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMostStages = 100'000, kMostEvents = 10'000'000;  // beyond what any pipeline has: a file that says more is damaged

/// Lists of numbers, one number an action.
std::vector<std::vector<double>> numbers_in(const Json& json, const char* key, const Schedule& schedule) {
  const auto lists = json.at(key).get<std::vector<std::vector<double>>>();
  require(lists.size() == schedule.actions.size(), key, " has another number of ranks than actions");
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    require(lists[rank].size() == schedule.actions[rank].size(), key, " of rank ", rank, " has ", lists[rank].size(), " entries for ",
            schedule.actions[rank].size(), " actions");
    for (const double number : lists[rank]) require(std::isfinite(number), key, " of rank ", rank, " has a number that is not finite");
  }
  return lists;
}

Timeline timeline_in(const Json& json, const Schedule& schedule) {
  const Json& lists = json.at("timeline");
  require(lists.size() == schedule.actions.size(), "timeline has another number of ranks than actions");
  Timeline timeline(lists.size());
  for (size_t rank = 0; rank < lists.size(); ++rank) {
    require(lists[rank].size() == schedule.actions[rank].size(), "timeline of rank ", rank, " has ", lists[rank].size(), " spans for ",
            schedule.actions[rank].size(), " actions");
    double last = -INFINITY;
    for (const Json& span : lists[rank]) {
      const auto [start, end] = span.get<std::array<double, 2>>();
      require(std::isfinite(start) && std::isfinite(end) && start <= end && start >= last, "timeline of rank ", rank, " goes back in time");
      timeline[rank].push_back({start, end});
      last = start;
    }
  }
  return timeline;
}

Schedule schedule_in(const Json& json) {
  Schedule schedule{.name = json.at("name").get<std::string>(),
                    .micro_batches = static_cast<int>(to_integer(json.at("micro_batches"), "micro_batches", 0, std::numeric_limits<int>::max())),
                    .rank_of = {},
                    .actions = {}};
  const auto ranks = json.at("actions").size();
  const std::vector<int64_t> rank_of = to_integers(json.at("rank_of_stage"));
  require(ranks > 0 && static_cast<int64_t>(ranks) <= kMostStages && std::ssize(rank_of) <= kMostStages && schedule.micro_batches > 0 &&
              int64_t{schedule.micro_batches} * std::ssize(rank_of) <= kMostEvents,
          "no pipeline has ", ranks, " ranks, ", rank_of.size(), " stages and ", schedule.micro_batches, " micro-batches");
  for (const int64_t rank : rank_of) {
    require(rank >= 0 && rank < static_cast<int64_t>(ranks), "rank_of_stage names rank ", rank, " of ", ranks);
    schedule.rank_of.push_back(static_cast<int>(rank));
  }
  for (const Json& list : json.at("actions")) {
    RankActions& actions = schedule.actions.emplace_back();
    for (const Json& text : list) {
      const Action& action = actions.emplace_back(parse_action(text.get<std::string>()));
      for (const Action& part : parts(action)) {
        require(part.stage >= 0 && part.stage < schedule.stages() && part.micro_batch >= 0 && part.micro_batch < schedule.micro_batches, to_string(action),
                " is of another schedule: this one has ", schedule.stages(), " stages and ", schedule.micro_batches, " micro-batches");
      }
    }
  }
  if (const auto problem = find_problem(schedule)) throw ConfigError(problem->what);
  return schedule;
}

double half_or(double measured, double whole) { return measured > 0 ? measured : whole / 2; }

}  // namespace

Json to_json(const Timed& timed) {
  const auto& [schedule, timeline, asked, collectives, step, first] = timed;
  const Measures measures = measure(schedule, timeline);
  Json actions = Json::array(), spans = Json::array();
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    Json texts = Json::array(), times = Json::array();
    for (const auto& action : schedule.actions[rank]) texts.push_back(to_string(action));
    for (const auto& span : timeline[rank]) times.push_back({span.start, span.end});
    actions.push_back(std::move(texts));
    spans.push_back(std::move(times));
  }
  Json json{{"name", schedule.name},
            {"stages", schedule.ranks()},
            {"micro_batches", schedule.micro_batches},
            {"rank_of_stage", schedule.rank_of},
            {"makespan", measures.makespan},
            {"bubble_fraction", measures.bubble_fraction},
            {"bubble_over_ideal", measures.bubble_over_ideal},
            {"span_bubble_rate", measures.span_bubble_rate},
            {"peak_activations", measures.peak_activations},
            {"weight_versions", measures.weight_versions},
            {"actions", std::move(actions)},
            {"timeline", std::move(spans)}};
  if (timed.measured()) json.update({{"step", step}, {"rank", first}, {"unit", "ms"}, {"asked", asked}, {"collectives", collectives}});
  return json;
}

Timed timed_from_json(const Json& json, const std::string& origin) {
  try {
    Timed timed{.schedule = schedule_in(json)};
    timed.timeline = timeline_in(json, timed.schedule);
    if (!json.contains("asked")) return timed;
    timed.asked = numbers_in(json, "asked", timed.schedule);
    timed.collectives = numbers_in(json, "collectives", timed.schedule);
    timed.step = to_integer(json.at("step"), "step", 0, std::numeric_limits<int64_t>::max());
    timed.rank = static_cast<int>(to_integer(json.at("rank"), "rank", 0, std::numeric_limits<int>::max()));
    return timed;
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(tessera::detail::concat(origin, ": is no timeline of a pipeline: ", json_reason(error),
                                              "; name the folder of a run with log.timeline_every, or its timeline.jsonl"));
  } catch (const ConfigError& error) {
    throw ConfigError(tessera::detail::concat(origin, ": ", error.what()));
  }
}

std::filesystem::path timeline_file(const std::string& from) {
  std::error_code ignored;
  const bool is_run = std::filesystem::is_directory(from, ignored);
  const auto file = is_run ? std::filesystem::path(from) / "timeline.jsonl" : std::filesystem::path(from);
  require(std::filesystem::is_regular_file(file, ignored), from, is_run ? ": holds no timeline.jsonl" : ": there is no such run or file",
          "; a run writes its timeline with --set log.timeline_every=1");
  return file;
}

Timed read_timeline(const std::string& from, const std::optional<int64_t>& step, const std::optional<int>& rank) {
  const auto file = timeline_file(from);
  std::istringstream in(read_text_file(file.string(), file));
  std::optional<Timed> found;
  std::vector<std::string> there;
  int number = 0;
  for (std::string line; std::getline(in, line);) {
    ++number;
    const Json object = Json::parse(line, nullptr, false);
    if (object.is_discarded() && in.eof() && number > 1) break;  // a last line that was cut
    const auto origin = tessera::detail::concat(file.string(), ", line ", number);
    require(!object.is_discarded(), origin, ": is no JSON; expected what `tessera schedule --json` prints, or a run's timeline.jsonl");
    Timed timed = timed_from_json(object, origin);
    there.push_back(fmt::format("step {} of rank {}", timed.step, timed.rank));
    if (timed.step != step.value_or(timed.step) || timed.rank != rank.value_or(timed.rank)) continue;
    if (!found || timed.step > found->step || (timed.step == found->step && timed.rank < found->rank)) found = std::move(timed);
  }
  require(!there.empty(), file.string(), ": is empty: no step has been timed");
  if (there.size() > 8) there.erase(there.begin() + 4, there.end() - 4);
  require(found.has_value(), file.string(), ": no pipeline of", step ? fmt::format(" --step {}", *step) : "", rank ? fmt::format(" --rank {}", *rank) : "",
          "; there are ", fmt::format("{}", fmt::join(there, ", ")));
  return std::move(*found);
}

std::vector<StageCosts> costs_of(const Timed& timed) {
  std::map<std::pair<int, Kind>, std::pair<double, int>> sums;
  for (int rank = 0; rank < timed.schedule.ranks(); ++rank) {
    for (size_t i = 0; i < timed.timeline[rank].size(); ++i) {
      const Action& action = timed.schedule.actions[rank][i];
      if (!action.occupies() || action.kind == Kind::Overlap) continue;  // what ran together is no measure of what runs alone
      auto& [sum, count] = sums[{action.stage, action.kind}];
      sum += timed.timeline[rank][i].end - timed.timeline[rank][i].start;
      ++count;
    }
  }
  const auto mean = [&](int stage, Kind kind) {
    const auto found = sums.find({stage, kind});
    return found == sums.end() ? 0 : found->second.first / found->second.second;
  };
  std::vector<StageCosts> costs;
  for (int stage = 0; stage < timed.schedule.stages(); ++stage) {
    const double whole = mean(stage, Kind::Backward);
    StageCosts& cost = costs.emplace_back(StageCosts{.forward = mean(stage, Kind::Forward),
                                                     .backward = whole,
                                                     .backward_input = half_or(mean(stage, Kind::BackwardInput), whole),
                                                     .backward_weight = half_or(mean(stage, Kind::BackwardWeight), whole),
                                                     .update = mean(stage, Kind::Update)});
    if (whole == 0) cost.backward = cost.backward_input + cost.backward_weight;
  }
  return costs;
}

double message_time(const Timed& timed) {
  if (!timed.measured()) return 0;
  const detail::EventIndex index(timed.schedule);
  std::vector<std::pair<int, double>> made(index.size());  // by whom and when
  for (int rank = 0; rank < timed.schedule.ranks(); ++rank) {
    for (size_t i = 0; i < timed.timeline[rank].size(); ++i) {
      for (const auto& event : detail::brings(timed.schedule.actions[rank][i])) made[index(event)] = {rank, timed.timeline[rank][i].end};
    }
  }
  std::vector<double> times;
  for (int rank = 0; rank < timed.schedule.ranks(); ++rank) {
    for (size_t i = 0; i < timed.timeline[rank].size(); ++i) {
      if (!timed.schedule.actions[rank][i].computes()) continue;
      for (const auto& event : detail::needs(timed.schedule, timed.schedule.actions[rank][i], /*through_messages=*/false)) {
        const auto& [from, end] = made[index(event)];
        if (from != rank && end > timed.asked[rank][i]) times.push_back(timed.timeline[rank][i].start - end);
      }
    }
  }
  if (times.empty()) return 0;
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::ranges::nth_element(times, middle);
  return std::max(0.0, *middle);
}

Costs measured_costs(const Timed& timed) {
  Costs costs{.communication = message_time(timed), .stages = costs_of(timed)};
  bool any_backward = false;
  for (size_t stage = 0; stage < costs.stages.size(); ++stage) {
    require(costs.stages[stage].forward > 0, "the forwards of stage ", stage,
            " have no span, or empty ones, in this timeline; take one of a step that has run (log.timeline_every)");
    any_backward = any_backward || costs.stages[stage].backward > 0;
  }
  require(any_backward, "no backward has a span that is not empty in this timeline; take one of a step that has run (log.timeline_every)");
  return costs;
}

std::vector<RankShare> shares_of(const Timed& timed) {
  const double makespan = measure(timed.schedule, timed.timeline).makespan;
  std::vector<RankShare> shares;
  for (int rank = 0; rank < timed.schedule.ranks(); ++rank) {
    RankShare& share = shares.emplace_back();
    for (size_t i = 0; i < timed.timeline[rank].size(); ++i) {
      if (!timed.schedule.actions[rank][i].occupies()) continue;
      const Span& span = timed.timeline[rank][i];
      share.busy += span.end - span.start;
      if (!timed.measured()) continue;
      share.collectives += timed.collectives[rank][i];
      if (i > 0) share.waited += span.start - timed.asked[rank][i];
    }
    share.bubble = makespan > 0 ? std::max(0.0, 1 - share.busy / makespan) : 0;
  }
  return shares;
}

}  // namespace tessera::schedules
