#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/core/svg.h"

namespace tessera {

/// A panel of a picture with two logarithmic axes: grid and labels first, then what is drawn into it. Points are given in the axes' own values.
class LogPlot {
 public:
  struct Axis {
    double base = 10;                            ///< grid lines lie at its powers
    std::vector<double> values{};                ///< positive, one at least; the axis spans the powers of `base` around them, one step at least
    std::function<std::string(double)> label{};  ///< of a grid line
    int most_ticks = 8;                          ///< every other power is left out, and so on, where there are more
    std::string name{};                          ///< what it counts, beside the labels; empty: the title says it
  };
  using Points = std::vector<std::pair<double, double>>;

  /// Pixels that a panel takes, with its title and labels.
  static constexpr double width = 424, height = 318;
  static constexpr std::string_view axis_color = "#666666";

  LogPlot(Svg& svg, double left, double top, const std::string& title, const Axis& x, const Axis& y);

  /// The points in the order of x, joined. Styles beyond the palette repeat its colors with another marker. Where it lies on earlier ones, it is dashed, with
  /// smaller markers, so that they stay to be seen.
  void series(Points points, size_t style);

  /// A dashed line from one point to another, with `text` above its begin.
  void dashes(std::pair<double, double> from, std::pair<double, double> to, const std::string& text, std::string_view color = axis_color);

  /// One line of a legend: the style's line and marker, then `name`, vertically centered at y.
  static void legend(Svg& svg, double x, double y, const std::string& name, size_t style);

  double left() const;  ///< least and greatest value on the axis of x
  double right() const;

 private:
  /// Values to pixels.
  class Scale {
   public:
    Scale(const Axis& axis, double begin, double end);
    double at(double value) const;
    std::vector<double> ticks(int most) const;
    double least() const;
    double most() const;

   private:
    double power_of(double value) const;
    double base_, begin_, end_, low_ = 0, high_ = 1;
  };

  std::pair<double, double> at(const std::pair<double, double>& point) const { return {x_.at(point.first), y_.at(point.second)}; }

  Svg& svg_;
  Scale x_, y_;
  std::vector<Points> drawn_{};  ///< series so far, in pixels
};

}  // namespace tessera
