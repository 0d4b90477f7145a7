#pragma once

#include <cstdint>
#include <vector>

namespace tessera::nn {

/// Lengths of the documents of each row, one after the other: what attention takes on meta, where no ids can be read. While alive, on this thread; without it,
/// or in rows of another length, a row is one document. Nests.
class DryDocuments {
 public:
  explicit DryDocuments(std::vector<int64_t> lengths);
  ~DryDocuments();
  DryDocuments(const DryDocuments&) = delete;
  DryDocuments& operator=(const DryDocuments&) = delete;

  /// Ids of the columns of `rows` rows of `size`; empty where nothing is known of such rows.
  static std::vector<int64_t> ids(int64_t rows, int64_t size);

 private:
  std::vector<int64_t> before_;
};

}  // namespace tessera::nn
