#include "tessera/comm/bench/plot.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include <fmt/format.h>

#include "tessera/core/format.h"
#include "tessera/core/svg.h"

namespace tessera::comm::bench {
namespace {

using Points = std::vector<std::pair<double, double>>;

constexpr double margin = 24, title_height = 34, label_width = 64, tick_height = 44;
constexpr double plot_width = 360, plot_height = 240, gap = 28, legend_width = 210, legend_line = 18;
constexpr double panel_width = label_width + plot_width, panel_height = title_height + plot_height + tick_height;
constexpr std::string_view grid_color = "#e4e4e4", axis_color = "#666666";

/// A logarithmic axis: values to pixels.
class LogAxis {
 public:
  /// `values` are positive; the axis spans the powers of `base` around them, one at least.
  LogAxis(const std::vector<double>& values, double base, double begin, double end) : base_(base), begin_(begin), end_(end) {
    const auto [least, most] = std::ranges::minmax_element(values);
    low_ = std::floor(power_of(*least) + 1e-9);
    high_ = std::max(low_ + 1, std::ceil(power_of(*most) - 1e-9));
  }

  double at(double value) const { return begin_ + (end_ - begin_) * (power_of(value) - low_) / (high_ - low_); }

  /// The powers of the base on it; every other one, and so on, where there are more than `most`.
  std::vector<double> ticks(int most) const {
    const double stride = std::ceil((high_ - low_ + 1) / most);
    std::vector<double> values;
    for (double power = low_; power <= high_ + 1e-9; power += stride) values.push_back(std::pow(base_, power));
    return values;
  }

 private:
  double power_of(double value) const { return std::log(value) / std::log(base_); }
  double base_, begin_, end_, low_ = 0, high_ = 1;
};

/// Lines beyond the palette repeat its colors with another marker.
struct Style {
  std::string_view color;
  size_t marker;
};
Style style(size_t series) { return {Svg::color(series), series / 8}; }

void draw_marker(Svg& svg, double x, double y, Style style) {
  constexpr double r = 3;
  switch (style.marker % 3) {
    case 0:
      svg.rect(x - r, y - r, 2 * r, 2 * r, style.color);
      break;
    case 1:
      svg.polyline({{x, y - 1.4 * r}, {x + 1.4 * r, y}, {x, y + 1.4 * r}, {x - 1.4 * r, y}, {x, y - 1.4 * r}}, style.color);
      break;
    default:
      svg.polyline({{x - r, y + r}, {x + r, y + r}, {x, y - 1.4 * r}, {x - r, y + r}}, style.color);
  }
}

struct Panel {
  std::string title;
  std::function<double(const Row&)> value;
  std::function<std::string(double)> label;
  bool with_link;
};

/// `names` gives each line its place in the legend, and so its style.
void draw_panel(Svg& svg, double left, double top, const std::vector<Row>& rows, const std::vector<std::string>& names, const Panel& panel) {
  const double x0 = left + label_width, y0 = top + title_height;
  std::vector<double> sizes, values;
  for (const Row& row : rows) {
    sizes.push_back(static_cast<double>(row.bytes));
    values.push_back(panel.value(row));
    if (panel.with_link && row.link_bandwidth > 0) values.push_back(row.link_bandwidth);
  }
  const LogAxis x(sizes, 2, x0, x0 + plot_width), y(values, 10, y0 + plot_height, y0);
  svg.text(x0, y0 - 10, panel.title, {.size = 13, .bold = true});
  for (const double tick : y.ticks(8)) {
    svg.line(x0, y.at(tick), x0 + plot_width, y.at(tick), grid_color);
    svg.text(x0 - 6, y.at(tick) + 4, panel.label(tick), {.size = 11, .color = axis_color, .anchor = "end"});
  }
  for (const double tick : x.ticks(7)) {
    svg.line(x.at(tick), y0, x.at(tick), y0 + plot_height, grid_color);
    svg.text(x.at(tick), y0 + plot_height + 16, format_size(static_cast<int64_t>(tick)), {.size = 11, .color = axis_color, .anchor = "middle"});
  }
  svg.line(x0, y0, x0, y0 + plot_height, axis_color).line(x0, y0 + plot_height, x0 + plot_width, y0 + plot_height, axis_color);

  std::vector<std::string> linked;
  for (size_t series = 0; series < names.size(); ++series) {
    Points points;
    for (const Row& row : rows) {
      if (row.series() != names[series]) continue;
      points.emplace_back(x.at(static_cast<double>(row.bytes)), y.at(panel.value(row)));
      if (panel.with_link && row.link_bandwidth > 0 && std::ranges::find(linked, row.backend) == linked.end()) {
        const double height = y.at(row.link_bandwidth);
        for (double dash = x0; dash < x0 + plot_width; dash += 10) svg.line(dash, height, std::min(dash + 6, x0 + plot_width), height, axis_color);
        svg.text(x0 + 4, height - 4, "between two ranks over " + row.backend, {.size = 10, .color = axis_color});
        linked.push_back(row.backend);
      }
    }
    std::ranges::sort(points);
    if (points.size() > 1) svg.polyline(points, style(series).color, 2);
    for (const auto& [px, py] : points) draw_marker(svg, px, py, style(series));
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
  const double body = std::max(static_cast<double>(ops.size()) * panel_height, 40 + legend_line * static_cast<double>(names.size()));
  Svg svg(2 * margin + 2 * panel_width + 2 * gap + legend_width, 2 * margin + body);
  const Panel time{"time", [](const Row& row) { return row.timing.median_us; }, [](double us) { return format_duration(us * 1e-6); }, false};
  const Panel bandwidth{"bus bandwidth, GB/s", [](const Row& row) { return row.bus_bandwidth(); },
                        [](double bytes_per_second) { return fmt::format("{:g}", bytes_per_second / 1e9); }, true};
  for (size_t i = 0; i < ops.size(); ++i) {
    std::vector<Row> of_op;
    std::ranges::copy_if(rows, std::back_inserter(of_op), [&](const Row& row) { return row.op == ops[i]; });
    const double top = margin + static_cast<double>(i) * panel_height;
    for (const auto& [panel, left] : {std::pair(&time, margin), std::pair(&bandwidth, margin + panel_width + gap)}) {
      Panel titled = *panel;
      titled.title = fmt::format("{} of {} ranks: {}", ops[i], of_op.front().ranks, panel->title);
      draw_panel(svg, left, top, of_op, names, titled);
    }
  }
  const double legend = margin + 2 * (panel_width + gap);
  for (size_t i = 0; i < names.size(); ++i) {
    const double y = margin + title_height + legend_line * static_cast<double>(i);
    svg.line(legend, y, legend + 24, y, style(i).color, 2);
    draw_marker(svg, legend + 12, y, style(i));
    svg.text(legend + 32, y + 4, names[i]);
  }
  return svg.str();
}

}  // namespace tessera::comm::bench
