#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace tessera {

/// Columns `begin` .. `begin + size` of a whole sequence.
struct ColumnRun {
  int64_t begin = 0, size = 0;
  bool operator==(const ColumnRun&) const = default;
};

/// Which columns of a sequence each rank of a group holds: every column lies on one rank. A rank's tensors hold its runs one after the other.
struct SequenceCut {
  int64_t length = 0;                        ///< of the whole sequence
  std::vector<std::vector<ColumnRun>> runs;  ///< of each rank, ascending; none is empty

  int ranks() const { return static_cast<int>(runs.size()); }
  int64_t columns(int rank) const;  ///< how many it holds; 0 where there are fewer columns than ranks
  /// The rank's columns as int64 [columns(rank)].
  at::Tensor positions(int rank, at::Device device) const;
  bool operator==(const SequenceCut&) const = default;

  /// One run each, dealt by layout's rule (chunk).
  static SequenceCut contiguous(int64_t length, int ranks);
  /// The sequence in 2 * ranks parts, of which rank r holds number r and number 2 * ranks - 1 - r: where a query sees all keys before it, every rank then has
  /// the same work, within a column (zig-zag; arXiv:2311.09431 deals single tokens to the same end). Ranks hold as many columns, give or take one.
  static SequenceCut head_tail(int64_t length, int ranks);
  /// The same of each document of a packed sequence, of these lengths: attention ends with the document, and the work of a plain cut is that of whoever holds
  /// the long ones. A rank's work is counted in pairs of a query and a key, and a column as much as the longest document has of them at most, for layers
  /// that see one column cost what columns there are: the heaviest pairs of parts go to who has least. So ranks have the same work within a few columns of
  /// the longest document, and nearly as many columns. One document is cut as a sequence of its length.
  static SequenceCut head_tail(const std::vector<int64_t>& documents, int ranks);
  /// One run each of the whole, whatever the documents.
  static SequenceCut contiguous(const std::vector<int64_t>& documents, int ranks);
};

/// How the columns of a sequence of packed documents (one: a plain sequence), of these lengths, are dealt over so many ranks.
using CutRule = SequenceCut (*)(const std::vector<int64_t>& documents, int ranks);

/// Which columns of every sequence a rank has.
struct ColumnShare {
  CutRule rule = &SequenceCut::contiguous;
  int rank = 0, ranks = 1;

  bool cut() const { return ranks > 1; }
};

}  // namespace tessera
