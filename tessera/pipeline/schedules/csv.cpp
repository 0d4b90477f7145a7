#include "tessera/pipeline/schedules/csv.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/text_file.h"
#include "tessera/pipeline/schedules/check.h"

namespace tessera::schedules {
namespace {

constexpr int64_t kSmall = 1 << 16;

std::string_view stripped(std::string_view text) {
  const auto is_edge = [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '"'; };
  while (!text.empty() && is_edge(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_edge(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> pieces;
  for (size_t end = 0; end != std::string_view::npos;) {
    end = text.find(separator);
    pieces.push_back(text.substr(0, end));
    if (end != std::string_view::npos) text.remove_prefix(end + 1);
  }
  return pieces;
}

/// Where an action was read: columns of a rank's actions, from 1.
using Columns = std::vector<std::vector<int>>;

std::string place(const std::string& name, int rank, int column) { return fmt::format("{}: row {} (rank {}), column {}", name, rank + 1, rank, column); }

std::vector<std::string_view> rows_of(std::string_view text) {
  auto rows = split(text, '\n');
  while (!rows.empty() && stripped(rows.back()).empty()) rows.pop_back();
  return rows;
}

/// What the actions say of the pipeline: its stages, which rank holds each, and the micro-batches.
void read_shape(Schedule& schedule, const std::string& name) {
  int stages = 0, micro_batches = 0;
  int64_t computations = 0;
  for (const auto& actions : schedule.actions) {
    for (const Action& action : actions) {
      for (const Action& part : parts(action)) {
        computations += part.computes() ? 1 : 0;
        stages = std::max(stages, part.stage + 1);
        micro_batches = std::max(micro_batches, part.micro_batch + 1);
      }
    }
  }
  // A forward and a backward of each: a large number in a small file is a slip, and not worth the tables that it would take to say what is missing.
  const int64_t least = 2 * int64_t{stages} * micro_batches;
  require(least <= kSmall || computations >= least, name, ": ", stages, " stages with ", micro_batches,
          " micro-batches, as its largest numbers say, take at least ", least, " actions, and there are ", computations);
  schedule.micro_batches = micro_batches;
  schedule.rank_of.assign(stages, -1);
  for (int rank = 0; rank < schedule.ranks(); ++rank) {
    for (const Action& action : schedule.actions[rank]) {
      for (const Action& part : parts(action)) {
        if (part.computes() && schedule.rank_of[part.stage] < 0) schedule.rank_of[part.stage] = rank;
      }
    }
  }
}

}  // namespace

std::string to_csv(const Schedule& schedule) {
  std::string text;
  for (const auto& actions : schedule.actions) {
    for (size_t i = 0; i < actions.size(); ++i) text += (i == 0 ? "" : ",") + to_string(actions[i]);
    text += "\n";
  }
  return text;
}

Schedule read_csv(std::string_view text, const std::string& name) {
  Schedule schedule{.name = name, .micro_batches = 0, .rank_of = {}, .actions = {}};
  Columns columns;
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // with which some programs begin a text in UTF-8
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  require(text.find('\0') == std::string_view::npos, name, ": holds a byte 0, and is no text in UTF-8; save it as one");
  for (const auto row : rows_of(text)) {
    const int rank = schedule.ranks();
    schedule.actions.emplace_back();
    columns.emplace_back();
    int column = 0;
    for (const auto cell : split(row, ',')) {
      ++column;
      if (stripped(cell).empty()) continue;
      try {
        schedule.actions[rank].push_back(parse_action(stripped(cell)));
      } catch (const ConfigError& error) {
        throw ConfigError(place(name, rank, column) + ": " + error.what());
      }
      columns[rank].push_back(column);
    }
    require(!schedule.actions[rank].empty(), name, ": row ", rank + 1, " (rank ", rank, ") holds no action: each row is what one rank does");
  }
  require(schedule.ranks() > 0, name, ": holds no action; write a row for each rank, such as 0F0,0B0");
  read_shape(schedule, name);
  const auto problem = find_problem(schedule);
  if (!problem) return schedule;
  if (problem->position >= 0) throw ConfigError(place(name, problem->rank, columns[problem->rank][problem->position]) + ": " + problem->what);
  throw ConfigError(
      fmt::format("{}: {}{}", name, problem->rank >= 0 ? fmt::format("row {} (rank {}): ", problem->rank + 1, problem->rank) : "", problem->what));
}

Schedule read_csv_file(const std::string& path) {
  std::error_code error;
  const bool special = is_there(path) && !std::filesystem::is_regular_file(path, error);  // a pipe might never end, or never begin
  require(!special, path, is_folder(path) ? ": is a folder" : ": is not a regular file", "; name a CSV file that holds a schedule");
  return read_csv(read_text_file(path, path), path);
}

}  // namespace tessera::schedules
