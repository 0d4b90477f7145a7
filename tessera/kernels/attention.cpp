#include "tessera/kernels/attention.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/scaled_dot_product_attention.h>

#include "tessera/core/error.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/half.h"
#include "tessera/kernels/reference.h"

namespace tessera::kernels {

namespace {

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  require(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) && q.size(3) == k.size(3), "attention: q ", q.sizes(), ", k ",
          k.sizes(), " and v ", v.sizes(), " must be [batch, heads, tokens, features] of one batch and feature size, k and v alike");
  require(k.size(1) > 0 && q.size(1) % k.size(1) == 0, "attention: ", q.size(1), " heads cannot be dealt over ", k.size(1),
          " key-value heads; the first must be a multiple of the second");
}

}  // namespace

at::Tensor flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale) {
  check(q, k, v);
  if (is_emulated_half(q)) return flash_attention(q.to(at::kFloat), k.to(at::kFloat), v.to(at::kFloat), causal, scale).to(at::kHalf);
  if (kernel_choice() == KernelChoice::Reference) return reference::attention(q, k, v, causal, scale);
  if (q.is_cuda()) return at::scaled_dot_product_attention(q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0, causal, scale, /*enable_gqa=*/q.size(1) != k.size(1));
  // By name: on meta the public operator decomposes into the unfused form, whose memory is another.
  return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0, causal, /*attn_mask=*/{}, scale));
}

AttentionOutput flash_attention_forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, bool causal, std::optional<double> scale) {
  check(q, k, v);
  const at::NoGradGuard no_grad;
  auto [output, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, /*dropout_p=*/0, causal, /*attn_mask=*/{}, scale);
  return {output, log_sum_exp};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k,
                                                                        const at::Tensor& v, const AttentionOutput& forward, bool causal,
                                                                        std::optional<double> scale) {
  const at::NoGradGuard no_grad;
  return at::_scaled_dot_product_flash_attention_for_cpu_backward(grad_output, q, k, v, forward.output, forward.log_sum_exp, /*dropout_p=*/0, causal,
                                                                  /*attn_mask=*/{}, scale);
}

}  // namespace tessera::kernels
