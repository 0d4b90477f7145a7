#include <algorithm>
#include <optional>
#include <vector>

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include "tessera/kernels/attention_blocks.h"
#include "tessera/kernels/meta/registration.h"

namespace tessera::kernels::meta {

namespace {

/// Tiles and per-thread buffers of the CPU operator. They depend on the number of threads, so a dry run has to be given the number of the real one.
struct FlashPlan {
  FlashPlan(int64_t batch, int64_t heads, int64_t queries, int64_t keys, int64_t features, at::ScalarType type)
      : batch(batch), heads(heads), queries(queries), keys(keys), features(features), threads(at::get_num_threads()), reduced(type != at::toOpMathType(type)) {
    query_tile = std::min<int64_t>(queries >= 768 ? 256 : queries >= 192 ? 64 : 32, queries);
    key_tile = std::min<int64_t>(512, keys);
  }

  /// Whether keys and values are repacked for the matrix unit, by the operator's own rule of thumb.
  bool packs(at::ScalarType type, bool causal) const {
    if (!reduced || !at::native::cpublas::could_pack(type)) return false;
    const bool bf16 = type == at::kBFloat16;
    const int64_t smallest = bf16 ? 64 : 16;
    if (keys < smallest || queries < smallest) return false;
    const int64_t query_tiles = (queries + query_tile - 1) / query_tile;
    const auto pack_size = static_cast<double>(batch * heads * keys * features);
    const auto tiles_per_thread = static_cast<double>((batch * heads * query_tiles + threads - 1) / threads);
    const double product_size = tiles_per_thread * static_cast<double>(query_tile * (causal ? std::min(queries, keys) : keys) * features);
    return product_size / pack_size >= (bf16 ? 4 : 1);
  }

  int64_t batch, heads, queries, keys, features, threads, query_tile, key_tile;
  bool reduced;
};

int64_t round_up_to_even(int64_t n) { return n + n % 2; }

std::tuple<at::Tensor, at::Tensor> flash_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor&, double, bool causal,
                                                   const std::optional<at::Tensor>&, std::optional<double>) {
  const at::ScalarType type = q.scalar_type();
  const FlashPlan plan(q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), type);
  const auto wide = q.options().dtype(at::toOpMathType(type));
  const at::Tensor output = at::empty({plan.batch, plan.queries, plan.heads, plan.features}, q.options());
  const at::Tensor log_sum_exp = at::empty({plan.batch, plan.queries, plan.heads}, wide);

  const bool packs = plan.packs(type, causal);
  const int64_t key_tile = packs ? round_up_to_even(plan.key_tile) : plan.key_tile;
  std::vector<at::Tensor> scratch;
  scratch.push_back(at::empty({plan.threads, plan.query_tile * (plan.key_tile + 2 + plan.features)}, wide));
  scratch.push_back(at::empty({plan.threads, plan.query_tile, plan.reduced ? key_tile : 0}, q.options()));
  if (packs) {
    const int64_t features = round_up_to_even(plan.features);
    const int64_t last_tile = (plan.keys - 1) % plan.key_tile + 1;
    scratch.push_back(at::empty({plan.batch, k.size(1), features, plan.keys}, q.options()));
    scratch.push_back(at::empty({plan.batch, k.size(1), (plan.keys - 1) / plan.key_tile * key_tile + round_up_to_even(last_tile), plan.features}, q.options()));
    if (features != plan.features) scratch.push_back(at::empty({plan.threads, plan.query_tile, features}, q.options()));
    scratch.push_back(at::empty({plan.threads, plan.key_tile, plan.features}, q.options()));
  }
  return {output.transpose(1, 2), log_sum_exp.transpose(1, 2)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_attention_backward(const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                                                        const at::Tensor& y, const at::Tensor& log_sum_exp, double dropout, bool causal,
                                                                        const std::optional<at::Tensor>& mask, std::optional<double> scale) {
  if (attends_in_blocks(grad, q, k, v, y, log_sum_exp, dropout, mask)) return attention_backward_in_blocks(grad, q, k, v, y, log_sum_exp, causal, scale);
  const FlashPlan plan(q.size(0), q.size(1), q.size(2), k.size(2), q.size(3), q.scalar_type());
  const auto wide = q.options().dtype(at::toOpMathType(q.scalar_type()));
  const auto like = [](const at::Tensor& x) { return at::empty(x.transpose(1, 2).sizes(), x.options()); };
  const at::Tensor dq = like(q), dk = like(k), dv = like(v);
  const at::Tensor contiguous = grad.transpose(1, 2).contiguous();
  const int64_t tile = plan.query_tile * plan.key_tile;
  const at::Tensor scores = at::empty({plan.threads, 2 * tile}, wide);
  const at::Tensor reduced_scores = at::empty({plan.threads, plan.reduced ? 2 * tile : 0}, q.options());
  // One per thread, but only the calling thread's is seen by a tracker.
  const at::Tensor row_sums = at::empty({plan.query_tile}, wide);
  return {dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, Meta, m) {
  implement(m, "_scaled_dot_product_flash_attention_for_cpu", flash_attention);
  implement(m, "_scaled_dot_product_flash_attention_for_cpu_backward", flash_attention_backward);
}

}  // namespace tessera::kernels::meta
