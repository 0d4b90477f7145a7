#include "tessera/plan/scaling.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/core/format.h"

// The size of a step is a constraint: with it fixed, data ranks end where each has a sequence, and what is left to cut is layers, matrices and sequences, each
// at a price. The search knows the prices; here it is asked once for each number of ranks, without mesh.cp and, where that no longer helps, with it.

namespace tessera::plan {
namespace {

std::optional<Tried> fastest(const Config& config, int world, const Machine& machine, const ScalingOptions& options, bool cuts_sequences) {
  SearchOptions search{.patience = std::chrono::hours(1),
                       .most_runs = options.runs,
                       .fewest_columns = options.fewest_columns,
                       .driven = options.driven,
                       .allocator = options.allocator,
                       .on_the_host = false};
  search.admits = [cuts_sequences](const LayoutChoice& choice) { return (choice.cp > 1) == cuts_sequences; };
  if (options.progress) {
    search.progress = [&](const std::string& text) { options.progress(fmt::format("{} ranks{}: {}", world, cuts_sequences ? " with cp" : "", text)); };
  }
  const LayoutSearch found = search_layouts(config, world, machine, search);
  return found.best() != nullptr ? std::optional(*found.best()) : std::nullopt;
}

std::optional<double> seconds_of(const std::optional<Tried>& tried) { return tried ? std::optional(tried->time.seconds) : std::nullopt; }

std::string percent(double share) { return fmt::format("{:.0f}%", 100 * share); }

std::string layout_of(const Tried& tried, int ranks) { return to_string(tried.choice, ranks); }

}  // namespace

std::optional<size_t> knee_of(const std::vector<std::optional<double>>& seconds) {
  for (size_t i = 0; i + 1 < seconds.size(); ++i) {
    if (!seconds[i]) continue;
    if (!seconds[i + 1] || *seconds[i + 1] > kHelps * *seconds[i]) return i;
  }
  return std::nullopt;
}

void check_curve_world(int world) { require(world >= 2, "--world = ", world, ": a curve goes up to 2 ranks at least"); }

Scaling strong_scaling(const Config& config, const Machine& machine, const ScalingOptions& options) {
  check_curve_world(options.world);
  Scaling scaling{.sequences = config.batch.global_size, .seq_len = config.data.seq_len, .beside = options.beside};
  std::vector<int> ranks;
  for (int count = options.world; count >= 1; count /= 2) ranks.push_back(count);
  std::ranges::reverse(ranks);
  std::vector<std::optional<double>> seconds;
  for (const int count : ranks) {
    scaling.points.push_back({.ranks = count, .whole = fastest(config, count, machine, options, /*cuts_sequences=*/false)});
    seconds.push_back(seconds_of(scaling.points.back().whole));
  }
  require(std::ranges::any_of(seconds, &std::optional<double>::has_value), "--curve = ranks: no layout of 1 to ", options.world,
          " ranks fits and deals a step of batch.global_size = ", scaling.sequences, "; raise --world, or name a device with more memory");
  const auto knee = knee_of(seconds);
  if (!knee) return scaling;
  scaling.knee = ranks[*knee];
  for (Scaling::Point& point : scaling.points) {
    if (point.ranks >= std::max(2, *scaling.knee)) point.cut = fastest(config, point.ranks, machine, options, /*cuts_sequences=*/true);
  }
  return scaling;
}

Curves curves_of(const Scaling& scaling) {
  Curves curves{.name = "ranks"};
  for (const auto unit : {Curves::Unit::Seconds, Curves::Unit::TokensPerSecond}) {
    const bool seconds = unit == Curves::Unit::Seconds;
    Curves::Panel panel{.title = fmt::format("{} of {} sequence{}, over ranks", seconds ? "step" : "tokens/s of a rank in a step", scaling.sequences,
                                             scaling.sequences == 1 ? "" : "s"),
                        .x = "ranks",
                        .unit = unit};
    const auto add = [&](const char* name, std::optional<Tried> Scaling::Point::* which) {
      Curves::Line line{.name = name};
      for (const Scaling::Point& point : scaling.points) {
        if (!(point.*which)) continue;
        const double step = (point.*which)->time.seconds;
        line.points.emplace_back(point.ranks, seconds ? step : scaling.tokens() / step / point.ranks);
      }
      if (!line.points.empty()) panel.lines.push_back(std::move(line));
    };
    add("whole sequences", &Scaling::Point::whole);
    add("sequences cut (cp)", &Scaling::Point::cut);
    curves.panels.push_back(std::move(panel));
  }
  return curves;
}

std::vector<std::string> findings_of(const Scaling& scaling) {
  const auto& points = scaling.points;
  if (!scaling.knee) {
    const auto last = std::ranges::find_if(points.rbegin(), points.rend(), [](const auto& point) { return point.whole.has_value(); });
    if (last == points.rend()) return {};
    return {
        fmt::format("up to {} ranks every doubling shortens the step by a quarter or more: {} there", last->ranks, format_duration(last->whole->time.seconds))};
  }
  std::vector<std::string> findings;
  const auto at = std::ranges::find(points, *scaling.knee, &Scaling::Point::ranks);
  const auto next = std::next(at);
  if (next->whole) {
    const double shorter = 1 - next->whole->time.seconds / at->whole->time.seconds;
    findings.push_back(fmt::format("adding ranks stops helping at {}: {} take {} for the step, {} {} than {} ({}; half would be ideal)", at->ranks, next->ranks,
                                   format_duration(next->whole->time.seconds), percent(std::abs(shorter)), shorter < 0 ? "more" : "less", at->ranks,
                                   format_duration(at->whole->time.seconds)));
  } else {
    findings.push_back(fmt::format("adding ranks stops helping at {} ({}): no layout of {} ranks deals them {} sequence{} and fits", at->ranks,
                                   format_duration(at->whole->time.seconds), next->ranks, scaling.sequences, scaling.sequences == 1 ? "" : "s"));
  }
  const double before = at->whole->time.seconds;
  const Scaling::Point* last = nullptr;
  double reached = before;
  for (auto point = at; point != points.end(); ++point) {
    if (!point->cut || (point->whole && point->whole->time.seconds <= point->cut->time.seconds)) continue;
    if (point->cut->time.seconds < reached) reached = point->cut->time.seconds, last = &*point;
  }
  if (last == nullptr) {
    findings.emplace_back("mesh.cp buys nothing from there on: with it the step is no shorter than without");
    return findings;
  }
  std::string beside = last->whole ? fmt::format(", {} less than without it", percent(1 - reached / last->whole->time.seconds)) : ", where nothing else runs";
  findings.push_back(fmt::format("mesh.cp buys a step of {} on {} ranks ({}){}: {:.2g} times as fast as at {} ranks, for {:.2g} times the ranks",
                                 format_duration(reached), last->ranks, layout_of(*last->cut, last->ranks), beside, before / reached, at->ranks,
                                 static_cast<double>(last->ranks) / at->ranks));
  return findings;
}

nlohmann::json to_json(const Scaling& scaling) {
  nlohmann::json json = to_json(curves_of(scaling)), points = nlohmann::json::array();
  for (const Scaling::Point& point : scaling.points) {
    nlohmann::json one{{"ranks", point.ranks}};
    for (const auto& [name, tried] : {std::pair("whole", &point.whole), std::pair("cut", &point.cut)}) {
      if (!*tried) continue;
      one[name] = {{"layout", layout_of(**tried, point.ranks)}, {"set", settings_of((*tried)->choice, point.ranks, scaling.beside)},
                   {"step_s", (*tried)->time.seconds},          {"tokens_per_second", scaling.tokens() / (*tried)->time.seconds / point.ranks},
                   {"peak_bytes", (*tried)->peak_bytes},        {"needed_bytes", (*tried)->needed_bytes}};
    }
    points.push_back(std::move(one));
  }
  json["sequences"] = scaling.sequences;
  json["points"] = std::move(points);
  json["findings"] = findings_of(scaling);
  if (scaling.knee) json["knee"] = *scaling.knee;
  return json;
}

std::string to_string(const Scaling& scaling) {
  size_t width = 6;
  for (const Scaling::Point& point : scaling.points) {
    for (const auto* tried : {&point.whole, &point.cut}) {
      if (*tried) width = std::max(width, layout_of(**tried, point.ranks).size());
    }
  }
  std::string out =
      fmt::format("a step of {} sequence{} of {} tokens, in the best layout of each number of ranks\n\n{:>8}  {:<{}}  {:>9}  {:>9}  {:>13}\n",
                  scaling.sequences, scaling.sequences == 1 ? "" : "s", scaling.seq_len, "ranks", "layout", width, "memory", "step", "tokens/s/rank");
  for (const Scaling::Point& point : scaling.points) {
    if (!point.whole && !point.cut) out += fmt::format("{:>8}  none fits\n", point.ranks);
    for (const auto* tried : {&point.whole, &point.cut}) {
      if (!*tried) continue;
      const double step = (*tried)->time.seconds;
      out += fmt::format("{:>8}  {:<{}}  {:>9}  {:>9}  {:>13.0f}{}\n", point.ranks, layout_of(**tried, point.ranks), width,
                         format_bytes((*tried)->needed_bytes), format_duration(step), scaling.tokens() / step / point.ranks,
                         tried == &point.whole && scaling.knee == point.ranks ? "  <- the knee" : "");
    }
  }
  out += "\n";
  for (const auto& finding : findings_of(scaling)) out += "- " + finding + "\n";
  return out;
}

}  // namespace tessera::plan
