#include "tessera/nn/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tensor.h>

#include "tessera/core/autograd_function.h"
#include "tessera/core/error.h"
#include "tessera/core/once_differentiable.h"
#include "tessera/kernels/attention.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/kernels/products.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/column_order.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/nn/tiled_attention.h"

namespace tessera::nn {

namespace {

/// softmax(scale * scores) over the last dimension in fp32 (of doubles in theirs), with nothing where `visible` is false. Kept for backward: the result, in the
/// dtype of the scores, and neither its fp32 form nor the mask.
struct MaskedSoftmax : AutogradFunction<MaskedSoftmax> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& scores, const at::Tensor& visible, double scale) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor seen = (scores.to(wide_type(scores)) * scale).masked_fill_(visible.bitwise_not(), -std::numeric_limits<float>::infinity());
    const at::Tensor weights = at::softmax(seen, -1).to(scores.scalar_type());
    context->save_for_backward({weights.detach()});  // apart from its graph: see kernels/attention.cpp
    context->saved_data["scale"] = scale;
    return weights;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const at::Tensor weights = context->get_saved_variables()[0];
    const at::ScalarType wide = wide_type(weights);
    const at::Tensor d_seen = at::_softmax_backward_data(grads[0].to(wide), weights.to(wide), -1, wide);
    return once_differentiable("attention over a mask", kAttentionTwice, grads,
                               {(d_seen * context->saved_data["scale"].toDouble()).to(weights.scalar_type()), at::Tensor(), at::Tensor()});
  }
};

}  // namespace

at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& visible) {
  const int64_t heads = q.size(2), groups = k.size(2);
  require(groups > 0 && heads % groups == 0, "attention: ", heads, " query heads cannot share ", groups,
          " key-value heads; heads must be a multiple of kv_heads");
  if (kernels::is_widened(q)) return masked_attention(q.to(at::kFloat), k.to(at::kFloat), v.to(at::kFloat), visible).to(q.scalar_type());
  // Queries of one key-value head lie side by side: [B, K, H / K, S, D] against [B, K, 1, L, D].
  const auto by_group = [&](const at::Tensor& x) { return x.transpose(1, 2).unflatten(1, {groups, x.size(2) / groups}); };
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(3)));
  const at::Tensor scores = at::matmul(by_group(q), by_group(k).transpose(-2, -1));
  const at::Tensor weights = MaskedSoftmax::apply(scores, visible.unsqueeze(2), scale);
  return at::matmul(weights, by_group(v)).flatten(1, 2).transpose(1, 2);
}

namespace {

/// [1 or B, 1, S, L]: which keys a query sees.
at::Tensor visible_keys(int64_t queries, int64_t keys, const AttentionReach& reach, const std::optional<at::Tensor>& positions,
                        const std::optional<at::Tensor>& document_ids, at::Device device) {
  const at::Tensor places = positions ? *positions : kernels::consecutive(0, keys, device);
  const at::Tensor own = places.narrow(0, keys - queries, queries).unsqueeze(1), others = places.unsqueeze(0);
  at::Tensor visible = own.ge(others);
  if (!reach.causal) visible = at::ones_like(visible);
  if (reach.window > 0) visible = visible.bitwise_and((own - others).lt(reach.window));
  visible = visible.unsqueeze(0).unsqueeze(0);
  return document_ids ? visible.bitwise_and(document_ids->unsqueeze(2).eq(document_ids->unsqueeze(1)).unsqueeze(1)) : visible;
}

/// x [B, S, ...] with its columns in the order of `index` [B * S], of all rows one after the other.
at::Tensor reordered(const at::Tensor& x, const at::Tensor& index) { return x.flatten(0, 1).index_select(0, index).view_as(x); }

/// Attention among the columns that positions and documents describe: brought into order where they are not, so that each document is one tile.
at::Tensor ordered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionReach& reach,
                             const std::optional<at::Tensor>& positions, const std::optional<at::Tensor>& document_ids) {
  const ColumnOrder order = column_order(q.size(0), q.size(1), positions, document_ids, /*distances=*/reach.window > 0);
  auto tiles = attention_tiles(order.columns, order.columns, reach);
  if (order.index.empty()) return tiled_attention(q, k, v, std::move(tiles));
  const at::Tensor index = at::tensor(order.index, at::kLong).to(q.device()), back = at::argsort(index);
  return reordered(tiled_attention(reordered(q, index), reordered(k, index), reordered(v, index), std::move(tiles)), back);
}

}  // namespace

at::Tensor AttentionCoreImpl::forward(const at::Tensor& q, const at::Tensor& all_k, const at::Tensor& all_v, const std::optional<at::Tensor>& positions,
                                      const std::optional<at::Tensor>& document_ids) {
  if (bypassed(*this)) return call(*this, q, all_k, all_v, positions, document_ids);
  const int64_t queries = q.size(1), keys = std::min(all_k.size(1), reach_.window > 0 ? queries + reach_.window - 1 : all_k.size(1));
  require(queries <= all_k.size(1), "attention '", path(), "': ", queries, " queries cannot be the last of ", all_k.size(1), " keys");
  const bool described = (positions && reach_.causal) || document_ids;
  require(!described || queries == all_k.size(1), "attention '", path(), "': positions and document ids describe queries and keys alike, but there are ",
          queries, " and ", all_k.size(1));
  const auto seen = [&](const at::Tensor& x) { return x.size(1) == keys ? x : x.narrow(1, x.size(1) - keys, keys); };  // others are before all windows
  const at::Tensor k = seen(all_k), v = seen(all_v);
  AttentionReach reach = reach_;
  if (keys <= reach.window && !positions) reach.window = 0;  // which no sequence of so few keys reaches
  if (!described && reach.window == 0 && (queries == keys || queries == 1 || !reach.causal)) {
    return kernels::flash_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), reach.causal && queries == keys).transpose(1, 2);
  }
  // Tiles are merged in fp32.
  if (kernels::takes_reference(kernels::Kernel::attention) || q.scalar_type() == at::kDouble) {
    return masked_attention(q, k, v, visible_keys(queries, keys, reach, positions, document_ids, q.device()));
  }
  if (described) return ordered_attention(q, k, v, reach, positions, document_ids);
  return tiled_attention(q, k, v, attention_tiles(AttentionColumns::consecutive(queries, keys - queries), AttentionColumns::consecutive(keys), reach));
}

}  // namespace tessera::nn
