#include "cli/bench/rows.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/core/columns.h"
#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

constexpr double giga = 1e9;

std::string gigabytes(double bytes_per_second) {
  const double value = bytes_per_second / giga;
  return fmt::format("{:.{}f}", value, value < 1 ? 4 : 2);
}

std::string microseconds(double us) { return fmt::format("{:.{}f}", us, us < 100 ? 2 : us < 10000 ? 1 : 0); }

std::vector<std::string> cells(const Row& row) {
  return {row.op,
          format_size(row.bytes),
          row.backend,
          row.algorithm,
          row.buffers,
          microseconds(row.timing.median_us),
          microseconds(row.timing.min_us),
          gigabytes(row.algorithm_bandwidth()),
          gigabytes(row.bus_bandwidth()),
          fmt::format("{:.0f}%", 100 * row.link_share())};
}

}  // namespace

double Row::algorithm_bandwidth() const { return timing.median_us > 0 ? static_cast<double>(whole_bytes) / (timing.median_us * 1e-6) : 0; }
double Row::bus_bandwidth() const { return algorithm_bandwidth() * bench::bus_factor(op, ranks); }
double Row::link_share() const { return link_bandwidth > 0 ? bus_bandwidth() / link_bandwidth : 0; }
std::string Row::series() const { return backend + " " + algorithm + (buffers == "plain" ? "" : " (" + buffers + ")"); }

void to_json(nlohmann::json& json, const Row& row) {
  json = {{"op", row.op},
          {"backend", row.backend},
          {"algorithm", row.algorithm},
          {"dtype", row.dtype},
          {"buffers", row.buffers},
          {"bytes", row.bytes},
          {"whole_bytes", row.whole_bytes},
          {"ranks", row.ranks},
          {"time_us", row.timing.median_us},
          {"min_us", row.timing.min_us},
          {"calls", row.timing.calls},
          {"algorithm_gb_s", row.algorithm_bandwidth() / giga},
          {"bus_gb_s", row.bus_bandwidth() / giga},
          {"link_gb_s", row.link_bandwidth / giga},
          {"link_share", row.link_share()}};
}

void from_json(const nlohmann::json& json, Row& row) {
  for (const auto& [key, field] :
       {std::pair("op", &Row::op), {"backend", &Row::backend}, {"algorithm", &Row::algorithm}, {"dtype", &Row::dtype}, {"buffers", &Row::buffers}}) {
    json.at(key).get_to(row.*field);
  }
  json.at("bytes").get_to(row.bytes);
  json.at("whole_bytes").get_to(row.whole_bytes);
  json.at("ranks").get_to(row.ranks);
  json.at("time_us").get_to(row.timing.median_us);
  json.at("min_us").get_to(row.timing.min_us);
  json.at("calls").get_to(row.timing.calls);
  row.link_bandwidth = json.at("link_gb_s").get<double>() * giga;
}

int64_t parse_bytes(const std::string& knob, const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const std::string unit(end, text.data() + text.size());
  constexpr std::array<std::pair<std::string_view, int>, 10> units{
      {{"", 0}, {"B", 0}, {"K", 10}, {"KiB", 10}, {"k", 10}, {"M", 20}, {"MiB", 20}, {"m", 20}, {"G", 30}, {"GiB", 30}}};
  const auto found = std::ranges::find(units, unit, &std::pair<std::string_view, int>::first);
  require(error == std::errc() && found != units.end() && number > 0 && number <= (int64_t{1} << 50 >> found->second), knob, " = ", text,
          ": not a number of bytes; write 4096, 4K, 1M or 2G (powers of 1024), at least 1 and separated by commas");
  return number << found->second;
}

std::string format_size(int64_t bytes) {
  constexpr std::array units{"B", "KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; bytes != 0 && bytes % 1024 == 0 && unit + 1 < units.size(); ++unit) bytes /= 1024;
  return fmt::format("{} {}", bytes, units[unit]);
}

std::string format_table(const std::vector<Row>& rows) {
  std::vector<std::vector<std::string>> lines{{"op", "bytes", "backend", "algorithm", "buffers", "time us", "min us", "algorithm GB/s", "bus GB/s", "of link"}};
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i > 0 && rows[i].op != rows[i - 1].op) lines.emplace_back();
    lines.push_back(cells(rows[i]));
  }
  return format_columns(lines, /*left=*/{0, 2, 3, 4});
}

}  // namespace tessera::cli
