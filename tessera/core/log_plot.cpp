#include "tessera/core/log_plot.h"

#include <algorithm>
#include <cmath>

namespace tessera {
namespace {

constexpr double title_height = 34, label_width = 64, tick_height = 44;
constexpr double plot_width = LogPlot::width - label_width, plot_height = LogPlot::height - title_height - tick_height;
constexpr std::string_view grid_color = "#e4e4e4";
constexpr size_t palette = 8;

void draw_marker(Svg& svg, double x, double y, size_t style) {
  constexpr double r = 3;
  const auto color = Svg::color(style);
  switch (style / palette % 3) {
    case 0:
      svg.rect(x - r, y - r, 2 * r, 2 * r, color);
      break;
    case 1:
      svg.polyline({{x, y - 1.4 * r}, {x + 1.4 * r, y}, {x, y + 1.4 * r}, {x - 1.4 * r, y}, {x, y - 1.4 * r}}, color);
      break;
    default:
      svg.polyline({{x - r, y + r}, {x + r, y + r}, {x, y - 1.4 * r}, {x - r, y + r}}, color);
  }
}

}  // namespace

LogPlot::Scale::Scale(const Axis& axis, double begin, double end) : base_(axis.base), begin_(begin), end_(end) {
  const auto [least, most] = std::ranges::minmax_element(axis.values);
  low_ = std::floor(power_of(*least) + 1e-9);
  high_ = std::max(low_ + 1, std::ceil(power_of(*most) - 1e-9));
}

double LogPlot::Scale::power_of(double value) const { return std::log(value) / std::log(base_); }
double LogPlot::Scale::at(double value) const { return begin_ + (end_ - begin_) * (power_of(value) - low_) / (high_ - low_); }
double LogPlot::Scale::least() const { return std::pow(base_, low_); }
double LogPlot::Scale::most() const { return std::pow(base_, high_); }

std::vector<double> LogPlot::Scale::ticks(int most) const {
  const double stride = std::ceil((high_ - low_ + 1) / most);
  std::vector<double> values;
  for (double power = low_; power <= high_ + 1e-9; power += stride) values.push_back(std::pow(base_, power));
  return values;
}

LogPlot::LogPlot(Svg& svg, double left, double top, const std::string& title, const Axis& x, const Axis& y)
    : svg_(svg), x_(x, left + label_width, left + width), y_(y, top + title_height + plot_height, top + title_height) {
  const double x0 = left + label_width, y0 = top + title_height, bottom = y0 + plot_height;
  svg.text(x0, y0 - 10, title, {.size = 13, .bold = true});
  for (const double tick : y_.ticks(y.most_ticks)) {
    svg.line(x0, y_.at(tick), x0 + plot_width, y_.at(tick), grid_color);
    svg.text(x0 - 6, y_.at(tick) + 4, y.label(tick), {.size = 11, .color = axis_color, .anchor = "end"});
  }
  for (const double tick : x_.ticks(x.most_ticks)) {
    svg.line(x_.at(tick), y0, x_.at(tick), bottom, grid_color);
    svg.text(x_.at(tick), bottom + 16, x.label(tick), {.size = 11, .color = axis_color, .anchor = "middle"});
  }
  svg.line(x0, y0, x0, bottom, axis_color).line(x0, bottom, x0 + plot_width, bottom, axis_color);
}

double LogPlot::left() const { return x_.least(); }
double LogPlot::right() const { return x_.most(); }

void LogPlot::series(Points points, size_t style) {
  std::ranges::sort(points);
  for (auto& point : points) point = at(point);
  if (points.size() > 1) svg_.polyline(points, Svg::color(style), 2);
  for (const auto& [x, y] : points) draw_marker(svg_, x, y, style);
}

void LogPlot::dashes(std::pair<double, double> from, std::pair<double, double> to, const std::string& text, std::string_view color) {
  constexpr double dash = 6, period = 10;
  const auto [x, y] = at(from);
  const auto [x_end, y_end] = at(to);
  const double length = std::hypot(x_end - x, y_end - y);
  const auto along = [&](double pixels) {
    const double share = std::min(pixels, length) / length;
    return std::pair(x + (x_end - x) * share, y + (y_end - y) * share);
  };
  for (double begin = 0; begin < length; begin += period) {
    const auto a = along(begin), b = along(begin + dash);
    svg_.line(a.first, a.second, b.first, b.second, color);
  }
  svg_.text(x + 4, y - 4, text, {.size = 10, .color = color});
}

void LogPlot::legend(Svg& svg, double x, double y, const std::string& name, size_t style) {
  svg.line(x, y, x + 24, y, Svg::color(style), 2);
  draw_marker(svg, x + 12, y, style);
  svg.text(x + 32, y + 4, name);
}

}  // namespace tessera
