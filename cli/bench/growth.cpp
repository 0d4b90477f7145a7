#include "cli/bench/growth.h"

#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "tessera/core/log_plot.h"

namespace tessera::bench {

double exponent(const std::vector<double>& sizes, const std::vector<double>& values) {
  const auto n = static_cast<double>(sizes.size());
  double x_mean = 0, y_mean = 0, variance = 0, covariance = 0;
  for (size_t i = 0; i < sizes.size(); ++i) x_mean += std::log(sizes[i]) / n, y_mean += std::log(values[i]) / n;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const double x = std::log(sizes[i]) - x_mean;
    variance += x * x;
    covariance += x * (std::log(values[i]) - y_mean);
  }
  return variance > 0 ? covariance / variance : 0;
}

std::string growth_text(const Growth& growth, const std::vector<double>& sizes) {
  if (sizes.front() == sizes.back()) return growth.name;
  return fmt::format("{} ~ h^{:.2f} (law: {})", growth.name, exponent(sizes, growth.values), growth.law);
}

void draw_growth(Svg& svg, double left, double top, const std::string& title, const std::vector<double>& sizes, const std::vector<Growth>& all,
                 size_t first_style) {
  LogPlot::Axis x{.base = 2, .values = sizes, .label = [](double size) { return fmt::format("{:g}", size); }}, y{.label = all.front().label};
  const auto by_law = [&](const Growth& growth) { return growth.values.front() * std::pow(sizes.back() / sizes.front(), growth.law); };
  for (const Growth& growth : all) {
    y.values.insert(y.values.end(), growth.values.begin(), growth.values.end());
    y.values.push_back(by_law(growth));
  }
  LogPlot panel(svg, left, top, title, x, y);
  for (size_t i = 0; i < all.size(); ++i) {
    if (sizes.size() > 1) panel.dashes({sizes.front(), all[i].values.front()}, {sizes.back(), by_law(all[i])}, "");
    LogPlot::Points points;
    for (size_t k = 0; k < sizes.size(); ++k) points.emplace_back(sizes[k], all[i].values[k]);
    panel.series(std::move(points), first_style + i);
  }
}

}  // namespace tessera::bench
