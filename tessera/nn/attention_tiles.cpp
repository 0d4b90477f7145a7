#include "tessera/nn/attention_tiles.h"

#include <algorithm>

#include "tessera/core/error.h"

// What attention sees is a staircase of blocks wherever columns come in runs: packed documents, parts of a sequence, keys of an earlier call. Fused kernels
// know two forms, everything and a triangle that begins at the first key; a list of these says the same as a mask and takes memory for the list alone.

namespace tessera::nn {

namespace {

void add_tiles(std::vector<AttentionTile>& tiles, int64_t row, const AttentionRun& queries, const AttentionRun& keys, bool causal) {
  if (queries.document != keys.document || queries.size == 0 || keys.size == 0) return;
  const auto add = [&](int64_t query, int64_t query_count, int64_t key, int64_t key_count, bool aligned) {
    if (query_count <= 0 || key_count <= 0) return;
    tiles.push_back({.row = row, .queries = {queries.column + query, query_count}, .keys = {keys.column + key, key_count}, .aligned = aligned});
  };
  // Keys that the first query sees all of, and so do the others; itself belongs to the triangle unless it is the last.
  const int64_t seen_by_first = queries.position + 1 - keys.position;
  if (!causal || seen_by_first >= keys.size) return add(0, queries.size, 0, keys.size, false);
  const int64_t before = std::max<int64_t>(seen_by_first - 1, 0);
  add(0, queries.size, 0, before, false);
  const int64_t blind = std::max<int64_t>(keys.position - queries.position, 0);  // queries before the first key
  const int64_t side = std::min(keys.size - before, queries.size - blind);
  add(blind, side, before, side, true);
  add(blind + side, queries.size - blind - side, before, side, false);
}

}  // namespace

int64_t AttentionColumns::size() const {
  int64_t columns = 0;
  for (const AttentionRun& run : rows.front()) columns += run.size;
  return columns;
}

AttentionColumns AttentionColumns::consecutive(int64_t size, int64_t first_position) {
  return {.rows = {{{.column = 0, .position = first_position, .size = size, .document = 0}}}};
}

AttentionColumns AttentionColumns::of(std::span<const int64_t> positions, std::span<const int64_t> documents) {
  const size_t columns = positions.size();
  invariant(columns == 0 || documents.size() % columns == 0, "document ids of ", documents.size(), " columns for rows of ", columns);
  AttentionColumns made;
  made.rows.resize(columns == 0 || documents.empty() ? 1 : documents.size() / columns);
  for (size_t row = 0; row < made.rows.size(); ++row) {
    auto& runs = made.rows[row];
    for (size_t column = 0; column < columns; ++column) {
      const int64_t document = documents.empty() ? 0 : documents[row * columns + column];
      const bool goes_on = !runs.empty() && runs.back().document == document && runs.back().position + runs.back().size == positions[column];
      if (goes_on) {
        ++runs.back().size;
      } else {
        runs.push_back({.column = static_cast<int64_t>(column), .position = positions[column], .size = 1, .document = document});
      }
    }
  }
  if (std::ranges::all_of(made.rows, [&](const auto& runs) { return runs == made.rows.front(); })) made.rows.resize(1);
  return made;
}

int64_t AttentionTile::pairs() const { return aligned ? queries.size * (queries.size + 1) / 2 : queries.size * keys.size; }

std::vector<AttentionTile> attention_tiles(const AttentionColumns& queries, const AttentionColumns& keys, bool causal) {
  const size_t rows = std::max(queries.rows.size(), keys.rows.size());
  const auto of_row = [](const AttentionColumns& columns, size_t row) -> const auto& { return columns.rows[columns.rows.size() == 1 ? 0 : row]; };
  std::vector<AttentionTile> tiles;
  for (size_t row = 0; row < rows; ++row) {
    for (const AttentionRun& query : of_row(queries, row)) {
      for (const AttentionRun& key : of_row(keys, row)) add_tiles(tiles, rows == 1 ? -1 : static_cast<int64_t>(row), query, key, causal);
    }
  }
  return tiles;
}

}  // namespace tessera::nn
