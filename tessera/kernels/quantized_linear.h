#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

/// Frozen weights in 8 or 4 bits, by blocks (LLM.int8, arXiv:2208.07339; QLoRA, arXiv:2305.14314). An element is a code times its block's largest magnitude:
/// int8 one of 255 even steps, NF4 one of 16 numbers that the normal distribution puts equal shares between.
///
/// Blocks are of the flattened logical matrix, whatever part of it lies here, so that the numbers are the same in any layout. A part that cuts a block holds
/// its scale as well. A scale is kept for each block of each row: a block that goes over the end of a row has its scale twice, which costs nothing where rows
/// are whole blocks.
namespace tessera::kernels {

enum class WeightFormat { Int8, Nf4 };

struct QuantizeForm {
  WeightFormat format = WeightFormat::Nf4;
  int64_t block = 64;
  bool double_scales = false;  ///< scales in 8 bits less their mean, 256 of which share a scale
};

/// The 16 numbers of NF4, ascending (arXiv:2305.14314, appendix E).
const std::array<float, 16>& nf4_numbers();

/// Rows `row` .. `row + rows` and columns `column` .. `column + columns` of a matrix with `whole_columns`.
struct MatrixPart {
  int64_t row = 0, rows = 0, column = 0, columns = 0, whole_columns = 0;
};

/// A part of a matrix in fewer bits. Rows may lie apart, as codes and scales do that are one row in memory.
///   codes   int8 [rows, columns]; NF4: uint8 [rows, ceil(columns / 2)], the first of two in the high bits
///   scales  fp32 [rows, K], K the most blocks that a row touches; with double_scales codes of them, uint8 [rows, K]
///   outer   with double_scales fp32 [K']: for each run of 256 logical blocks, from the part's first to its last, what its scales are multiplied by
///   mean    with double_scales: what they are added to
struct QuantizedMatrix {
  QuantizeForm form;
  MatrixPart part;
  at::Tensor codes, scales, outer;
  double mean = 0;

  int64_t bytes() const;
};

/// `part` of `whole` (fp32 or 16 bits, on the CPU), on `device`. On meta nothing is read, and the same bytes are accounted for. Memory for the while: 8 bytes
/// an element of the whole, 5 a block. Throws ConfigError for numbers that are not finite.
QuantizedMatrix quantize(const at::Tensor& whole, const QuantizeForm& form, const MatrixPart& part, at::Device device);

/// Rows `first` .. `first + count` of the part (not of the whole) in `dtype`.
at::Tensor dequantize(const QuantizedMatrix& matrix, int64_t first, int64_t count, at::ScalarType dtype);

/// x [..., columns] times the matrix transposed: [..., rows], in x's dtype; differentiable in x, once. Never the whole weight at once: tiles of rows, of about
/// 4 MB each, are made and multiplied, forward and again in backward. Kept for backward: nothing but the codes.
at::Tensor quantized_linear(const at::Tensor& x, const std::shared_ptr<const QuantizedMatrix>& matrix);

/// The same by a matrix that is brought for each product, forward and again in backward, and let go of behind it.
using MatrixSource = std::function<std::shared_ptr<const QuantizedMatrix>()>;
at::Tensor quantized_linear(const at::Tensor& x, const MatrixSource& source);

}  // namespace tessera::kernels
