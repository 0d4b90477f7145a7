#pragma once

#include <optional>
#include <tuple>

#include <ATen/core/Tensor.h>

/// The gradients of attention on a CPU, block by block, in place of libtorch's kernel: aten::_scaled_dot_product_flash_attention_for_cpu_backward gets this
/// one, and hands on what it does not take. libtorch's makes a product's program anew for each tile of bf16 numbers, and multiplies both halves of a causal
/// square.
namespace tessera::kernels {

/// Attention's kernels take each token's features for consecutive; libtorch's public operator would not choose them for others.
inline bool has_rows(const at::Tensor& x) { return x.stride(-1) == 1 || x.size(-1) == 1 || x.numel() == 0; }
inline at::Tensor with_rows(const at::Tensor& x) { return has_rows(x) ? x : x.contiguous(); }

/// Whether these gradients are made in blocks: of one type, fp32, or bf16 of an even number of features, where multiplies_blocks(); no mask but the causal one,
/// no dropout.
bool attends_in_blocks(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& y, const at::Tensor& log_sum_exp,
                       double dropout, const std::optional<at::Tensor>& mask);

/// While it lives, this thread's gradients in blocks come as they were summed, in fp32, and not rounded to the type of q: for who adds them to others.
class WideGradients {
 public:
  explicit WideGradients(bool wide = true);
  ~WideGradients();
  WideGradients(const WideGradients&) = delete;
  WideGradients& operator=(const WideGradients&) = delete;

 private:
  bool former_;
};

/// Gradients of q [B, H, S, D], k and v [B, Hk, L, D] from dy and y [B, H, S, D] and the log-sum-exp [B, H, S] of each query, laid out as [B, tokens, heads,
/// D]. 5 products of each 64 x 64 block, of a causal square those on and below the diagonal alone; sums of bf16 are fp32 until a gradient is done.
/// Bits depend on the head and its queries and keys: not on threads, nor on the rest of the batch. Heads of one group (H / Hk) are summed in their order.
/// Scratch of each thread, of which there are no more than heads of k: dq of a group of heads in fp32, and what 512 keys take, 6 to 8 KB a feature; of no
/// queries and keys more than of longer ones. So many threads want many heads of k.
std::tuple<at::Tensor, at::Tensor, at::Tensor> attention_backward_in_blocks(const at::Tensor& dy, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                            const at::Tensor& y, const at::Tensor& log_sum_exp, bool causal,
                                                                            std::optional<double> scale);

}  // namespace tessera::kernels
