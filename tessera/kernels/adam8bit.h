#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/kernels/element_run.h"

/// Adam whose two averages are kept in 8 bits each (Dettmers et al., arXiv:2110.02861): an element is one of 256 numbers between -1 and 1, spread over seven
/// decades ("dynamic" quantization), times the largest magnitude of its block of 256 elements.
///
/// Blocks are of the flattened logical tensor, whatever part of it lies here, so that the numbers are the same in any layout. A block that is cut by a slice
/// shares its scale with other ranks: new scales come first, meet, and then the update is made.
namespace tessera::kernels {

constexpr int64_t kAdam8bitBlock = 256;

/// The 256 numbers, ascending. Signed: 0, 1, and in decade i of seven the midpoints of 2^i equal parts of [0.1, 1] 10^(i-6), and their negatives; unsigned: of
/// 2^(i+1) parts, without negatives.
const std::array<float, 256>& dynamic_map(bool is_signed);

/// A run of elements, and where its first block's scale lies among those that are held here.
struct QuantizedRun {
  int64_t first_block() const { return static_cast<int64_t>(elements.first_index) / kAdam8bitBlock; }
  int64_t blocks() const { return (static_cast<int64_t>(elements.first_index) + elements.count - 1) / kAdam8bitBlock + 1 - first_block(); }

  ElementRun elements;
  int64_t first_scale = 0;
};

/// What is kept of one parameter: codes of the averages, uint8, shaped like it, and of each block that it touches the two scales, fp32 [blocks].
struct Adam8bitState {
  at::Tensor exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale;
};

struct Adam8bitStep {
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  int64_t step = 1;  ///< updates of this parameter, this one included
};

/// Raises `exp_avg_scale` and `exp_avg_sq_scale`, fp32 [blocks of the whole logical tensor], to the largest magnitudes of the new averages. Traffic: 6 bytes
/// an element.
void adam8bit_scales(const at::Tensor& gradient, const Adam8bitState& state, const std::vector<QuantizedRun>& runs, const Adam8bitStep& step,
                     const at::Tensor& exp_avg_scale, const at::Tensor& exp_avg_sq_scale);

/// Updates `parameter` from the new averages in fp32, keeps these in 8 bits under the new scales, and puts those into `state`:
///   p -= lr * weight_decay * p;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
///   p -= lr * (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps)
/// An average is rounded to the nearest number, and keeps its sign. Parameter and gradient are fp32 and contiguous. Traffic: 16 bytes an element.
/// On a CPU one pass; elsewhere operators of libtorch, both of scales and of this, with some 54 bytes an element of at most 4 million at a time (226 MB). On
/// meta they take what they take there.
void adam8bit_update_(const at::Tensor& parameter, const at::Tensor& gradient, const Adam8bitState& state, const std::vector<QuantizedRun>& runs,
                      const Adam8bitStep& step, const at::Tensor& exp_avg_scale, const at::Tensor& exp_avg_sq_scale);

}  // namespace tessera::kernels
