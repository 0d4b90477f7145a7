#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/core/attachment.h"

/// Low-rank adaptation (LoRA, arXiv:2106.09685): a linear layer keeps its weight W [O, I] as it is and learns B A beside it, of few rows.
///   y = x W^T + (alpha / rank) dropout(x) A^T B^T
///   A = PATH.lora_a [rank, I]   begins uniform in +-1 / sqrt(I), drawn from (seed, name, index): the same bits in any layout
///   B = PATH.lora_b [O, rank]   begins as zeros, so that the model begins as what it was
/// Memory: rank (I + O) parameters a layer, and optimizer state and gradients of these alone; x is kept for backward once more where it is dropped from.
/// Nothing is communicated: whoever cuts the layer cuts one of the two with it, and the other's gradient is a term of a sum that is made once a step
/// (nn/along.h).
namespace tessera::lora {

struct Options {
  std::vector<std::string> modules;  ///< linear layers, by patterns of paths
  int64_t rank = 8;
  double alpha = 16;
  double dropout = 0;                     ///< share of the elements of x that the term does not see while training; by counter, as nn::Dropout's
  std::vector<std::string> trained = {};  ///< parameters that are trained beside them, by patterns of names
  uint64_t seed = 0;                      ///< of A, where the model has memory already; of one on meta materialize says it
};

/// Adds A and B to every nn::Linear, and every Linear of libtorch's own, under `root` that one of the patterns names, attaches what computes them (innermost:
/// call this before the model is cut or sharded), and freezes all else but `trained`, and but what adapters that are attached already were told to train. What
/// is returned takes the terms away; the parameters stay, and a later call that names their layers computes with them again, as they were trained. Throws
/// ConfigError for a pattern that names no linear layer (with the nearest path), or experts; for a layer whose terms are attached, or of another rank; and for
/// a pattern of `trained` that names nothing. Libtorch's own get their term where this thread multiplies by their weight (plain_linear.h): call it on the
/// thread that trains. They may be replicated (DDP, ZeRO 1 and 2), not sharded; state_dicts of the model list A and B beside the weight.
[[nodiscard]] Attachment attach(torch::nn::Module& root, const Options& options);

}  // namespace tessera::lora
