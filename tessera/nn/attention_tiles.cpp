#include "tessera/nn/attention_tiles.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/nn/dry_documents.h"

// What attention sees is a staircase of blocks wherever columns come in runs: packed documents, parts of a sequence, keys of an earlier call. Fused kernels
// know two forms, everything and a triangle that begins at the first key; a list of these says the same as a mask and takes memory for the list alone.
//
// A window adds a second edge, parallel to the diagonal, and kernels have no form for it. Read backwards, the last query first, it is a diagonal: with
// positions negated, "no earlier than the window" is "no later". So what lies before a block of queries goes through the same rule in mirrored positions, and
// kernels are given such a tile in reversed order.

namespace tessera::nn {

namespace {

/// Adds what queries see of keys by causality; `mirrored`: both runs are in reversed order.
void add_tiles(std::vector<AttentionTile>& tiles, int64_t row, const AttentionRun& queries, const AttentionRun& keys, bool causal, bool mirrored = false) {
  if (queries.size == 0 || keys.size == 0) return;
  const auto add = [&](int64_t query, int64_t query_count, int64_t key, int64_t key_count, bool diagonal) {
    if (query_count <= 0 || key_count <= 0) return;
    const auto begin = [&](const AttentionRun& run, int64_t first, int64_t count) { return run.column + (mirrored ? run.size - first - count : first); };
    tiles.push_back({.row = row,
                     .queries = {begin(queries, query, query_count), query_count},
                     .keys = {begin(keys, key, key_count), key_count},
                     .form = !diagonal  ? TileForm::Whole
                             : mirrored ? TileForm::From
                                        : TileForm::UpTo});
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

/// The columns of a run at the positions `from` .. `to` - 1.
AttentionRun part_at(const AttentionRun& run, int64_t from, int64_t to) {
  const int64_t begin = std::clamp<int64_t>(from - run.position, 0, run.size), end = std::clamp<int64_t>(to - run.position, begin, run.size);
  return {.column = run.column + begin, .position = run.position + begin, .size = end - begin, .document = run.document};
}

/// A run in reversed order, moved by `later` positions towards the end before: what was so far before another, at most, then lies behind it or at it.
AttentionRun mirrored(const AttentionRun& run, int64_t later) {
  return {.column = run.column, .position = -(run.position + run.size - 1 + later), .size = run.size, .document = run.document};
}

int64_t end_of(const AttentionRun& run) { return run.position + run.size; }

void add_within_window(std::vector<AttentionTile>& tiles, int64_t row, const AttentionRun& all, const AttentionRun& keys, int64_t window) {
  if (end_of(all) - keys.position <= window) return add_tiles(tiles, row, all, keys, true);  // it ends before the first key
  const AttentionRun queries = part_at(all, keys.position, end_of(keys) + window - 1);
  for (int64_t begin = 0; begin < queries.size; begin += window) {
    const AttentionRun block = part_at(queries, queries.position + begin, queries.position + begin + window);
    add_tiles(tiles, row, block, part_at(keys, block.position, end_of(block)), true);
    add_tiles(tiles, row, mirrored(block, 0), mirrored(part_at(keys, block.position - window + 1, block.position), window - 1), true, /*mirrored=*/true);
  }
}

/// Tiles of one size that follow each other at equal distances become one.
std::vector<AttentionTile> together(const std::vector<AttentionTile>& tiles) {
  std::vector<AttentionTile> made;
  std::map<std::tuple<int64_t, TileForm, int64_t, int64_t>, size_t> last;  // of each size
  for (const AttentionTile& tile : tiles) {
    const auto [found, is_new] = last.try_emplace({tile.row, tile.form, tile.queries.size, tile.keys.size}, made.size());
    if (!is_new) {
      AttentionTile& before = made[found->second];
      const int64_t step = (tile.queries.begin - before.queries.begin) / before.times;
      const bool apart = step >= std::max(tile.queries.size, tile.keys.size);
      if (apart && (before.times == 1 || step == before.step) && tile.queries.begin == before.queries.begin + before.times * step &&
          tile.keys.begin == before.keys.begin + before.times * step) {
        ++before.times;
        before.step = step;
        continue;
      }
      found->second = made.size();
    }
    made.push_back(tile);
  }
  return made;
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

int64_t AttentionTile::pairs() const { return times * (form == TileForm::Whole ? queries.size * keys.size : queries.size * (queries.size + 1) / 2); }

bool AttentionTile::sees(int64_t i, int64_t j) const { return form == TileForm::Whole || (form == TileForm::UpTo ? j <= i : j >= i); }

AttentionTile AttentionTile::single(int64_t time) const {
  AttentionTile one = *this;
  one.queries.begin += time * step;
  one.keys.begin += time * step;
  one.times = 1;
  one.step = 0;
  return one;
}

std::vector<AttentionTile> attention_tiles(const AttentionColumns& queries, const AttentionColumns& keys, const AttentionReach& reach) {
  invariant(reach.window == 0 || (reach.causal && reach.window > 0), "attention: a window of ", reach.window, " that is not causal");
  const size_t rows = std::max(queries.rows.size(), keys.rows.size());
  const auto of_row = [](const AttentionColumns& columns, size_t row) -> const auto& { return columns.rows[columns.rows.size() == 1 ? 0 : row]; };
  std::vector<AttentionTile> tiles;
  for (size_t row = 0; row < rows; ++row) {
    const int64_t number = rows == 1 ? -1 : static_cast<int64_t>(row);
    for (const AttentionRun& query : of_row(queries, row)) {
      for (const AttentionRun& key : of_row(keys, row)) {
        if (query.document != key.document) continue;
        reach.window > 0 ? add_within_window(tiles, number, query, key, reach.window) : add_tiles(tiles, number, query, key, reach.causal);
      }
    }
  }
  return reach.window > 0 && !DryDocuments::are_apart() ? together(tiles) : tiles;
}

bool within_reach(const AttentionColumns& queries, const AttentionColumns& keys, const AttentionReach& reach) {
  const auto meets = [&](const AttentionRun& query, const AttentionRun& key) {
    if (!reach.causal) return true;
    return key.position < end_of(query) && (reach.window == 0 || query.position - end_of(key) + 1 < reach.window);
  };
  return std::ranges::any_of(queries.rows, [&](const auto& query_runs) {
    return std::ranges::any_of(query_runs, [&](const AttentionRun& query) {
      return std::ranges::any_of(
          keys.rows, [&](const auto& key_runs) { return std::ranges::any_of(key_runs, [&](const AttentionRun& key) { return meets(query, key); }); });
    });
  });
}

}  // namespace tessera::nn
