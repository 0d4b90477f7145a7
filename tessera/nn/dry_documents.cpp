#include "tessera/nn/dry_documents.h"

#include <numeric>
#include <utility>

#include "tessera/core/ambient.h"

namespace tessera::nn {
namespace {

const Ambient<std::vector<int64_t>> lengths_now;
const Ambient<bool> apart_now;

}  // namespace

DryDocuments::DryDocuments(std::vector<int64_t> lengths, bool apart)
    : before_(std::exchange(*lengths_now, std::move(lengths))), before_apart_(std::exchange(*apart_now, apart)) {}

DryDocuments::~DryDocuments() {
  *lengths_now = std::move(before_);
  *apart_now = before_apart_;
}

bool DryDocuments::are_apart() { return *apart_now; }

std::vector<int64_t> DryDocuments::ids(int64_t rows, int64_t size) {
  const std::vector<int64_t>& lengths = *lengths_now;
  if (lengths.empty() || std::accumulate(lengths.begin(), lengths.end(), int64_t{0}) != size) return {};
  std::vector<int64_t> ids;
  ids.reserve(static_cast<size_t>(rows * size));
  for (int64_t row = 0; row < rows; ++row) {
    for (size_t document = 0; document < lengths.size(); ++document)
      ids.insert(ids.end(), static_cast<size_t>(lengths[document]), static_cast<int64_t>(document));
  }
  return ids;
}

}  // namespace tessera::nn
