#pragma once

#include <cstdint>

#include "tessera/kernels/activation.h"
#include "tessera/kernels/loss_terms.h"

/// The inner loops of the CPU kernels: plain data in, one table of functions per instruction set. A loop works on a range of rows, so callers parallelise over
/// rows; what a row gives does not depend on the range. Arithmetic is fp32 whatever the type of the data.
namespace tessera::kernels::cpu {

enum class Type : uint8_t { Float, BFloat16, Half };  ///< Half: of updates alone (AdamW)

struct Input {
  const void* data = nullptr;
  Type type = Type::Float;
};
struct Output {
  void* data = nullptr;
  Type type = Type::Float;
};

struct RmsNorm {
  Input x, weight;
  Output out;
  float* rstd;  ///< [rows] 1 / sqrt(mean(x^2) + eps)
  int64_t dim;
  double eps;
};

struct RmsNormBackward {
  Input grad, x, weight;
  const float* rstd;
  Output dx;
  float* partial;  ///< [ceil(rows / block), dim] sums of grad * x * rstd over `block` rows each
  int64_t rows, dim, block;
};

struct LayerNorm {
  Input x, weight, bias;
  Output out;
  float *mean, *rstd;  ///< [rows] rstd = 1 / sqrt(mean((x - mean)^2) + eps)
  int64_t dim;
  double eps;
};

struct LayerNormBackward {
  Input grad, x, weight;
  const float *mean, *rstd;
  Output dx;
  float* partial;  ///< [ceil(rows / block), 2, dim] sums over `block` rows each: of grad * (x - mean) * rstd, and of grad
  int64_t rows, dim, block;
};

/// out = x + added, out of x's type.
struct AddRows {
  Input x, added;
  Output out;
  int64_t dim;
};

/// out = activation(x + bias), rows contiguous.
struct BiasActivation {
  Input x, bias;
  Output out;
  int64_t dim;
  Activation activation;
};

struct BiasActivationBackward {
  Input grad, x, bias;
  Output dx;
  float* partial;  ///< [ceil(rows / block), dim] sums of dx over `block` rows each, before it is rounded
  int64_t rows, dim, block;
  Activation activation;
};

/// Adds rows up where their ids say, in the order of rows; a thread has some columns of all of them.
struct EmbeddingGradient {
  Input rows;            ///< [tokens, dim] contiguous
  const int64_t* ids;    ///< [tokens]
  const int64_t* order;  ///< [count] the tokens that count, those of one id side by side, in their order
  int64_t count, dim;
  Output sum;  ///< [vocabulary, dim]
};

/// AdamW over elements that lie side by side; see kernels/adamw.h. The gradient is multiplied by `scale` first; `copy` (16 bits) may have no data.
struct AdamW {
  float* parameter;
  Input gradient;
  float *exp_avg, *exp_avg_sq;
  Output copy;
  float scale, beta1, beta2, rest1, rest2, eps, kept, step_size, inverse_root;
};

/// A row of codes of a quantized matrix (kernels/quantized_linear.h), each times the scale of its block.
struct QuantizedRow {
  const uint8_t* codes;  ///< int8, or two NF4 codes a byte, the first in the high bits
  bool is_nf4;
  const float* numbers;  ///< of NF4: 16
  const float* scales;   ///< of each block that the row touches
  int64_t offset;        ///< of the row's first element in its block
  int64_t block, columns;
  Output out;
};

struct SwiGlu {
  Input gate, up;
  int64_t gate_stride, up_stride;  ///< elements from row to row
  Output out;
  int64_t dim;
  Activation activation;  ///< of the gate
};

struct SwiGluBackward {
  Input grad, gate, up;
  int64_t gate_stride, up_stride;
  Output d_gate, d_up;  ///< contiguous, like grad
  int64_t dim;
  Activation activation;
};

struct Rope {
  Input x;
  int64_t batch_stride, token_stride, head_stride;  ///< of x; features are contiguous
  Output out;                                       ///< [B, S, H, D] contiguous
  const float *cos, *sin;                           ///< rows of D/2
  int64_t table_batch_stride;                       ///< 0 where all samples share one table
  int64_t tokens, heads, half;                      ///< S, H, D/2
  float sign;                                       ///< -1 turns backwards
};

struct CrossEntropy {
  Input logits;           ///< [rows, vocabulary]
  const int64_t* labels;  ///< [rows]; negative: ignored
  int64_t vocabulary;
  float* loss;  ///< [rows]
  float* lse;   ///< [rows] log-sum-exp
  LossTerms terms;
};

struct CrossEntropyGradient {
  Input logits;
  const int64_t* labels;
  int64_t vocabulary;
  const float* lse;
  float scale;
  Output d_logits;  ///< may be logits itself
  LossTerms terms;
};

/// Loss, and the gradient in place of the logits while the row is in cache.
struct CrossEntropyInPlace {
  Output logits;
  const int64_t* labels;
  int64_t vocabulary;
  float* loss;
  float scale;
  LossTerms terms;
};

/// What is known of rows of which this part holds the columns `first` .. `first + vocabulary`.
struct CrossEntropyPart {
  Input logits;           ///< [rows, vocabulary]
  const int64_t* labels;  ///< [rows], of the whole vocabulary
  int64_t vocabulary, first;
  float *most, *sum, *target;  ///< [rows]: largest logit; sum of exp(logit - most); this part's term of the logit that the target expects
  LossTerms terms;
};

/// logits <- their gradient * scale.
struct CrossEntropyPartGradient {
  Output logits;
  const int64_t* labels;
  int64_t vocabulary, first;
  const float* lse;  ///< [rows], of all columns
  float scale;
  LossTerms terms;
};

struct Dropout {
  Input x;
  Output out;
  const int64_t* rows;  ///< global row of each local row
  int64_t dim, feature_offset, feature_total;
  uint64_t key;
  float p;
};

/// Rows that change places between tokens and experts; a choice c = token * choices + k. Weights may be null: 1.
struct GatherRows {
  Input x;               ///< [tokens, dim], `stride` elements from row to row
  const int64_t* order;  ///< [places] choice; negative: the row is zero
  const float* weights;  ///< [tokens, choices]
  int64_t choices, stride;
  Output out;  ///< [places, dim] contiguous
  int64_t dim;
};

struct CombineRows {
  Input rows;            ///< [places, dim], `stride` elements from row to row
  const int64_t* slots;  ///< [tokens, choices] place; negative: none
  const float* weights;  ///< [tokens, choices]
  int64_t choices, stride;
  Output out;  ///< [tokens, dim] contiguous
  int64_t dim;
};

struct WeighRows {
  Input rows, grad;
  const int64_t* slots;
  int64_t choices, stride, grad_stride;
  float* out;  ///< [tokens, choices]
  int64_t dim;
};

/// A matrix on its way into a product in blocks, which reads its operands word by word of 32 bits: an fp32 number, or two bf16 neighbours of the inner
/// dimension, which is filled up with a zero where it is odd. What is multiplied from the right lies in panels of so many columns, one after the other; the
/// last one's are filled up with zeros to a multiple of 16.
inline constexpr int64_t kPanelColumns = 64;
constexpr int64_t panel_width(int64_t columns_left) { return columns_left >= kPanelColumns ? kPanelColumns : (columns_left + 15) / 16 * 16; }

struct Panel {
  Input from;  ///< `stride` elements from row to row
  int64_t stride;
  int64_t inner, outer;  ///< what is summed over, and the other dimension
  void* to;
};

struct RoundRows {
  const float* from;
  int64_t from_stride;
  Output to;
  int64_t to_stride, rows, columns;
};

/// A block of attention in its backward pass, a key a row: p = exp(score * scale - log_sum_exp), its gradient p * (d_p - delta) * scale. Rows of `width`
/// numbers, a multiple of 16; queries that do not exist have an infinite log-sum-exp.
struct AttentionGradient {
  Type type;
  const float *scores, *d_probabilities;  ///< [rows, width]
  const float *log_sum_exp, *delta;       ///< [width]
  float scale;
  int64_t keys, rows, width;  ///< rows behind the keys, an even number in all, become zeros
  int64_t first;              ///< the first query that sees key 0; each key is seen by one less than the one before. Without a mask: -rows
  void* probabilities;        ///< [rows, width] of `type`
  void* gradient;             ///< the same, where it is narrower than a word
  void* words;                ///< the gradient as what is multiplied from the right
};

struct DotRows {
  Input left, right;
  int64_t left_stride, right_stride, rows, dim;
  float* out;  ///< [rows]
};

struct Loops {
  const char* name;
  void (*rms_norm)(const RmsNorm&, int64_t begin, int64_t end);                                 ///< rows
  void (*rms_norm_backward)(const RmsNormBackward&, int64_t begin, int64_t end);                ///< blocks of rows
  void (*layer_norm)(const LayerNorm&, int64_t begin, int64_t end);                             ///< rows
  void (*layer_norm_backward)(const LayerNormBackward&, int64_t begin, int64_t end);            ///< blocks of rows
  void (*add_rows)(const AddRows&, int64_t begin, int64_t end);                                 ///< rows
  void (*bias_activation)(const BiasActivation&, int64_t begin, int64_t end);                   ///< rows
  void (*bias_activation_backward)(const BiasActivationBackward&, int64_t begin, int64_t end);  ///< blocks of rows
  void (*embedding_gradient)(const EmbeddingGradient&, int64_t begin, int64_t end);             ///< columns
  void (*adamw)(const AdamW&, int64_t begin, int64_t end);                                      ///< elements; an element's bits do not depend on the range
  void (*dequantize)(const QuantizedRow&);
  void (*swiglu)(const SwiGlu&, int64_t begin, int64_t end);                                                   ///< rows
  void (*swiglu_backward)(const SwiGluBackward&, int64_t begin, int64_t end);                                  ///< rows
  void (*rope)(const Rope&, int64_t begin, int64_t end);                                                       ///< tokens of the whole batch
  void (*cross_entropy)(const CrossEntropy&, int64_t begin, int64_t end);                                      ///< rows
  void (*cross_entropy_gradient)(const CrossEntropyGradient&, int64_t begin, int64_t end);                     ///< rows
  void (*cross_entropy_in_place)(const CrossEntropyInPlace&, int64_t begin, int64_t end);                      ///< rows
  void (*cross_entropy_part)(const CrossEntropyPart&, int64_t begin, int64_t end);                             ///< rows
  void (*cross_entropy_part_gradient)(const CrossEntropyPartGradient&, int64_t begin, int64_t end);            ///< rows
  void (*dropout)(const Dropout&, int64_t begin, int64_t end);                                                 ///< rows
  void (*gather_rows)(const GatherRows&, int64_t begin, int64_t end);                                          ///< places
  void (*combine_rows)(const CombineRows&, int64_t begin, int64_t end);                                        ///< tokens
  void (*weigh_rows)(const WeighRows&, int64_t begin, int64_t end);                                            ///< tokens
  void (*sum_rows)(const float* rows, int64_t num_rows, int64_t dim, Output out, int64_t begin, int64_t end);  ///< columns begin..end, rows in order
  void (*accumulate)(float* sum, Input term, bool first, int64_t begin, int64_t end);                          ///< elements: sum = term, or sum += term
  void (*panel_of_rows)(const Panel&);     ///< from [inner, outer] to panels of words [inner, width]
  void (*panel_of_columns)(const Panel&);  ///< from [outer, inner] to the same
  void (*rows_of_columns)(const Panel&);   ///< from [inner, outer] to words [outer, inner]
  void (*round_rows)(const RoundRows&);
  void (*attention_gradient)(const AttentionGradient&);
  void (*dot_rows)(const DotRows&);
  double (*sum_of_squares)(const float* x, int64_t n);  ///< in fp64; the same bits from every instruction set, in an order that n alone decides
};

/// Null where the build does not target x86-64.
const Loops* loops_baseline();
const Loops* loops_avx2();
const Loops* loops_avx512();
const Loops* loops_avx512_bf16();

/// The fastest this machine runs; ATEN_CPU_CAPABILITY (default, avx2, avx512) lowers it together with libtorch's own kernels.
const Loops& loops();

}  // namespace tessera::kernels::cpu
