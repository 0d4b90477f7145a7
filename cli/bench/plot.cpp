#include "cli/bench/plot.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <fmt/format.h>

#include "tessera/core/format.h"
#include "tessera/core/log_plot.h"
#include "tessera/core/svg.h"

namespace tessera::cli {
namespace {

constexpr double margin = 24, title_height = 34, gap = 28, legend_width = 210, legend_line = 18;

struct Panel {
  std::string title;
  std::function<double(const Row&)> value;
  std::function<std::string(double)> label;
  bool with_link;
};

/// `names` gives each line its place in the legend, and so its style.
void draw_panel(Svg& svg, double left, double top, const std::vector<Row>& rows, const std::vector<std::string>& names, const Panel& panel) {
  LogPlot::Axis x{.base = 2, .label = [](double bytes) { return format_size(static_cast<int64_t>(bytes)); }, .most_ticks = 7}, y{.label = panel.label};
  for (const Row& row : rows) {
    x.values.push_back(static_cast<double>(row.bytes));
    y.values.push_back(panel.value(row));
    if (panel.with_link && row.link_bandwidth > 0) y.values.push_back(row.link_bandwidth);
  }
  LogPlot plot(svg, left, top, panel.title, x, y);
  std::vector<std::string> linked;
  for (size_t series = 0; series < names.size(); ++series) {
    LogPlot::Points points;
    for (const Row& row : rows) {
      if (row.series() != names[series]) continue;
      points.emplace_back(static_cast<double>(row.bytes), panel.value(row));
      if (panel.with_link && row.link_bandwidth > 0 && std::ranges::find(linked, row.backend) == linked.end()) {
        plot.dashes({plot.left(), row.link_bandwidth}, {plot.right(), row.link_bandwidth}, "between two ranks over " + row.backend);
        linked.push_back(row.backend);
      }
    }
    plot.series(std::move(points), series);
  }
}

template <class Of>
std::vector<std::string> distinct(const std::vector<Row>& rows, Of of) {
  std::vector<std::string> names;
  for (const Row& row : rows) {
    if (std::string name = of(row); std::ranges::find(names, name) == names.end()) names.push_back(std::move(name));
  }
  return names;
}

}  // namespace

std::string plot(const std::vector<Row>& rows) {
  if (rows.empty()) return Svg(320, 60).text(margin, 34, "nothing was measured").str();
  const auto ops = distinct(rows, [](const Row& row) { return row.op; });
  const auto names = distinct(rows, [](const Row& row) { return row.series(); });
  const double body = std::max(static_cast<double>(ops.size()) * LogPlot::height, 40 + legend_line * static_cast<double>(names.size()));
  Svg svg(2 * margin + 2 * LogPlot::width + 2 * gap + legend_width, 2 * margin + body);
  const Panel time{"time", [](const Row& row) { return row.timing.median_us; }, [](double us) { return format_duration(us * 1e-6); }, false};
  const Panel bandwidth{"bus bandwidth, GB/s", [](const Row& row) { return row.bus_bandwidth(); },
                        [](double bytes_per_second) { return fmt::format("{:g}", bytes_per_second / 1e9); }, true};
  for (size_t i = 0; i < ops.size(); ++i) {
    std::vector<Row> of_op;
    std::ranges::copy_if(rows, std::back_inserter(of_op), [&](const Row& row) { return row.op == ops[i]; });
    const double top = margin + static_cast<double>(i) * LogPlot::height;
    for (const auto& [panel, left] : {std::pair(&time, margin), std::pair(&bandwidth, margin + LogPlot::width + gap)}) {
      Panel titled = *panel;
      titled.title = fmt::format("{} of {} ranks: {}", ops[i], of_op.front().ranks, panel->title);
      draw_panel(svg, left, top, of_op, names, titled);
    }
  }
  const double legend = margin + 2 * (LogPlot::width + gap);
  for (size_t i = 0; i < names.size(); ++i) {
    LogPlot::legend(svg, legend, margin + title_height + legend_line * static_cast<double>(i), names[i], i);
  }
  return svg.str();
}

}  // namespace tessera::cli
