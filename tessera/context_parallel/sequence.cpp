#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>

#include "tessera/comm/collectives.h"
#include "tessera/context_parallel/context.h"
#include "tessera/core/error.h"
#include "tessera/core/hash_tensor.h"
#include "tessera/core/host_read.h"
#include "tessera/nn/dry_documents.h"
#include "tessera/nn/noted.h"

namespace tessera::context {

namespace {

GatheredDocuments gather(const comm::Group& group, const SequenceCut& cut, const at::Tensor& document_ids) {
  GatheredDocuments gathered{.rows = document_ids.size(0), .ids = {}};
  std::vector<at::Tensor> parts;
  for (int rank = 0; rank < group.size(); ++rank) parts.push_back(at::empty({gathered.rows, cut.columns(rank)}, document_ids.options()));
  comm::all_gather_uneven(group, parts, document_ids);
  gathered.ids.resize(static_cast<size_t>(gathered.rows * cut.length));
  for (int rank = 0; rank < group.size(); ++rank) {
    const std::vector<int64_t> ids = host_read_integers(parts[static_cast<size_t>(rank)], /*dry_answer=*/0);
    const int64_t columns = cut.columns(rank);
    for (int64_t row = 0; row < gathered.rows; ++row) {
      int64_t column = row * columns;
      for (const auto& [begin, size] : cut.runs[static_cast<size_t>(rank)]) {
        for (int64_t i = 0; i < size; ++i) gathered.ids[static_cast<size_t>(row * cut.length + begin + i)] = ids[static_cast<size_t>(column++)];
      }
    }
  }
  if (!document_ids.is_meta()) return gathered;
  if (auto ids = nn::DryDocuments::ids(gathered.rows, cut.length); !ids.empty()) gathered.ids = std::move(ids);
  return gathered;
}

}  // namespace

void Context::begin_pass() {
  ++pass_;
  pass_is_known_ = true;
  documents_ = nullptr;
}

std::shared_ptr<const GatheredDocuments> Context::documents_of(const at::Tensor& document_ids, uint64_t& called_in) {
  const auto known = nn::Noted<nn::NotedValue>::next([&]() -> nn::NotedValue {
    if (called_in == pass_) pass_is_known_ = false;
    called_in = pass_;
    const uint32_t version = document_ids.is_inference() ? 0 : static_cast<uint32_t>(document_ids._version());
    const uint64_t values = pass_is_known_ && document_ids.is_cpu() ? hash_of_values(document_ids) : 0;
    const bool same = pass_is_known_ && documents_ != nullptr && ids_.is_alias_of(document_ids) && ids_.storage_offset() == document_ids.storage_offset() &&
                      ids_.sizes() == document_ids.sizes() && version_ == version;
    require(
        !same || values == values_,
        "context_parallel: document_ids were filled anew, and no pass has begun since the ranks gathered them; call set_cut before each pass whose documents "
        "are other ones");
    if (!same) {
      values_ = values;
      documents_ = std::make_shared<const GatheredDocuments>(gather(group, *cut, document_ids));
      ids_ = document_ids;
      version_ = version;
    }
    return documents_;
  });
  return std::static_pointer_cast<const GatheredDocuments>(known);
}

nn::AttentionColumns Sequence::columns(const std::vector<ColumnRun>& runs) const {
  if (documents_ == nullptr) {
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
  for (int64_t row = 0; row < documents_->rows; ++row) {
    for (const int64_t position : positions) documents.push_back(documents_->ids[static_cast<size_t>(row * cut_.length + position)]);
  }
  return nn::AttentionColumns::of(positions, documents);
}

}  // namespace tessera::context
