#include "tessera/comm/algorithms/table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <sstream>
#include <tuple>

#include <nlohmann/json.hpp>

#include "tessera/comm/algorithms/message_plan.h"
#include "tessera/core/error.h"
#include "tessera/core/json_integer.h"
#include "tessera/core/json_reason.h"
#include "tessera/core/text_file.h"

// A message of b bytes takes about a latency and b times an inverse bandwidth, so which algorithm wins changes with the ratio of sizes, not with their
// difference: hence the nearest row is looked for in log scale.

namespace tessera::comm {

void to_json(nlohmann::json& json, const TableRow& row) {
  json = {{"op", row.op}, {"backend", row.backend}, {"algorithm", row.algorithm}, {"bytes", row.bytes}, {"ranks", row.ranks}, {"time_us", row.time_us}};
}

void from_json(const nlohmann::json& json, TableRow& row) {
  try {
    row = {.op = json.at("op").get<std::string>(),
           .backend = json.at("backend").get<std::string>(),
           .algorithm = json.at("algorithm").get<std::string>(),
           .bytes = to_integer(json.at("bytes"), "bytes", 0, std::numeric_limits<int64_t>::max()),
           .ranks = static_cast<int>(to_integer(json.at("ranks"), "ranks", 1, std::numeric_limits<int>::max())),
           .time_us = json.at("time_us").get<double>()};
  } catch (const nlohmann::json::exception& error) {
    throw ConfigError(detail::concat("expected op, backend, algorithm, bytes, ranks and time_us (", json_reason(error), ")"));
  }
  require(row.time_us > 0 && std::isfinite(row.time_us), "time_us = ", row.time_us, ": expected a positive time");
  if (row.algorithm != kEngineAlgorithm) check_algorithm("algorithm", row.algorithm, row.op);
}

std::vector<TableRow> read_table(const std::filesystem::path& file) {
  std::error_code error;
  const bool special = std::filesystem::exists(file, error) && !std::filesystem::is_regular_file(file, error);
  require(!special, "comm.table = ", file.string(), ": is no regular file; name one that `tessera bench comm --json` wrote, or leave comm.table empty");
  std::istringstream in(read_text_file("comm.table = " + file.string(), file));
  std::vector<TableRow> rows;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      const auto json = nlohmann::json::parse(line);
      // What has no algorithms (send, recv) is measured for its own sake.
      if (json.is_object() && json.value("op", "") != "" && algorithms_for(json.value("op", "")).empty() && json.value("algorithm", "") == kEngineAlgorithm)
        continue;
      rows.push_back(json.get<TableRow>());
    } catch (const std::exception& error) {
      const auto* const damaged = dynamic_cast<const nlohmann::json::exception*>(&error);
      throw ConfigError(detail::concat("comm.table = ", file.string(), ", line ", number, ": ", damaged ? json_reason(*damaged) : error.what(),
                                       "; the table is damaged: write it anew with `tessera bench comm --json`, or remove the line"));
    }
  }
  require(!rows.empty(), "comm.table = ", file.string(), ": there are no rows in it; write it with `tessera bench comm --json`, or leave comm.table empty");
  return rows;
}

void write_table(const std::filesystem::path& file, const std::vector<TableRow>& rows) {
  std::string text;
  for (const auto& row : rows) text += nlohmann::json(row).dump() + '\n';
  write_text_file("table " + file.string(), file, text);
}

std::vector<TableRow> winners(const std::vector<TableRow>& rows) {
  std::map<std::tuple<std::string, std::string, int, int64_t>, TableRow> fastest;
  const auto better = [](const TableRow& a, const TableRow& b) {
    if (a.time_us != b.time_us) return a.time_us < b.time_us;
    if ((a.algorithm == kEngineAlgorithm) != (b.algorithm == kEngineAlgorithm)) return a.algorithm == kEngineAlgorithm;
    return a.algorithm < b.algorithm;
  };
  for (const auto& row : rows) {
    const auto [place, is_new] = fastest.try_emplace({row.op, row.backend, row.ranks, row.bytes}, row);
    if (!is_new && better(row, place->second)) place->second = row;
  }
  std::vector<TableRow> chosen;
  for (auto& [key, row] : fastest) chosen.push_back(std::move(row));
  return chosen;
}

const TableRow* best(const std::vector<TableRow>& rows, std::string_view op, std::string_view backend, int ranks, int64_t bytes) {
  const auto log_size = [](int64_t size) { return std::log2(static_cast<double>(std::max<int64_t>(size, 1))); };
  const TableRow* nearest = nullptr;
  double distance = 0;
  for (const auto& row : rows) {
    if (row.op != op || row.backend != backend || row.ranks != ranks) continue;
    const double away = std::abs(log_size(row.bytes) - log_size(bytes));
    if (!nearest || away < distance || (away == distance && row.bytes < nearest->bytes)) nearest = &row, distance = away;
  }
  return nearest;
}

}  // namespace tessera::comm
