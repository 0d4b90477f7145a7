#include "tessera/core/log_plot.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace tessera {
namespace {

constexpr double title_height = 34, label_width = 64, tick_height = 44;
constexpr double plot_width = LogPlot::width - label_width, plot_height = LogPlot::height - title_height - tick_height;
constexpr std::string_view grid_color = "#e4e4e4";
constexpr size_t palette = 8;

constexpr double line_width = 2, radius = 3;

void draw_marker(Svg& svg, double x, double y, size_t style, double r = radius) {
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

/// Whether `line` has a point so near that one drawn over the other hides it.
bool passes(const LogPlot::Points& line, const std::pair<double, double>& point) {
  constexpr double near = line_width + 0.5;
  return std::ranges::any_of(line, [&](const auto& other) { return std::hypot(other.first - point.first, other.second - point.second) < near; });
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
  constexpr double name_line = 15;
  svg.text(x0, y0 - 10 - (y.name.empty() ? 0 : name_line), title, {.size = 13, .bold = true});
  if (!y.name.empty()) svg.text(left, y0 - 10, y.name, {.size = 11, .color = axis_color});
  if (!x.name.empty()) svg.text(x0 + plot_width / 2, bottom + 16 + name_line, x.name, {.size = 11, .color = axis_color, .anchor = "middle"});
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
  const auto covered = [&](size_t begin, size_t end) {  // how many of the earlier ones
    return std::ranges::count_if(drawn_, [&](const Points& line) { return passes(line, points[begin]) && passes(line, points[end]); });
  };
  constexpr double period = 20;  // each further line covers half of what the one below it does
  for (size_t begin = 0, end = 1; end < points.size(); ++end) {
    const auto below = covered(end - 1, end);
    if (end + 1 < points.size() && covered(end, end + 1) == below) continue;
    const auto first = points.begin() + static_cast<std::ptrdiff_t>(begin), last = points.begin() + static_cast<std::ptrdiff_t>(end);
    svg_.polyline({first, last + 1}, Svg::color(style), line_width, below == 0 ? 0 : period * std::pow(0.5, static_cast<double>(below)), period);
    begin = end;
  }
  for (size_t i = 0; i < points.size(); ++i) {
    draw_marker(svg_, points[i].first, points[i].second, style, radius * std::pow(0.6, static_cast<double>(covered(i, i))));
  }
  drawn_.push_back(std::move(points));
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
