#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

/// Where tokens go in a mixture of experts, as values: which experts a token takes (`chosen`), and the order in which the copies of tokens are sorted by
/// expert (`Dispatch`). Shapes never depend on the data, so a dry run sees the same ones and nobody waits for a device.
///
/// Legend: T tokens, D features, E experts, K choices of a token, N places (rows in the order of experts).
namespace tessera::kernels {

/// The experts of the K largest scores of each token, the largest first; of equal scores the lower index, so that a second computation chooses the same.
///   scores [T, E] fp32      result [T, K] int64
/// Throws ConfigError unless 1 <= k <= E.
at::Tensor choose_experts(const at::Tensor& scores, int64_t k);

/// Each expert takes the `tokens_each` tokens with the largest scores in its column (expert choice, arXiv:2202.09368); of equal scores the earlier token.
///   scores [T, E] fp32      result [T, E] int64: e where expert e takes the token, else -1
/// Throws ConfigError unless 1 <= tokens_each <= T (T = 0: nothing is chosen).
at::Tensor choose_tokens(const at::Tensor& scores, int64_t tokens_each);

/// Copies of tokens sorted by expert, those of one expert in the order of tokens. Choice c = t * K + k is what token t has in its k-th column.
struct Dispatch {
  at::Tensor slots;   ///< [T, K] int64: the place of each choice; -1: none (dropped, or nothing chosen)
  at::Tensor order;   ///< [N] int64: the choice in each place; -1: the place stays empty, behind all that are taken
  at::Tensor counts;  ///< [E] int64: places that each expert has, in order from place 0
};

struct DispatchLimits {
  std::optional<int64_t> capacity = std::nullopt;  ///< most tokens of an expert; more are dropped: first choices go before second ones, then earlier tokens
  std::optional<int64_t> places = std::nullopt;    ///< N; default: all T * K, or E * capacity where that is less. At least as many as are taken
};

/// chosen [T, K] int64, each 0 .. E - 1 or -1. Memory: N + T * K + E int64. One pass in order: the same on any number of threads.
Dispatch dispatch(const at::Tensor& chosen, int64_t experts, const DispatchLimits& limits = {});

/// Copies of tokens in their places: out[n] = x[order[n] / K]; empty places are zero. Differentiable: dx[t] adds its copies up in the order of its choices.
///   x [T, D] fp32 or bf16   result [N, D]
/// Reads N, writes N rows; kept for backward: slots.
at::Tensor gather_rows(const at::Tensor& x, const Dispatch& where);

/// What the experts made of the copies, brought back: out[t] = sum over k of weights[t, k] * rows[slots[t, k]], in that order, so that no sum depends on
/// threads; sums in fp32, rounded once. A token without a place gets zero. Differentiable in rows and weights.
///   rows [N, D] fp32 or bf16    weights [T, K] fp32    result [T, D] of rows' dtype
/// Reads N, writes T rows; kept for backward: rows, weights, slots, order.
at::Tensor combine_rows(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& where);

}  // namespace tessera::kernels
