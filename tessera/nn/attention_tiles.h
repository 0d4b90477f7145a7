#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/sequence_cut.h"

namespace tessera::nn {

/// Columns that lie beside each other in a tensor and in their document: column `column + i` is position `position + i` of `document`.
struct AttentionRun {
  int64_t column = 0, position = 0, size = 0, document = 0;
  bool operator==(const AttentionRun&) const = default;
};

/// What the columns of a tensor [B, S, ...] are: the runs of each row, or, where all rows are alike, of one.
struct AttentionColumns {
  std::vector<std::vector<AttentionRun>> rows;

  int64_t size() const;  ///< columns of a row
  bool operator==(const AttentionColumns&) const = default;

  /// Columns 0 .. size - 1 in order.
  static AttentionColumns consecutive(int64_t size, int64_t first_position = 0);
  /// By each column's position and, row by row, its document (none: one document). Runs are as long as they can be.
  static AttentionColumns of(std::span<const int64_t> positions, std::span<const int64_t> documents = {});
};

/// A rectangle of queries and keys (columns of their tensors) that a fused kernel computes whole. Aligned: a square of which query i sees the keys
/// 0 .. i; else each sees all.
struct AttentionTile {
  int64_t row = -1;  ///< of the batch; -1: all
  ColumnRun queries, keys;
  bool aligned = false;

  int64_t pairs() const;  ///< of a query and a key that it sees: the work
  bool operator==(const AttentionTile&) const = default;
};

/// What `queries` see of `keys`, as rectangles that do not overlap and leave nothing out: those of the same document and, if `causal`, of no later position.
/// Each run of queries meets each run of keys in at most three tiles: the keys before all of its queries, a triangle along the diagonal, and the queries after
/// all keys; where both are of one sequence that is cut, in at most two.
std::vector<AttentionTile> attention_tiles(const AttentionColumns& queries, const AttentionColumns& keys, bool causal);

}  // namespace tessera::nn
