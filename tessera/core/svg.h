#pragma once

#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

/// Writes a picture as SVG text. Coordinates are pixels, y downwards; text is escaped. Colors are CSS colors. No scripts, no external files.
class Svg {
 public:
  Svg(double width, double height);

  struct TextStyle {
    double size = 12;
    std::string_view color = "#222222";
    std::string_view anchor = "start";  ///< start, middle, end
    bool bold = false;
  };

  Svg& rect(double x, double y, double width, double height, std::string_view fill, std::string_view tooltip = {});
  Svg& line(double x1, double y1, double x2, double y2, std::string_view stroke = "#222222", double width = 1);
  /// `dash`: drawn are so many of every `period` pixels; 0: all of them.
  Svg& polyline(const std::vector<std::pair<double, double>>& points, std::string_view stroke, double width = 1.5, double dash = 0, double period = 0);
  Svg& polygon(const std::vector<std::pair<double, double>>& points, std::string_view fill, std::string_view tooltip = {});
  Svg& text(double x, double y, std::string_view text, TextStyle style);
  Svg& text(double x, double y, std::string_view text);

  std::string str() const;                   ///< the whole document
  void save(const std::string& path) const;  ///< throws ConfigError when the file cannot be written

  /// A palette of eight colors that stay apart for color-blind readers (Okabe and Ito).
  static std::string_view color(size_t index);

 private:
  Svg& end(std::string_view element, std::string_view tooltip);

  double width_, height_;
  std::ostringstream body_;
};

/// Bytes between two lines of a grid up to `top`: a power of two, so that six lines or fewer are enough.
double binary_grid_step(double top);

}  // namespace tessera
