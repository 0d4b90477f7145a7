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

/// Which keys of its document a query sees: all, or those of no later position; with a window of these alone that are less than `window` positions before its
/// own (Longformer, arXiv:2004.05150; Mistral, arXiv:2310.06825).
struct AttentionReach {
  bool causal = true;
  int64_t window = 0;  ///< its own position and window - 1 before it; 0: all. Needs causal

  /// Whether a query at one position sees a key at another of its document.
  bool sees(int64_t query, int64_t key) const { return !causal || (key <= query && (window == 0 || query - key < window)); }
  bool operator==(const AttentionReach&) const = default;
};

/// Of a rectangle of queries and keys, which a query sees: all keys, or, in a square, query i the keys 0 .. i, or the keys i and later.
enum class TileForm { Whole, UpTo, From };

/// A rectangle of queries and keys (columns of their tensors) that a fused kernel computes at once, or several of one size, each `step` queries and keys behind
/// the one before. These do not overlap.
struct AttentionTile {
  int64_t row = -1;  ///< of the batch; -1: all
  ColumnRun queries, keys;
  TileForm form = TileForm::Whole;
  int64_t times = 1, step = 0;

  int64_t pairs() const;                     ///< of a query and a key that it sees: the work
  bool sees(int64_t i, int64_t j) const;     ///< query i and key j of its rectangle
  AttentionTile single(int64_t time) const;  ///< one of `times`
  bool operator==(const AttentionTile&) const = default;
};

/// What `queries` see of `keys`, as rectangles that do not overlap and leave nothing out. Each run of queries meets each run of keys in at most three tiles:
/// the keys before all of its queries, a triangle along the diagonal, and the queries after all keys; where both are of one sequence that is cut, in at most
/// two. With a window of W, runs of queries are blocks of W: what lies before a block is seen from a diagonal on, and is that picture turned round. Two tiles,
/// each many times, say so of a whole sequence: the work is that of the pairs that are seen.
std::vector<AttentionTile> attention_tiles(const AttentionColumns& queries, const AttentionColumns& keys, const AttentionReach& reach);

/// Whether any query could see any of the keys, were all of one document.
bool within_reach(const AttentionColumns& queries, const AttentionColumns& keys, const AttentionReach& reach);

}  // namespace tessera::nn
