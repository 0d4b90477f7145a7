#include "tessera/kernels/attention.h"

#include <cmath>
#include <limits>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"
#include "tessera/kernels/attention_blocks.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/half.h"
#include "tessera/kernels/products.h"
#include "tessera/kernels/reference.h"

// The tiled kernel is called by its own name: on meta the public operator comes apart into the one with the S x S matrix, and a dry run would count memory that
// nobody takes. The log-sum-exp is part of the result because partial results over other keys can be merged by it.

namespace tessera::kernels {

namespace {

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  require(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) && q.size(3) == k.size(3), "attention: q ", q.sizes(), ", k ",
          k.sizes(), " and v ", v.sizes(), " must be [batch, heads, tokens, features] of one batch and feature size, k and v alike");
  require(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "attention: ", q.size(1), " heads cannot be dealt over ", k.size(1),
          " key-value heads; the first must be a multiple of the second");
}

at::Tensor wide(const at::Tensor& tensor) { return tensor.to(at::kFloat); }

/// No query gives nothing, a query without keys zeros. The fused forward divides by how many of its tiles there are.
bool is_empty(const at::Tensor& q, const at::Tensor& k) { return q.size(1) == 0 || q.size(2) == 0 || k.size(2) == 0; }

// By name: on meta the public operator decomposes into the unfused form, whose memory is another.
AttentionOutput cpu_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale) {
  auto [output, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0, causal, /*attn_mask=*/{}, scale);
  return {output, log_sum_exp};
}

AttentionOutput widened_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale) {
  const auto [output, log_sum_exp] = cpu_forward(wide(q), wide(k), wide(v), causal, scale);
  return {output.to(q.scalar_type()), log_sum_exp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> cpu_backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                            const AttentionOutput& forward, bool causal, std::optional<double> scale) {
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(grad_output, q, k, v, forward.output, forward.log_sum_exp, /*dropout_p=*/0, causal,
                                                                  /*attn_mask=*/{}, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> widened_backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                const AttentionOutput& forward, bool causal, std::optional<double> scale,
                                                                bool to_be_summed = false) {
  auto [dq, dk, dv] = cpu_backward(wide(grad_output), wide(q), wide(k), wide(v), {wide(forward.output), forward.log_sum_exp}, causal, scale);
  if (to_be_summed) return {std::move(dq), std::move(dk), std::move(dv)};
  return {dq.to(q.scalar_type()), dk.to(k.scalar_type()), dv.to(v.scalar_type())};
}

// On CUDA: FlashAttention-2 for 16-bit numbers, which takes grouped heads as they are; the memory-efficient kernel for fp32, which does not, and whose
// log-sum-exps stand in rows of whole multiples of 32. Both want features in whole vectors of 16 bytes, for which libtorch's public operator alone pads them.
constexpr int64_t kEfficientRow = 32, kVectorBytes = 16, kMostFlashFeatures = 256;

int64_t in_whole_vectors(const at::Tensor& q) {
  const int64_t vector = kVectorBytes / q.element_size();
  return (q.size(3) + vector - 1) / vector * vector;
}

at::Tensor padded(const at::Tensor& x, int64_t features) { return at::constant_pad_nd(x, {0, features - x.size(3)}); }

/// Without what was padded, laid out as [B, S, H, D].
at::Tensor cut(const at::Tensor& x, int64_t features) { return x.narrow(3, 0, features).transpose(1, 2).contiguous().transpose(1, 2); }

double scale_of(const at::Tensor& q, std::optional<double> scale) { return scale.value_or(1 / std::sqrt(static_cast<double>(q.size(3)))); }

void check_tile(const at::Tensor& q) {
  require(q.scalar_type() == at::kFloat || q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16, "attention: tiles in ", q.scalar_type(),
          ": CUDA has kernels for fp32, fp16 and bf16 alone; use one of these, or run.device = cpu");
  require(q.scalar_type() == at::kFloat || q.size(3) <= kMostFlashFeatures, "attention: heads of ", q.size(3), " features in ", q.scalar_type(),
          ": on CUDA FlashAttention, which computes tiles (documents, a window, mesh.cp, a prompt behind a cache), takes at most ", kMostFlashFeatures,
          "; use more heads, or precision.compute = fp32");
}

at::Tensor for_each_query_head(const at::Tensor& x, const at::Tensor& q) { return x.size(1) == q.size(1) ? x : x.repeat_interleave(q.size(1) / x.size(1), 1); }

AttentionOutput cuda_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale) {
  check_tile(q);
  if (const int64_t features = in_whole_vectors(q); features != q.size(3)) {
    const auto [output, log_sum_exp] = cuda_forward(padded(q, features), padded(k, features), padded(v, features), causal, scale_of(q, scale));
    return {cut(output, q.size(3)), log_sum_exp};
  }
  if (q.scalar_type() == at::kFloat) {
    const auto result = at::_scaled_dot_product_efficient_attention(q, for_each_query_head(k, q), for_each_query_head(v, q), /*attn_bias=*/{},
                                                                    /*compute_log_sumexp=*/true, /*dropout_p=*/0, causal, scale);
    return {std::get<0>(result), std::get<1>(result).narrow(2, 0, q.size(2))};
  }
  const auto result = at::_scaled_dot_product_flash_attention(q, k, v, /*dropout_p=*/0, causal, /*return_debug_mask=*/false, scale);
  return {std::get<0>(result), std::get<1>(result)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> cuda_backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                             const AttentionOutput& forward, bool causal, std::optional<double> scale) {
  if (is_empty(q, k)) return {at::zeros_like(q), at::zeros_like(k), at::zeros_like(v)};  // for which flash's kernels cannot be launched
  if (const int64_t features = in_whole_vectors(q); features != q.size(3)) {
    const auto [dq, dk, dv] = cuda_backward(padded(grad_output, features), padded(q, features), padded(k, features), padded(v, features),
                                            {padded(forward.output, features), forward.log_sum_exp}, causal, scale_of(q, scale));
    return {cut(dq, q.size(3)), cut(dk, q.size(3)), cut(dv, q.size(3))};
  }
  const at::Tensor none = at::empty({0}, q.options().dtype(at::kLong));  // no dropout has drawn anything
  if (q.scalar_type() == at::kFloat) {
    const int64_t padding = (kEfficientRow - q.size(2) % kEfficientRow) % kEfficientRow;
    const at::Tensor sums = at::constant_pad_nd(forward.log_sum_exp, {0, padding}, std::numeric_limits<double>::infinity());
    const auto [dq, dk, dv, dbias] = at::_scaled_dot_product_efficient_attention_backward(grad_output, q, for_each_query_head(k, q), for_each_query_head(v, q),
                                                                                          /*attn_bias=*/{}, forward.output, sums, none, none, /*dropout_p=*/0,
                                                                                          /*grad_input_mask=*/{true, true, true, false}, causal, scale);
    const auto of_groups = [&](const at::Tensor& x) { return k.size(1) == q.size(1) ? x : x.unflatten(1, {k.size(1), q.size(1) / k.size(1)}).sum(2); };
    return {dq, of_groups(dk), of_groups(dv)};
  }
  return at::_scaled_dot_product_flash_attention_backward(grad_output, q, k, v, forward.output, forward.log_sum_exp.contiguous(), /*cum_seq_q=*/{},
                                                          /*cum_seq_k=*/{}, q.size(2), k.size(2), /*dropout_p=*/0, causal, none, none, scale);
}

/// Attention whose products are widened: keeps q, k, v and the output as narrow as they are, where autograd through casts would keep the wide ones.
struct WidenedAttention : AutogradFunction<WidenedAttention> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal,
                            std::optional<double> scale) {
    const auto [output, log_sum_exp] = widened_forward(q, k, v, causal, scale);
    // Apart from its graph: where a recomputation is broken off while this is saved, the output would hold the function that holds it.
    context->save_for_backward({q, k, v, output.detach(), log_sum_exp});
    context->saved_data["causal"] = causal;
    context->saved_data["scale"] = scale;
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const auto [dq, dk, dv] = widened_backward(grads[0], saved[0], saved[1], saved[2], {.output = saved[3], .log_sum_exp = saved[4]},
                                               context->saved_data["causal"].toBool(), context->saved_data["scale"].toOptional<double>());
    return {dq, dk, dv, at::Tensor(), at::Tensor()};
  }
};

}  // namespace

at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale) {
  check(q, k, v);
  if (!has_rows(q) || !has_rows(k) || !has_rows(v)) return flash_attention(with_rows(q), with_rows(k), with_rows(v), causal, scale);
  if (is_emulated_half(q) && is_widened(q)) return flash_attention(q.to(at::kFloat), k.to(at::kFloat), v.to(at::kFloat), causal, scale).to(at::kHalf);
  if (takes_reference(Kernel::attention)) return reference::attention(q, k, v, causal, scale);
  // Of grouped heads libtorch takes CUDA's memory-efficient kernel for none: it would multiply them out, in a matrix of all scores.
  if (q.is_cuda() && q.scalar_type() == at::kFloat && q.size(1) != k.size(1) && !is_empty(q, k)) {
    return flash_attention(q, for_each_query_head(k, q), for_each_query_head(v, q), causal, scale);
  }
  if (q.is_cuda() || is_empty(q, k)) {
    return at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0, causal, scale, /*enable_gqa=*/q.size(1) != k.size(1));
  }
  if (is_widened(q)) return WidenedAttention::apply(q, k, v, causal, scale);
  return cpu_forward(q, k, v, causal, scale).output;
}

AttentionOutput flash_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale) {
  check(q, k, v);
  if (!has_rows(q) || !has_rows(k) || !has_rows(v)) return flash_attention_forward(with_rows(q), with_rows(k), with_rows(v), causal, scale);
  const at::NoGradGuard no_grad;
  if (is_empty(q, k)) {
    const at::Tensor none = at::full({q.size(0), q.size(1), q.size(2)}, -std::numeric_limits<double>::infinity(), q.options().dtype(at::kFloat));
    return {at::zeros({q.size(0), q.size(2), q.size(1), q.size(3)}, q.options()).transpose(1, 2), none};
  }
  if (q.is_cuda()) return cuda_forward(q, k, v, causal, scale);
  return is_widened(q) ? widened_forward(q, k, v, causal, scale) : cpu_forward(q, k, v, causal, scale);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k,
                                                                        const at::Tensor& v, const AttentionOutput& forward, bool causal,
                                                                        std::optional<double> scale, bool to_be_summed) {
  if (!has_rows(grad_output) || !has_rows(q) || !has_rows(k) || !has_rows(v)) {
    return flash_attention_backward(with_rows(grad_output), with_rows(q), with_rows(k), with_rows(v), forward, causal, scale, to_be_summed);
  }
  const at::NoGradGuard no_grad;
  if (q.is_cuda()) return cuda_backward(grad_output, q, k, v, forward, causal, scale);
  if (is_widened(q)) return widened_backward(grad_output, q, k, v, forward, causal, scale, to_be_summed);
  const WideGradients wide_gradients(to_be_summed);
  return cpu_backward(grad_output, q, k, v, forward, causal, scale);
}

}  // namespace tessera::kernels
