#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace tessera::comm {

/// What rows call the backend's own algorithm.
inline constexpr std::string_view kEngineAlgorithm = "engine";

/// One measurement: what a row of `tessera bench comm --json` says, and a line of a table.
struct TableRow {
  std::string op;         ///< all_reduce, broadcast, ...: the names of plan.h
  std::string backend;    ///< gloo, shm, ...: never "auto"
  std::string algorithm;  ///< "engine", or a name that algorithms_for(op) lists
  int64_t bytes = 0;      ///< of the whole, as in traffic.h: the reduced tensor, the gathered result, what is scattered or dealt
  int ranks = 0;
  double time_us = 0;
  bool operator==(const TableRow&) const = default;
};

/// The six fields by name. Reading passes over further fields and throws ConfigError where one of the six is missing, has another type, or names no
/// algorithm (the nearest is given).
void to_json(nlohmann::json& json, const TableRow& row);
void from_json(const nlohmann::json& json, TableRow& row);

/// A table is a file of JSON lines, one row a line: the output of `tessera bench comm --json` is one. Throw ConfigError: reading names file, line and
/// what is wrong with it, writing the file that cannot be written.
std::vector<TableRow> read_table(const std::filesystem::path& file);
void write_table(const std::filesystem::path& file, const std::vector<TableRow>& rows);

/// The rows that a choice may fall on: per op, backend, ranks and bytes the fastest one; the engine's own where it is as fast. In a fixed order.
std::vector<TableRow> winners(const std::vector<TableRow>& rows);

/// The measured best for a call, of `rows` = winners(...): the row of this op, backend and number of ranks whose size is nearest in log scale (the smaller of
/// two that are as near). Null where there is none. Linear in the rows.
const TableRow* best(const std::vector<TableRow>& rows, std::string_view op, std::string_view backend, int ranks, int64_t bytes);

}  // namespace tessera::comm
