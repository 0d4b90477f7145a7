#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace tessera::kernels {

/// How finely the scales of an fp8 product are drawn.
enum class Fp8Scaling {
  Tensor,  ///< one for each operand
  Row,     ///< one for each row of the result's left operand, and for each column of its right one: an outlier spoils its own row only
};

/// A matrix in fp8, with the factor that brings each element back: x is about values * scale.
struct Fp8Matrix {
  at::Tensor values;  ///< [M, K] e4m3 or e5m2
  at::Tensor scale;   ///< fp32 [] (Tensor) or [M, 1] (Row)
};

/// How layers multiply in fp8.
struct Fp8Products {
  at::ScalarType out_dtype;  ///< of results: bf16 or fp32
  Fp8Scaling scaling = Fp8Scaling::Tensor;
};

/// Rounds `x` [M, K] to `dtype` (kFloat8_e4m3fn, kFloat8_e5m2) after dividing by a scale that is found now, from the values at hand (dynamic scaling): the
/// largest magnitude becomes the format's largest number. Zeros keep the scale 1; what is not finite stays so. Traffic: two passes over x.
Fp8Matrix to_fp8(const at::Tensor& x, at::ScalarType dtype, Fp8Scaling scaling);

/// left [M, K] right^T, for right [N, K], in `out_dtype`: each is rounded to its format with scales found now. Nothing to multiply gives zeros.
at::Tensor fp8_product(const at::Tensor& left, at::ScalarType left_dtype, const at::Tensor& right, at::ScalarType right_dtype, at::ScalarType out_dtype,
                       Fp8Scaling scaling);

/// y = x weight^T + bias with all three matrix products of forward and backward in fp8 (FP8 Formats for Deep Learning, arXiv:2209.05433): operands of the
/// forward pass in e4m3 (3 bits of precision), gradients in e5m2 (2 bits, but the range of fp16), sums in fp32, results in `out_dtype`.
///   x [..., I], weight [O, I], bias [O]    any float dtype
///   y [..., O]                             in `out_dtype` (bf16 or fp32); the gradients of x, weight and bias in their own dtypes
/// Random matrices give products that err by 3.7% of their root mean square, and gradients by 5.8%: what 3 and 2 bits of precision leave.
/// Kept for backward: x and weight as they are, so neither a copy in another dtype nor one in fp8. Scratch: an fp32 copy of the operand being rounded.
/// CPU: correct, not fast. CUDA: compute capability 8.9 or later; sizes must be multiples of 16, refused by name otherwise.
at::Tensor fp8_linear(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::ScalarType out_dtype,
                      Fp8Scaling scaling = Fp8Scaling::Tensor);

/// What backward of that makes of dy [..., O], by itself, for whoever computes the two at different times: dx in the shape and dtype of x, and the gradient of
/// a weight of type `dtype`, [O, I]. `out_dtype` and `scaling` as in forward.
at::Tensor fp8_linear_input_gradient(const at::Tensor& dy, const at::Tensor& weight, const at::Tensor& x, at::ScalarType out_dtype, Fp8Scaling scaling);
at::Tensor fp8_linear_weight_gradient(const at::Tensor& dy, const at::Tensor& x, at::ScalarType dtype, at::ScalarType out_dtype, Fp8Scaling scaling);

}  // namespace tessera::kernels
