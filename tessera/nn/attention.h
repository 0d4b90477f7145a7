#pragma once

#include <optional>

#include "tessera/nn/attention_tiles.h"
#include "tessera/nn/module.h"

namespace tessera::nn {

/// Legend: B rows, S queries, L keys (S, or more where earlier ones come from a cache), H query heads, K key-value heads, D features of a head.
///
/// softmax(q k^T / sqrt(D)) v, causal unless said otherwise, within a window where one is given: the part of attention without parameters, a module of its own
/// so that context parallelism, recompute and caches meet it by path.
///   q    [B, S, H, D];  k, v [B, L, K, D], K divides H (grouped queries, arXiv:2305.13245; never expanded)
///   out  [B, S, H, D]
/// The last query sees the last key. `positions` [S] int64, where columns are not in ascending order or not all there, says what may see what: a query sees the
/// keys of no later position, and a window is counted in positions. `document_ids` [B, S] keeps the attention inside a document. With either S == L. Nothing of
/// the size S x L is held: documents and runs are tiles of the fused kernel (attention_tiles.h); of columns that share a position in a document, each is a tile
/// of its own. Both are read on the host. A window of W costs B S W pairs of every head, and copies of q, k, v and the output beside. With run.kernels =
/// reference all of it goes through masked_attention, but for whole rows of one document.
class AttentionCoreImpl : public Module {
 public:
  explicit AttentionCoreImpl(const AttentionReach& reach = {}) : reach_(reach) {}

  at::Tensor forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& positions = {},
                     const std::optional<at::Tensor>& document_ids = {});

  const AttentionReach& reach() const noexcept { return reach_; }

 private:
  AttentionReach reach_;
};
TESSERA_MODULE(AttentionCore);

/// The same in plain operators with a mask [B or 1, 1, S, L] of what may be seen (true): holds the S x L scores.
at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& visible);

}  // namespace tessera::nn
