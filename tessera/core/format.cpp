#include "tessera/core/format.h"

#include <array>
#include <charconv>
#include <cmath>
#include <string_view>

#include <fmt/format.h>

namespace tessera {
namespace {

/// Three significant digits and a unit: the largest of units[0] * base^k that the value reaches after rounding.
std::string scaled(double value, double base, const auto& units) {
  size_t unit = 0;
  // 999.6 would print as "1000": the next unit begins where three digits round up to the base.
  while (unit + 1 < units.size() && std::abs(value) >= (base == 1000 ? 999.5 : 1023.5)) {
    value /= base;
    ++unit;
  }
  const double magnitude = std::abs(value);
  const int decimals = unit == 0 ? 0 : magnitude < 9.995 ? 2 : magnitude < 99.95 ? 1 : 0;
  return fmt::format("{:.{}f}{}{}", value, decimals, units[unit].empty() ? "" : " ", units[unit]);
}

}  // namespace

std::string format_bytes(int64_t bytes) {
  static constexpr std::array<std::string_view, 7> units = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  return scaled(static_cast<double>(bytes), 1024, units);
}

std::string format_count(double count) {
  static constexpr std::array<std::string_view, 7> units = {"", "K", "M", "B", "T", "P", "E"};
  return scaled(count, 1000, units);
}

std::string format_duration(double seconds) {
  if (seconds < 0) return "-" + format_duration(-seconds);
  if (seconds < 59.5) {
    if (seconds < 999.5e-9) return fmt::format("{:.0f} ns", seconds * 1e9);
    if (seconds < 999.5e-6) return fmt::format("{:.3g} us", seconds * 1e6);
    if (seconds < 999.5e-3) return fmt::format("{:.3g} ms", seconds * 1e3);
    return fmt::format("{:.{}f} s", seconds, seconds < 9.995 ? 2 : 1);
  }
  if (!(seconds < 1e9)) return "a long time";
  const int64_t whole = std::llround(seconds);
  if (whole < 3600) return fmt::format("{} m {:02} s", whole / 60, whole % 60);
  const int64_t minutes = std::llround(seconds / 60);
  if (minutes < 48 * 60) return fmt::format("{} h {:02} m", minutes / 60, minutes % 60);
  const int64_t hours = std::llround(seconds / 3600);
  return fmt::format("{} d {:02} h", hours / 24, hours % 24);
}

std::string format_float(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  std::array<char, 32> buffer;
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value).ptr;
  std::string text(buffer.data(), end);
  if (text.find_first_of(".e") == std::string::npos) text += ".0";
  return text;
}

std::string one_line(std::string_view text) {
  std::string line;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const bool second_set = byte == 0xc2 && next >= 0x80 && next < 0xa0;  // U+0080 to U+009f, in UTF-8
    if (byte == '\n' || byte == '\r') {
      line += ' ';
    } else if ((byte < 0x20 && byte != '\t') || byte == 0x7f) {
      line += fmt::format("\\x{:02x}", byte);
    } else if (second_set) {
      line += fmt::format("\\x{:02x}", next);
      ++i;
    } else {
      line += text[i];
    }
  }
  return line;
}

}  // namespace tessera
