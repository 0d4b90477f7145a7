#include "tessera/core/svg.h"

#include <array>

#include <fmt/format.h>

#include "tessera/core/markup.h"
#include "tessera/core/text_file.h"

namespace tessera {
namespace {

/// Hundredths of a pixel are enough, and keep files small.
std::string number(double value) {
  std::string text = fmt::format("{:.2f}", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

std::string points_attribute(const std::vector<std::pair<double, double>>& points) {
  std::string out = " points=\"";
  for (size_t i = 0; i < points.size(); ++i) out += (i ? " " : "") + number(points[i].first) + "," + number(points[i].second);
  return out + "\"";
}

}  // namespace

double binary_grid_step(double top) {
  double step = 1;
  while (top / step > 6) step *= 2;
  return step;
}

Svg::Svg(double width, double height) : width_(width), height_(height) {}

Svg& Svg::rect(double x, double y, double width, double height, std::string_view fill, std::string_view tooltip) {
  body_ << "<rect x=\"" << number(x) << "\" y=\"" << number(y) << "\" width=\"" << number(width) << "\" height=\"" << number(height) << "\" fill=\""
        << escape_markup(fill) << "\"";
  return end("rect", tooltip);
}

Svg& Svg::end(std::string_view element, std::string_view tooltip) {
  if (tooltip.empty()) {
    body_ << "/>\n";
  } else {
    body_ << "><title>" << escape_markup(tooltip) << "</title></" << element << ">\n";
  }
  return *this;
}

Svg& Svg::line(double x1, double y1, double x2, double y2, std::string_view stroke, double width) {
  body_ << "<line x1=\"" << number(x1) << "\" y1=\"" << number(y1) << "\" x2=\"" << number(x2) << "\" y2=\"" << number(y2) << "\" stroke=\""
        << escape_markup(stroke) << "\" stroke-width=\"" << number(width) << "\"/>\n";
  return *this;
}

Svg& Svg::polyline(const std::vector<std::pair<double, double>>& points, std::string_view stroke, double width, double dash, double period) {
  body_ << "<polyline fill=\"none\" stroke=\"" << escape_markup(stroke) << "\" stroke-width=\"" << number(width) << "\"";
  if (dash > 0) body_ << " stroke-dasharray=\"" << number(dash) << " " << number(period - dash) << "\"";
  body_ << points_attribute(points);
  return end("polyline", {});
}

Svg& Svg::polygon(const std::vector<std::pair<double, double>>& points, std::string_view fill, std::string_view tooltip) {
  body_ << "<polygon fill=\"" << escape_markup(fill) << "\"" << points_attribute(points);
  return end("polygon", tooltip);
}

Svg& Svg::text(double x, double y, std::string_view text, TextStyle style) {
  body_ << "<text x=\"" << number(x) << "\" y=\"" << number(y) << "\" font-size=\"" << number(style.size) << "\" fill=\"" << escape_markup(style.color)
        << "\" text-anchor=\"" << escape_markup(style.anchor) << "\"" << (style.bold ? " font-weight=\"bold\"" : "") << ">" << escape_markup(text)
        << "</text>\n";
  return *this;
}

Svg& Svg::text(double x, double y, std::string_view text) { return this->text(x, y, text, TextStyle()); }

std::string Svg::str() const {
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" font-family=\"sans-serif\">\n"
      "<rect x=\"0\" y=\"0\" width=\"{0}\" height=\"{1}\" fill=\"#ffffff\"/>\n{2}</svg>\n",
      number(width_), number(height_), body_.str());
}

void Svg::save(const std::string& path) const { write_text_file("picture " + path, path, str()); }

std::string_view Svg::color(size_t index) {
  static constexpr std::array<std::string_view, 8> palette = {"#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"};
  return palette[index % palette.size()];
}

}  // namespace tessera
