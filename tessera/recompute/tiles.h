#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <torch/nn/module.h>

#include "tessera/core/attachment.h"

namespace tessera {

/// From now on each module that matches goes through its tokens in tiles of about `tile`, one after the other, and each tile is computed again in backward just
/// before it is needed (tiled MLP; Arctic Long Sequence Training, arXiv:2506.13996). For modules that work on each token by itself: x [B, S, D] -> [B, S, D'],
/// feed-forward layers above all, whose inner tensors [B, S, F] are the largest of a block. Where a module is told otherwise (a router with a capacity, a
/// norm over tokens), it computes something else: it is the caller's to say which do not.
///
/// Where ranks hold x [B, S/n, D] in parts, which the module brings together (TiledParts), a tile is of all of them: as many positions of each rank's.
///
/// Kept for backward: x. At once: what the module makes of one tile, and its output, twice for a moment, while tiles are put together. Time: the module's
/// forward once more. The same products over fewer rows: results as those of the whole, up to the order in which a kernel sums. Without gradients, or in
/// modules that are not training, tiles are as they are and nothing is computed again. Collectives inside run once for each tile. What is returned ends it.
///
/// ConfigError: a pattern that matches nothing (nearest path), a module that cannot be intercepted, tile < 1; at a call, inputs that are not one tensor of
/// three dimensions.
struct TiledParts {
  int ranks = 1;                      ///< that hold S positions as chunk deals them
  std::function<int64_t()> sequence;  ///< S, of the call at hand
  /// Whoever brings parts together is told of how many positions these are, around each tile and when it is computed again.
  std::function<void(int64_t positions)> set_sequence;
};
[[nodiscard]] Attachment tile_tokens(torch::nn::Module& root, const std::string& pattern, int64_t tile, const TiledParts& parts = {});

/// The same of grouped experts (nn::GroupedExperts), whose rows x [N, D] are sorted: tiles of `tile` rows, whichever experts they are of. An expert's gradient
/// is added up over the tiles that it has rows in, and every tile casts weights where products are in another type than they: worth it for many rows an expert.
/// Counts are read on the host once a call. Attach it before what brings rows of other ranks (expert_parallel), so that tiles are of what has come.
[[nodiscard]] Attachment tile_experts(torch::nn::Module& root, const std::string& pattern, int64_t tile);

}  // namespace tessera
