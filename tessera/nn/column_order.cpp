#include "tessera/nn/column_order.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <tuple>

#include "tessera/core/error.h"
#include "tessera/core/host_read.h"
#include "tessera/nn/dry_documents.h"

namespace tessera::nn {

namespace {

std::vector<int64_t> read(const std::optional<at::Tensor>& tensor) {
  if (!tensor || tensor->is_meta()) return {};
  return host_read_integers(*tensor, 0);
}

struct Place {
  int64_t document, position, column;  ///< documents by their first column
  bool operator<(const Place& other) const { return std::tie(document, position, column) < std::tie(other.document, other.position, other.column); }
};

std::vector<Place> places_of(int64_t size, const std::vector<int64_t>& positions, const int64_t* documents) {
  std::vector<Place> places;
  std::map<int64_t, int64_t> first_columns;
  for (int64_t column = 0; column < size; ++column) {
    const int64_t document = documents ? first_columns.try_emplace(documents[column], column).first->second : 0;
    places.push_back({document, positions.empty() ? column : positions[static_cast<size_t>(column)], column});
  }
  std::ranges::stable_sort(places, std::less<>());
  return places;
}

std::vector<AttentionRun> runs_of(const std::vector<Place>& places, bool distances) {
  std::vector<AttentionRun> runs;
  int64_t position = 0;
  for (size_t i = 0; i < places.size(); ++i) {
    const bool same_document = i > 0 && places[i].document == places[i - 1].document;
    const bool tied = same_document && places[i].position == places[i - 1].position;
    position = distances ? places[i].position : !same_document ? 0 : tied ? position : position + 1;
    if (same_document && !tied && runs.back().position + runs.back().size == position) {
      ++runs.back().size;
    } else {
      runs.push_back({.column = static_cast<int64_t>(i), .position = position, .size = 1, .document = places[i].document});
    }
  }
  return runs;
}

}  // namespace

ColumnOrder column_order(int64_t rows, int64_t size, const std::optional<at::Tensor>& positions, const std::optional<at::Tensor>& document_ids,
                         bool distances) {
  const std::vector<int64_t> places = read(positions);
  const std::vector<int64_t> documents = document_ids && document_ids->is_meta() ? DryDocuments::ids(rows, size) : read(document_ids);
  invariant(places.empty() || static_cast<int64_t>(places.size()) == size, "positions of ", places.size(), " columns for ", size);
  invariant(documents.empty() || static_cast<int64_t>(documents.size()) == rows * size, "document ids of ", documents.size(), " columns for ", rows,
            " rows of ", size);
  ColumnOrder order;
  bool in_order = true;
  for (int64_t row = 0; row < rows; ++row) {
    const std::vector<Place> sorted = places_of(size, places, documents.empty() ? nullptr : documents.data() + row * size);
    for (int64_t i = 0; i < size; ++i) {
      in_order &= sorted[static_cast<size_t>(i)].column == i;
      order.index.push_back(row * size + sorted[static_cast<size_t>(i)].column);
    }
    order.columns.rows.push_back(runs_of(sorted, distances));
  }
  if (in_order) order.index.clear();
  auto& of_rows = order.columns.rows;
  if (std::ranges::all_of(of_rows, [&](const auto& runs) { return runs == of_rows.front(); })) of_rows.resize(1);
  return order;
}

}  // namespace tessera::nn
