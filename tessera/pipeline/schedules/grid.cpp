#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "tessera/pipeline/schedules/picture.h"

namespace tessera::schedules {
namespace {

/// The largest time that all starts and ends are multiples of, within `accuracy`.
double common_unit(const Timeline& timeline, double accuracy) {
  double unit = 0;
  const auto take = [&](double time) {
    double a = std::max(unit, time), b = std::min(unit, time);
    while (b > accuracy) {
      const double left = std::fmod(a, b);
      a = b;
      b = b - left < accuracy ? 0 : left;
    }
    unit = a;
  };
  for (const auto& spans : timeline) {
    for (const Span& span : spans) {
      take(span.start);
      take(span.end);
    }
  }
  return unit;
}

std::string short_name(const Schedule& schedule, const Action& action) {
  if (action.kind == Kind::Overlap) return fmt::format("{}F{}&{}B{}", action.stage, action.micro_batch, action.backward_stage, action.backward_micro_batch);
  const auto text = to_string(action);
  return schedule.stages() == schedule.ranks() ? text.substr(std::to_string(action.stage).size()) : text;
}

}  // namespace

std::string grid_of(const Schedule& schedule, const Timeline& timeline, int most_columns) {
  double makespan = 0;
  for (const auto& spans : timeline) {
    if (!spans.empty()) makespan = std::max(makespan, spans.back().end);
  }
  const double unit = common_unit(timeline, 1e-7 * makespan);
  const double columns = unit > 0 ? std::round(makespan / unit) : 0;
  if (columns > most_columns) return fmt::format("(a grid of {:.0f} columns is not drawn: costs that are multiples of each other need fewer)\n", columns);
  std::string text;
  size_t width = 1;
  const auto is_drawn = [](const Action& action, const Span& span) { return action.occupies() && span.end > span.start; };
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (size_t i = 0; i < timeline[rank].size(); ++i) {
      const Action& action = schedule.actions[rank][i];
      if (is_drawn(action, timeline[rank][i])) width = std::max(width, short_name(schedule, action).size());
    }
  }
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    std::vector<std::string> cells(static_cast<size_t>(columns), ".");
    for (size_t i = 0; i < timeline[rank].size(); ++i) {
      if (!is_drawn(schedule.actions[rank][i], timeline[rank][i])) continue;
      const auto begin = std::llround(timeline[rank][i].start / unit), end = std::llround(timeline[rank][i].end / unit);
      for (auto column = begin; column < end; ++column) cells[column] = column == begin ? short_name(schedule, schedule.actions[rank][i]) : "=";
    }
    std::string line = fmt::format("rank {:<{}}", rank, std::to_string(schedule.ranks() - 1).size());
    for (const auto& cell : cells) line += fmt::format(" {:<{}}", cell, width);
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

}  // namespace tessera::schedules
