#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/nn/attention_tiles.h"

namespace tessera::nn {

/// An order of the columns of each row in which every document lies in one piece, by ascending position, and what the columns are in it.
struct ColumnOrder {
  AttentionColumns columns;    ///< with positions counted anew in each document, where only their order matters; columns of one position share it
  std::vector<int64_t> index;  ///< [rows * size], of all rows one after the other: where each column comes from; empty: they lie so already
};

/// Of `positions` [size] (none: 0, 1, ...) and `document_ids` [rows, size] (none: one document), which are read on the host; on meta, where nothing can be
/// read, they count as ascending and as one document, or those of DryDocuments. `distances`: how far positions are apart matters, and they stay what they are.
/// Costs a sort of each row, which is quick where it is sorted.
ColumnOrder column_order(int64_t rows, int64_t size, const std::optional<at::Tensor>& positions, const std::optional<at::Tensor>& document_ids,
                         bool distances = false);

}  // namespace tessera::nn
