#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

struct AttentionOutput {
  at::Tensor output;       ///< [B, H, S, D], q's dtype, laid out as [B, S, H, D]: transpose(1, 2).flatten(2) is a view
  at::Tensor log_sum_exp;  ///< [B, H, S] fp32 view: the natural logarithm of each query's softmax denominator
};

/// Exact attention in tiles, without the S x S matrix (FlashAttention, arXiv:2205.14135): softmax(scale * q k^T) v. Differentiable in q, k and v.
///   q     [B, H, S, D]      fp32 or bf16; transposed views of [B, S, H, D] are taken as they are
///   k, v  [B, Hk, L, D]     Hk divides H: grouped-query heads are not expanded (arXiv:2305.13245), but for CUDA in fp32, which has no fused kernel for them
///   result [B, H, S, D]     laid out as [B, S, H, D], so that what follows needs no copy
/// causal: query i sees keys 0..i (aligned to the first key). scale: default 1 / sqrt(D).
/// Without keys the result is zeros, as of libtorch's scaled_dot_product_attention; without queries it is empty.
/// Kept for backward: q, k, v (where they are expanded, so), the output and B*H*S floats.
/// Throws ConfigError where heads cannot be grouped or a shape does not fit.
at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale = std::nullopt);

/// The same with the log-sum-exp, for callers that merge partial results (ring attention); not differentiable. On CUDA causal needs as many queries as keys;
/// features that are no whole vectors of 16 bytes are padded, here and in backward, in copies of all tensors. Throws ConfigError there for
/// more than 256 features in 16 bits, and for other types than fp32, fp16 and bf16.
AttentionOutput flash_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale = std::nullopt);

/// Gradients of q, k and v from what flash_attention_forward returned (or from merged results: output and log_sum_exp of the whole softmax give the whole's
/// gradients for this block). `to_be_summed`: they are terms of sums, and come in fp32 wherever the kernel has them so before it rounds (attention_blocks.h,
/// widened products); elsewhere in the type of q as ever.
std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k,
                                                                        const at::Tensor& v, const AttentionOutput& forward, bool causal,
                                                                        std::optional<double> scale = std::nullopt, bool to_be_summed = false);

}  // namespace tessera::kernels
