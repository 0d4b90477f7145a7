#include "tessera/train/observers/memory_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <optional>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/log.h"

namespace tessera {

namespace {

/// What was alive from a moment on.
struct Sample {
  double seconds = 0;
  MemoryByCategory alive{};
};

std::vector<Sample> samples_of(const MemoryHistory& history, size_t most) {
  std::vector<Sample> samples{{.seconds = 0, .alive = history.before}};
  for (const auto& event : thin(history.events, history.events.size() / most + 1)) samples.push_back({.seconds = event.seconds, .alive = event.after});
  samples.push_back({.seconds = history.seconds, .alive = samples.back().alive});
  return samples;
}

/// The moment of the peak: its bytes, when, and in words where.
struct Peak {
  MemoryByCategory alive{};
  double seconds = 0;
  std::string where;
  std::optional<size_t> mark{};  ///< of the history's marks, that of its phase
};

Peak peak_of(const MemoryHistory& history) {
  const MemoryEvent* const event = history.peak();
  if (!event) return {.alive = history.before, .seconds = 0, .where = "before the step"};
  Peak peak{.alive = event->after, .seconds = event->seconds, .where = "in the step"};
  for (size_t i = 0; i < history.marks.size(); ++i) {
    if (history.marks[i].index <= event->index) peak.mark = i;
  }
  if (peak.mark) peak.where = "in " + history.marks[*peak.mark].name;
  const std::string& module = history.modules[static_cast<size_t>(event->module)];
  if (!module.empty()) peak.where += ", in " + module;
  return peak;
}

class Picture {
 public:
  Picture(const MemoryHistory& history, const std::string& title)
      : history_(history), peak_(peak_of(history)), samples_(samples_of(history, kColumns)), svg_(kWidth, kTop + kHeight + kBelow + kRow * rows() + 10) {
    most_ = std::max<double>(1, 1.08 * static_cast<double>(total_of(peak_.alive)));
    svg_.text(kLeft, 22, title, {.size = 16, .bold = true});
    phases();
    grid();
    areas();
    mark_peak();
    legend();
    table();
  }
  Svg take() && { return std::move(svg_); }

 private:
  static constexpr double kWidth = 1000, kLeft = 84, kPlot = 700, kTop = 56, kHeight = 320, kBelow = 56, kRow = 18;
  static constexpr double kRaised = 20;  ///< where the name of the peak's phase stands above those of wider ones
  static constexpr size_t kColumns = 600;

  double rows() const { return static_cast<double>(history_.largest.size()) + 1; }
  double x(double seconds) const { return kLeft + kPlot * (history_.seconds > 0 ? seconds / history_.seconds : 0); }
  double y(double bytes) const { return kTop + kHeight * (1 - bytes / most_); }

  void phases() {
    for (size_t i = 0; i < history_.marks.size(); ++i) {
      const auto& mark = history_.marks[i];
      const double begin = x(mark.seconds), end = i + 1 < history_.marks.size() ? x(history_.marks[i + 1].seconds) : kLeft + kPlot;
      svg_.rect(begin, kTop, end - begin, kHeight, i % 2 == 0 ? "#f3f3f3" : "#e4e4e4", mark.name);
      constexpr double letter = 7;
      const bool fits = end - begin > letter * static_cast<double>(mark.name.size());
      if (fits) svg_.text((begin + end) / 2, kTop - 6, mark.name, {.size = 12, .anchor = "middle"});
      if (!fits && peak_.mark == i) svg_.text(x(peak_.seconds), kTop - kRaised, mark.name, {.size = 12, .anchor = "middle"});
      if (!fits && peak_.mark == i) svg_.line(x(peak_.seconds), kTop - kRaised + 3, x(peak_.seconds), kTop);
    }
  }

  void grid() {
    const double step = binary_grid_step(std::floor(most_));
    for (double bytes = 0; bytes <= most_; bytes += step) {
      svg_.line(kLeft, y(bytes), kLeft + kPlot, y(bytes), "#cccccc", 0.5);
      svg_.text(kLeft - 6, y(bytes) + 4, format_bytes(static_cast<int64_t>(bytes)), {.size = 11, .anchor = "end"});
    }
    for (const double part : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      const std::string label = part == 0 ? "0" : format_duration(part * history_.seconds);
      svg_.text(kLeft + part * kPlot, kTop + kHeight + 16, label, {.size = 11, .anchor = "middle"});
    }
  }

  /// Each category lies on those before it, as steps: what is alive stays so until the next event.
  void areas() {
    std::vector<double> below(samples_.size(), 0);
    for (size_t c = 0; c < num_memory_categories; ++c) {
      std::vector<double> above = below;
      for (size_t i = 0; i < samples_.size(); ++i) above[i] += static_cast<double>(samples_[i].alive[c]);
      if (above == below) continue;
      auto outline = steps(above);
      auto under = steps(below);
      outline.insert(outline.end(), under.rbegin(), under.rend());
      svg_.polygon(outline, Svg::color(c), to_string(static_cast<MemoryCategory>(c)));
      below = std::move(above);
    }
  }

  std::vector<std::pair<double, double>> steps(const std::vector<double>& bytes) const {
    std::vector<std::pair<double, double>> points;
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (i > 0) points.emplace_back(x(samples_[i].seconds), y(bytes[i - 1]));
      points.emplace_back(x(samples_[i].seconds), y(bytes[i]));
    }
    return points;
  }

  void mark_peak() {
    const auto bytes = static_cast<double>(total_of(peak_.alive));
    const double at = x(peak_.seconds);
    svg_.line(at, kTop, at, kTop + kHeight, "#000000", 1);
    const bool right = at > kLeft + kPlot / 2;
    svg_.text(right ? at - 6 : at + 6, y(bytes) - 5, fmt::format("peak {} {}", format_bytes(total_of(peak_.alive)), peak_.where),
              {.size = 12, .anchor = right ? "end" : "start", .bold = true});
  }

  void legend() {
    double row = kTop + 12;
    svg_.text(kLeft + kPlot + 34, row, "at the peak", {.size = 12, .bold = true});
    for (int c = num_memory_categories - 1; c >= 0; --c) {  // from the top, as they lie
      const auto bytes = peak_.alive[static_cast<size_t>(c)];
      row += 22;
      svg_.rect(kLeft + kPlot + 14, row - 11, 13, 13, Svg::color(static_cast<size_t>(c)));
      svg_.text(kLeft + kPlot + 34, row, to_string(static_cast<MemoryCategory>(c)));
      svg_.text(kWidth - 14, row, format_bytes(bytes), {.size = 12, .anchor = "end"});
    }
    if (const int64_t host = total_of(history_.host); host > 0) {
      row += 30;
      svg_.text(kLeft + kPlot + 34, row, "on the host", {.size = 12, .bold = true});
      svg_.text(kWidth - 14, row, format_bytes(host), {.size = 12, .anchor = "end"});
    }
    if (history_.events_per_point == 1) return;
    svg_.text(kLeft + kPlot + 14, row + 30, fmt::format("{} of {} events", history_.events.size(), history_.num_events), {.size = 11});
    svg_.text(kLeft + kPlot + 14, row + 44, "kept, the highest of each", {.size = 11});
    svg_.text(kLeft + kPlot + 14, row + 58, fmt::format("{} in a row", history_.events_per_point), {.size = 11});
  }

  void table() {
    double row = kTop + kHeight + kBelow;
    svg_.text(kLeft, row, "The largest tensors alive at the peak", {.size = 13, .bold = true});
    for (const auto& block : history_.largest) {
      row += kRow;
      svg_.text(kLeft + 70, row, format_bytes(block.bytes), {.size = 12, .anchor = "end"});
      svg_.text(kLeft + 84, row, shape_text(block));
      svg_.text(kLeft + 300, row, to_string(block.category));
      svg_.text(kLeft + 400, row, place_text(block));
    }
  }

  const MemoryHistory& history_;
  Peak peak_;
  std::vector<Sample> samples_;
  Svg svg_;
  double most_ = 1;
};

}  // namespace

Svg draw_memory(const MemoryHistory& history, const std::string& title) { return Picture(history, title).take(); }

std::string memory_text(const MemoryHistory& history) {
  const Peak peak = peak_of(history);
  std::string out = fmt::format("peak {} {}, {} of {} into the step\n", format_bytes(total_of(peak.alive)), peak.where, format_duration(peak.seconds),
                                format_duration(history.seconds));
  std::vector<std::pair<std::string, MemoryByCategory>> columns{{"at the peak", peak.alive}};
  if (total_of(history.host) > 0) columns.emplace_back("on the host", history.host);
  out += category_table(columns);
  if (history.events_per_point > 1) {
    out += fmt::format("of {} events every {} were made one: the one after which most was alive\n", history.num_events, history.events_per_point);
  }
  return out + "the largest tensors alive at the peak\n" + block_table(history.largest);
}

void MemoryReport::on_start(const RunInfo& run) {
  run_ = run;
  if (file_.empty()) file_ = run.log_dir / "memory_report.svg";
}

void MemoryReport::after_step(const StepResult& result) {
  if (!result.memory_history) return;
  const std::string title = fmt::format("{}: memory of step {}, rank 0 of {}", run_.name, result.step, run_.ranks);
  const auto mine = result.memory_history->peak() ? total_of(result.memory_history->peak()->after) : total_of(result.memory_history->before);
  std::string text = title + "\n" + memory_text(*result.memory_history);
  if (const auto reserved = result.extras.find("reserved_bytes"); reserved != result.extras.end()) {
    text += fmt::format("the device's allocator has reserved {}\n", format_bytes(static_cast<int64_t>(reserved->second)));
  }
  if (result.peak_bytes > mine) text += fmt::format("another rank held more at its peak: {}\n", format_bytes(result.peak_bytes));
  try {
    draw_memory(*result.memory_history, title).save(file_.string());
    text += fmt::format("picture: {}\n", file_.string());
  } catch (const Error& error) {
    log().warn("--memory-report: {}; training goes on without it", error.what());
  }
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
}

}  // namespace tessera
