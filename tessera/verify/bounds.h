#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"

namespace tessera {

/// How far a layout may be from one device; every difference is relative (VerifyReport).
///
/// fp32: losses and norms 5e-6, gradients and updated weights 1e-5; initial weights 0. A narrower type rounds more coarsely where the layout adds up in another
/// order, u being half the distance of 1 to its next number:
///   gradients  (s + 1) u  where the contributions of s ranks cross the network in that type, or those of s micro-batches are summed in it;
///              8 u        of the compute type, where axes other than the data axes split the products themselves
///              besides, of what crosses in fp16, whose smallest number is 2^-24: 2^-24 n^2 for each crossing of n ranks' terms, absolutely (gradient_floor)
///   losses     u          of the compute type in that last case, and of fp8 where experts scale the rows of several ranks by one number
///   weights    2 u        of the type they are kept in: one may round up where the other rounds down
///   routing    32 u       of the compute type, and at most a half, of a token's largest score: scores of experts that differ by less may be ranked either way;
///                         and u of what all choices of a router could give up (GivenUp), for rounding ranks otherwise only what is close, and most is not
/// Everything 0 where the arithmetic is the same: one rank, or data ranks alone with run.deterministic. Tiles of tokens (recompute.ffn_tile) split products.
struct VerifyBounds {
  bool bit_for_bit = false;
  double losses = 0, gradient_norms = 0, gradients = 0, weights = 0, routing = 0, routing_share = 0;
  double gradient_floor = 0;   ///< an entry of a gradient that the loss scale multiplies may be off by this, whatever its tensor's largest
  double output_roundoff = 0;  ///< u of the type in which modules compute

  /// What the output of a module may be off, `depth` modules having computed before it: rounding errors of about 8 u each that add up as a random walk.
  /// `dtype` is the output's own type, where that is the coarser one.
  double output(at::ScalarType dtype, int64_t depth) const;
};

/// The bounds of `layout` on `world` ranks, of which `data_ranks` split the batch, and `column_ranks` each of its sequences.
VerifyBounds bounds_of(const Config& layout, int world, int data_ranks, int column_ranks = 1);

/// Half the distance of 1 to the next number of a configuration's number format ("bf16": 2^-8); products in tf32 round as fp16 does.
double roundoff(const std::string& format);

}  // namespace tessera
