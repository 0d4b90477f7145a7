#pragma once

#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

#include "tessera/kernels/cross_entropy.h"
#include "tessera/kernels/gradient_place.h"
#include "tessera/kernels/vocabulary_parts.h"

namespace tessera::kernels {

struct LinearCrossEntropyOptions {
  /// Tokens whose logits exist at once; 0 cuts the tokens evenly into as few chunks as kLogitsBytes allows (but takes at least 128).
  int64_t chunk_tokens = 0;
  /// Dtype of the three products and of the logits; default: hidden's. fp32 or bf16; where products of it are
  /// widened (kernels/products.h), as fp16's on every CPU: operands rounded to it, logits and products in fp32, in chunks of as many tokens.
  std::optional<at::ScalarType> compute_dtype = std::nullopt;
  /// What backward is going to be called with for the loss, typically 1 / global_valid_tokens (times the loss scale). It is folded into the softmax pass; where
  /// backward then brings another number, the result is still right, at the cost of one pass over both gradients.
  double expected_gradient = 1.0;
  /// Asked, where set, where the weight's gradient goes: [V, D] fp32, contiguous, as the weight must be; overwritten, or added to, when it is computed and
  /// handed to autograd as it is (an alias). Undefined: a tensor of its own. Since that one is not needed then, the default chunk may take kLogitsBytesInPlace.
  /// What is added to a sum cannot be scaled any more: then backward throws Error where it brings another number than expected_gradient.
  std::function<GradientPlace()> weight_gradient{};
  /// Gradients are computed by the backward pass, from hidden and labels: for several forward passes whose backward passes are to come (a pipeline), each of
  /// which would hold a gradient of the whole weight. Costs the product that makes the logits once more; the same bits.
  bool in_backward = false;
  /// Label smoothing and z-loss, over the whole vocabulary.
  CrossEntropyOptions loss{};
  /// Where `weight` is some rows of the vocabulary and others hold the rest: labels are those of the whole, the loss is that of the whole, the gradient of
  /// hidden is this part's term of the sum. Besides, three fp32 numbers a token of a chunk. The default chunk is that of the largest part, on all of them.
  c10::intrusive_ptr<VocabularyParts> parts{};
};

/// Logits buffer of the default chunk. The larger one makes the three products about 10% faster, which read or write the whole weight once a chunk.
inline constexpr int64_t kLogitsBytes = int64_t{16} << 20;
inline constexpr int64_t kLogitsBytesInPlace = int64_t{64} << 20;

/// Tokens per chunk that linear_cross_entropy will use (the last chunk may have fewer). `logits_bytes` bounds the default chunk.
int64_t linear_cross_entropy_chunk(int64_t tokens, int64_t vocabulary, at::ScalarType compute_dtype, int64_t chunk_tokens = 0,
                                   int64_t logits_bytes = kLogitsBytes);

/// While one is alive, this thread's default chunk is all tokens: planning does so for programs that hold all logits at once.
class WholeLogitsGuard {
 public:
  WholeLogitsGuard();
  ~WholeLogitsGuard();
  WholeLogitsGuard(const WholeLogitsGuard&) = delete;
  WholeLogitsGuard& operator=(const WholeLogitsGuard&) = delete;

 private:
  bool former_;
};

/// Sum over valid tokens of the cross-entropy of `hidden @ weight^T`, without ever holding all logits; differentiable in `hidden` and `weight`.
///   hidden  [T, D]  fp32, bf16 or fp16
///   weight  [V, D]  fp32, bf16 or fp16; its gradient, accumulated over the chunks in fp32, comes in its grad_dtype()
///   labels  [T]     int64 in [0, V), or -100: the row counts for nothing and gets no gradient
///   result  []      fp32; divide by the global count of valid tokens, once, outside
/// For each chunk of C tokens: one product gives C * V logits, one pass turns them into losses and, in place, into their gradient (softmax - target), two
/// products turn that into the gradients of hidden and weight. So the gradients are ready when the forward pass ends (as in Liger Kernel, arXiv:2410.10989),
/// and backward hands them over: it can run once. (With in_backward all but the losses is made there.) Under no_grad, or where an input needs no gradient, its
/// products are skipped. Memory at the peak, in bytes, for chunks of C tokens and a compute dtype of e bytes:
///   C*V*e                                         logits, the only part that grows with the vocabulary and the tokens together
///   T*D*size(hidden) + V*D*size(grad_dtype)       the two gradients (the second only where it has no place of its own)
///   4*(T + 1)                                     losses
///   T*D*e + C*D*e                                 where hidden is of another dtype: its cast, and a chunk's gradient
///   V*D*e                                         where weight is of another dtype: its cast
///   V*D*e                                         where weight is fp32 and the compute dtype is not: a chunk's product; the sum is the gradient
///   4*V*D                                         where grad_dtype is not fp32: the sum, unless a single chunk's product is the gradient
/// Where products are widened, e is 4, T*D*e and V*D*e are there whatever the dtypes are, and the two after them are not: fp32 products add up by themselves.
/// The same sums in the same order for any number of threads. Throws ConfigError on shapes or dtypes that do not fit and on a label out of range (CPU).
at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& labels, const LinearCrossEntropyOptions& options = {});

}  // namespace tessera::kernels
