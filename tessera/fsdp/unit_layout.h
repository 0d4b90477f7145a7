#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "tessera/layout/slice.h"

namespace tessera {

/// How the parameters of a unit lie one behind the other in a flat buffer, and where it is cut over n ranks: a plain value, made by a pure function.
///
///   buffer   p0 . p2 .. p1 ...        whole parameters, row-major, in any order, with small gaps
///   ranks    |  0  |  1  |  2 ..      contiguous, cut between rows (indices of dimension 0), so a rank has a run of rows of some parameters and none of others
///
/// Where `even`, rank r has the elements r * part .. (r + 1) * part, so the gathered buffer is what an all-gather of the parts writes, gradients are
/// reduce-scattered from where they lie, and every parameter is a view: nothing is copied. A cut through a row is avoided by a gap before the parameter;
/// one that several cuts would go through asks for a part of whole rows of it. Where no part within 1/64 (or a row) of the smallest does that (rows of
/// several large, coprime sizes), the cuts go to the nearest row, the parts differ, and they travel padded to the largest.
struct UnitLayout {
  struct Entry {
    std::vector<int64_t> shape;
    int64_t offset = 0;  ///< in elements from the start of the buffer
    int64_t numel = 0;
    bool operator==(const Entry&) const = default;
  };

  int ranks = 1;
  bool even = true;
  int64_t part = 0;            ///< elements that each rank sends
  int64_t size = 0;            ///< of the buffer: ranks * part where even
  std::vector<int64_t> begin;  ///< [ranks + 1]: rank r has begin[r] .. begin[r + 1]
  std::vector<Entry> parameters;

  int64_t numel() const;  ///< of the parameters, without gaps
  bool operator==(const UnitLayout&) const = default;
};

/// Lays out parameters of these shapes, in the order that wastes least. A large parameter begins at a multiple of 16 elements. Throws InternalError for ranks
/// < 1.
UnitLayout make_unit_layout(const std::vector<std::vector<int64_t>>& shapes, int ranks);

/// The rows of parameter `index` that `rank` has; a scalar is one row. {first, count}; first = 0 where there are none.
std::pair<int64_t, int64_t> rows_of(const UnitLayout& layout, size_t index, int rank);

/// Whether each rank has the same rows of parameter `a_index` of the one as of `b_index` of the other.
bool same_rows(const UnitLayout& a, size_t a_index, const UnitLayout& b, size_t b_index);

/// The elements of those rows.
int64_t elements_of(const UnitLayout& layout, size_t index, int rank);

/// Rows first .. first + count of the local tensor of `slice`, itself cut along any dimension by another technique, as a slice of the same logical tensor.
/// A scalar is one row. Throws InternalError for a slice whose boxes are flattened.
Slice cut_rows(const Slice& slice, int64_t first, int64_t count);

}  // namespace tessera
