#include "tessera/nn/tiled_attention.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>
#include <torch/custom_class.h>

#include "tessera/core/autograd_function.h"
#include "tessera/core/once_differentiable.h"

// The gradients of a block follow from the whole softmax: given the merged output and log-sum-exp, the fused backward of one tile is that tile's share. So both
// passes go through the same list of tiles; a tile that is there several times is several rows of one call. What a 16-bit kernel gives of each tile is rounded
// once and summed in fp32: errors do not grow with the tiles.

namespace tessera::nn {

namespace {

at::Tensor fp32_zeros(const at::Tensor& like) { return at::zeros(like.sizes(), like.options().dtype(at::kFloat)); }

/// A tile's part of `x` [B, columns, heads, D], in place: [rows, times, heads, run, D].
at::Tensor part_of(const at::Tensor& x, const AttentionTile& tile, const ColumnRun& run) {
  const at::Tensor row = tile.row < 0 ? x : x.narrow(0, tile.row, 1);
  return row.narrow(1, run.begin, (tile.times - 1) * tile.step + run.size).unfold(1, run.size, std::max<int64_t>(tile.step, 1)).transpose(3, 4);
}

/// The same of a log-sum-exp [B, H, S]: [rows, times, H, run].
at::Tensor sums_of(const at::Tensor& sums, const AttentionTile& tile) {
  const at::Tensor row = tile.row < 0 ? sums : sums.narrow(0, tile.row, 1);
  const ColumnRun& run = tile.queries;
  return row.narrow(2, run.begin, (tile.times - 1) * tile.step + run.size).unfold(2, run.size, std::max<int64_t>(tile.step, 1)).transpose(1, 2);
}

/// As kernels take a part, [rows * times, heads, run, ...], and read the form From as UpTo: in reversed order.
at::Tensor to_kernel(const at::Tensor& part, const AttentionTile& tile) {
  const at::Tensor flat = part.flatten(0, 1);
  return tile.form == TileForm::From ? flat.flip(2) : flat;
}

/// And the way back.
at::Tensor from_kernel(const at::Tensor& part, const AttentionTile& tile) {
  return (tile.form == TileForm::From ? part.flip(2) : part).unflatten(0, {-1, tile.times});
}

bool is_triangle(const AttentionTile& tile) { return tile.form != TileForm::Whole; }

}  // namespace

void TiledAttention::add(const at::Tensor& k, const at::Tensor& v, const std::vector<AttentionTile>& tiles) {
  const at::NoGradGuard no_grad;
  for (const AttentionTile& tile : tiles) {
    merge(tile, kernels::flash_attention_forward(to_kernel(part_of(q_, tile, tile.queries), tile), to_kernel(part_of(k, tile, tile.keys), tile),
                                                 to_kernel(part_of(v, tile, tile.keys), tile), is_triangle(tile)));
  }
}

void TiledAttention::begin() {
  if (output_.defined()) return;
  output_ = fp32_zeros(q_);
  log_sum_exp_ = at::full({q_.size(0), q_.size(2), q_.size(1)}, -std::numeric_limits<double>::infinity(), output_.options());
}

/// Whether this is the first that these queries see; notes that they have seen something.
bool TiledAttention::is_first(const AttentionTile& tile) {
  const int64_t columns = q_.size(1), last_row = tile.row < 0 ? q_.size(0) - 1 : tile.row;
  seen_.resize(static_cast<size_t>(q_.size(0) * columns));
  bool first = true;
  for (int64_t row = std::max<int64_t>(tile.row, 0); row <= last_row; ++row) {
    for (int64_t time = 0; time < tile.times; ++time) {
      const auto begin = seen_.begin() + row * columns + tile.queries.begin + time * tile.step;
      first &= std::none_of(begin, begin + tile.queries.size, [](bool seen) { return seen; });
      std::fill_n(begin, tile.queries.size, true);
    }
  }
  return first;
}

void TiledAttention::merge(const AttentionTile& tile, const kernels::AttentionOutput& part) {
  const bool first = is_first(tile);
  if (first && tile.row < 0 && tile.queries.size == q_.size(1) && tile.form != TileForm::From) {  // the result so far, as it is
    output_ = part.output.transpose(1, 2);
    log_sum_exp_ = part.log_sum_exp;
    return;
  }
  begin();
  output_ = output_.to(at::kFloat);
  const at::Tensor output = part_of(output_, tile, tile.queries), sums = sums_of(log_sum_exp_, tile);
  const at::Tensor part_output = from_kernel(part.output, tile), part_sums = from_kernel(part.log_sum_exp, tile);
  if (first) {
    output.copy_(part_output);
    sums.copy_(part_sums);
    return;
  }
  const at::Tensor together = at::logaddexp(sums, part_sums);
  output.mul_(at::exp(sums - together).unsqueeze(-1));
  output.addcmul_(part_output.to(at::kFloat), at::exp(part_sums - together).unsqueeze(-1));
  sums.copy_(together);
}

kernels::AttentionOutput TiledAttention::finish() {
  begin();
  return {.output = output_.to(q_.scalar_type()), .log_sum_exp = log_sum_exp_};
}

TiledAttentionBackward::TiledAttentionBackward(at::Tensor grad_output, at::Tensor q, kernels::AttentionOutput forward)
    : grad_(std::move(grad_output)), q_(std::move(q)), dq_(fp32_zeros(q_)), forward_(std::move(forward)) {}

void TiledAttentionBackward::add(const at::Tensor& k, const at::Tensor& v, const std::vector<AttentionTile>& tiles, const at::Tensor& dk,
                                 const at::Tensor& dv) {
  const at::NoGradGuard no_grad;
  for (const AttentionTile& tile : tiles) {
    const auto queries = [&](const at::Tensor& x) { return to_kernel(part_of(x, tile, tile.queries), tile); };
    const auto keys = [&](const at::Tensor& x) { return to_kernel(part_of(x, tile, tile.keys), tile); };
    const auto add_to = [&](const at::Tensor& sum, const ColumnRun& run, const at::Tensor& part) {
      part_of(sum, tile, run).add_(from_kernel(part, tile).to(at::kFloat));
    };
    const auto [dq_part, dk_part, dv_part] = kernels::flash_attention_backward(
        queries(grad_), queries(q_), keys(k), keys(v), {queries(forward_.output), to_kernel(sums_of(forward_.log_sum_exp, tile), tile)}, is_triangle(tile),
        /*scale=*/{}, /*to_be_summed=*/true);
    add_to(dq_, tile.queries, dq_part);
    add_to(dk, tile.keys, dk_part);
    add_to(dv, tile.keys, dv_part);
  }
}

at::Tensor TiledAttentionBackward::finish() {
  const at::NoGradGuard no_grad;
  return dq_.to(q_.scalar_type());
}

namespace {

struct Tiles : torch::CustomClassHolder {
  explicit Tiles(std::vector<AttentionTile> list) : list(std::move(list)) {}
  std::vector<AttentionTile> list;
};

struct TiledAttentionFunction : AutogradFunction<TiledAttentionFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const c10::intrusive_ptr<Tiles>& tiles) {
    TiledAttention attention(q);
    attention.add(k, v, tiles->list);
    const auto [output, log_sum_exp] = attention.finish();
    context->save_for_backward({q, k, v, output.detach(), log_sum_exp});  // apart from its graph: see kernels/attention.cpp
    context->saved_data["tiles"] = c10::IValue::make_capsule(tiles);
    return output;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &k = saved[1], &v = saved[2];
    const auto tiles = c10::static_intrusive_pointer_cast<Tiles>(context->saved_data["tiles"].toCapsule());
    TiledAttentionBackward attention(grads[0], saved[0], {.output = saved[3], .log_sum_exp = saved[4]});
    const at::Tensor dk = fp32_zeros(k), dv = fp32_zeros(v);
    attention.add(k, v, tiles->list, dk, dv);
    auto gradients = once_differentiable("attention in tiles", kAttentionTwice, grads, {attention.finish(), dk.to(k.scalar_type()), dv.to(v.scalar_type())});
    gradients.emplace_back();
    return gradients;
  }
};

}  // namespace

at::Tensor tiled_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, std::vector<AttentionTile> tiles) {
  return TiledAttentionFunction::apply(q, k, v, c10::make_intrusive<Tiles>(std::move(tiles)));
}

}  // namespace tessera::nn
