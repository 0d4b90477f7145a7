#pragma once

#include <cstdint>
#include <vector>

namespace tessera::nn {

/// Lengths of the documents of each row, one after the other: what attention takes on meta, where no ids can be read. While alive, on this thread; without it,
/// or in rows of another length, a row is one document. Nests. `apart`: tiles of one size are no rows of one call, as those of documents that are all of
/// different lengths are none.
class DryDocuments {
 public:
  explicit DryDocuments(std::vector<int64_t> lengths, bool apart = false);
  ~DryDocuments();
  DryDocuments(const DryDocuments&) = delete;
  DryDocuments& operator=(const DryDocuments&) = delete;

  /// Ids of the columns of `rows` rows of `size`; empty where nothing is known of such rows.
  static std::vector<int64_t> ids(int64_t rows, int64_t size);
  static bool are_apart();

 private:
  std::vector<int64_t> before_;
  bool before_apart_;
};

}  // namespace tessera::nn
