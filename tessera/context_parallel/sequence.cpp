#include <numeric>

#include <ATen/ops/empty.h>

#include "tessera/comm/collectives.h"
#include "tessera/context_parallel/context.h"
#include "tessera/core/error.h"
#include "tessera/core/host_read.h"

namespace tessera::context {

Sequence::Sequence(const comm::Group& group, SequenceCut cut, bool causal, const at::Tensor& document_ids)
    : cut_(std::move(cut)), causal_(causal), rows_(document_ids.size(0)) {
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank) parts.push_back(at::empty({rows_, cut_.columns(rank)}, document_ids.options()));
  comm::all_gather_uneven(group, parts, document_ids);
  documents_.resize(static_cast<size_t>(rows_ * cut_.length));
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::vector<double> ids = host_read_all(parts[static_cast<size_t>(rank)], /*dry_answer=*/0);
    const int64_t columns = cut_.columns(rank);
    for (int64_t row = 0; row < rows_; ++row) {
      int64_t column = row * columns;
      for (const auto& [begin, size] : cut_.runs[static_cast<size_t>(rank)]) {
        for (int64_t i = 0; i < size; ++i)
          documents_[static_cast<size_t>(row * cut_.length + begin + i)] = static_cast<int64_t>(ids[static_cast<size_t>(column++)]);
      }
    }
  }
}

nn::AttentionColumns Sequence::columns(const std::vector<ColumnRun>& runs) const {
  if (documents_.empty()) {
    nn::AttentionColumns made{.rows = {{}}};
    int64_t column = 0;
    for (const auto& [begin, size] : runs) {
      made.rows[0].push_back({.column = column, .position = begin, .size = size, .document = 0});
      column += size;
    }
    return made;
  }
  std::vector<int64_t> positions, documents;
  for (const auto& [begin, size] : runs) {
    positions.resize(positions.size() + static_cast<size_t>(size));
    std::iota(positions.end() - size, positions.end(), begin);
  }
  for (int64_t row = 0; row < rows_; ++row) {
    for (const int64_t position : positions) documents.push_back(documents_[static_cast<size_t>(row * cut_.length + position)]);
  }
  return nn::AttentionColumns::of(positions, documents);
}

}  // namespace tessera::context
