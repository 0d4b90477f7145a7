#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/core/svg.h"

/// How what was counted or measured grows with a size, beside a law of powers: for `tessera bench tp` and `tessera bench pp`.
namespace tessera::bench {

struct Growth {
  std::string name{};
  std::vector<double> values{};                ///< one for each size, positive
  std::function<std::string(double)> label{};  ///< of a value, on an axis
  int law = 1;                                 ///< the power of the size with which it grows by the law
};

/// b in value ~ size^b: the slope of a line through the points in logarithms, by least squares. 0 where all sizes are the same.
double exponent(const std::vector<double>& sizes, const std::vector<double>& values);

/// "compute time ~ h^1.93 (law: 2)"; the name alone where there is one size.
std::string growth_text(const Growth& growth, const std::vector<double>& sizes);

/// A panel (LogPlot) of several over the same sizes, the first one's labels beside it, each with a dashed line of its law's slope through its first point.
void draw_growth(Svg& svg, double left, double top, const std::string& title, const std::vector<double>& sizes, const std::vector<Growth>& all,
                 size_t first_style);

}  // namespace tessera::bench
