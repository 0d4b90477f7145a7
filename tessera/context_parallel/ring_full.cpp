#include <cmath>
#include <limits>

#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/context_parallel/ring.h"

// The reference schedule: whole rows of scores are there before the softmax, so nothing has to be merged, and memory grows with the sequence. In fp32, in plain
// operators. Heads of one key-value head lie side by side: [B, K, H / K, S, D].

namespace tessera::context {

namespace {

class RingFull : public Method {
 public:
  RingFull(Ring ring, const std::vector<nn::AttentionColumns>& columns, const nn::AttentionReach& reach)
      : ring_(std::move(ring)), plan_(ring_plan(columns, ring_.place, reach)) {}

  Result forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const override {
    const at::Tensor queries = grouped(q, k.size(2)) / std::sqrt(static_cast<double>(q.size(3)));
    const at::Tensor scores =
        at::full({q.size(0), k.size(2), q.size(2) / k.size(2), q.size(1), total()}, -std::numeric_limits<double>::infinity(), queries.options());
    each_block(k, [&](const RingStep& step, const at::Tensor& keys) {
      const at::Tensor all = at::matmul(queries, grouped(keys, k.size(2)).transpose(-2, -1));
      copy_visible(step, block_of(scores, step), all);
    });
    const at::Tensor weights = at::softmax(scores, -1);
    const at::Tensor output = at::zeros_like(queries);
    each_block(v, [&](const RingStep& step, const at::Tensor& values) { output.add_(at::matmul(block_of(weights, step), grouped(values, k.size(2)))); });
    return {.output = ungrouped(output).to(q.scalar_type()), .kept = weights};
  }

  Gradients backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Result& forward) const override {
    const int64_t groups = k.size(2);
    const double scale = 1 / std::sqrt(static_cast<double>(q.size(3)));
    const at::Tensor &weights = forward.kept, queries = grouped(q, groups), gradient = grouped(grad_output, groups);
    const at::Tensor d_weights = at::zeros_like(weights);  // of blocks that never come, too
    const at::Tensor dv = each_sum(v, [&](const RingStep& step, const at::Tensor& values, const at::Tensor& share) {
      block_of(d_weights, step).copy_(at::matmul(gradient, grouped(values, groups).transpose(-2, -1)));
      share.add_(summed(at::matmul(block_of(weights, step).transpose(-2, -1), gradient)));
    });
    const at::Tensor d_scores = weights * (d_weights - (weights * d_weights).sum(-1, true)) * scale;
    const at::Tensor dq = at::zeros_like(queries);
    const at::Tensor dk = each_sum(k, [&](const RingStep& step, const at::Tensor& keys, const at::Tensor& share) {
      dq.add_(at::matmul(block_of(d_scores, step), grouped(keys, groups)));
      share.add_(summed(at::matmul(block_of(d_scores, step).transpose(-2, -1), queries)));
    });
    return {.q = ungrouped(dq).to(q.scalar_type()), .k = dk.to(k.scalar_type()), .v = dv.to(v.scalar_type())};
  }

 private:
  int64_t total() const {
    int64_t sum = 0;
    for (const int64_t columns : ring_.columns) sum += columns;
    return sum;
  }

  /// fp32 [B, S, heads, D] -> [B, K, heads / K, S, D].
  static at::Tensor grouped(const at::Tensor& x, int64_t groups) { return x.to(at::kFloat).transpose(1, 2).unflatten(1, {groups, x.size(2) / groups}); }
  static at::Tensor ungrouped(const at::Tensor& x) { return x.flatten(1, 2).transpose(1, 2).contiguous(); }
  /// [B, K, H / K, L, D] -> [B, L, K, D]: the heads of a group have one key.
  static at::Tensor summed(const at::Tensor& x) { return x.sum(2).transpose(1, 2); }

  /// The columns of scores [..., S] that are the step's block.
  at::Tensor block_of(const at::Tensor& scores, const RingStep& step) const {
    int64_t begin = 0;
    for (int place = 0; place < step.block; ++place) begin += ring_.columns[static_cast<size_t>(place)];
    return scores.narrow(-1, begin, ring_.columns[static_cast<size_t>(step.block)]);
  }

  static void copy_visible(const RingStep& step, const at::Tensor& to, const at::Tensor& from) {
    for (const nn::AttentionTile& tiles : step.tiles) {
      for (int64_t time = 0; time < tiles.times; ++time) copy_visible(tiles.single(time), to, from);
    }
  }

  static void copy_visible(const nn::AttentionTile& tile, const at::Tensor& to, const at::Tensor& from) {
    const auto of = [&](const at::Tensor& x) {
      const at::Tensor row = tile.row < 0 ? x : x.narrow(0, tile.row, 1);
      return row.narrow(-2, tile.queries.begin, tile.queries.size).narrow(-1, tile.keys.begin, tile.keys.size);
    };
    const auto nothing = [&] { return at::full_like(of(from), -std::numeric_limits<double>::infinity()); };
    of(to).copy_(tile.form == nn::TileForm::Whole ? of(from) : of(from) + (tile.form == nn::TileForm::UpTo ? nothing().triu(1) : nothing().tril(-1)));
  }

  template <class Use>
  void each_block(const at::Tensor& own, const Use& use) const {
    TravellingBlocks blocks(ring_, {own});
    for (const RingStep& step : plan_) {
      blocks.pass_on(step);
      use(step, blocks[0]);
      blocks.advance(step);
    }
  }

  /// The same with the block's gradient, which comes home.
  template <class Use>
  at::Tensor each_sum(const at::Tensor& own, const Use& use) const {
    TravellingBlocks blocks(ring_, {own});
    TravellingSums sums(ring_, 1, own);
    for (const RingStep& step : plan_) {
      sums.begin(step);
      blocks.pass_on(step);
      use(step, blocks[0], sums[0]);
      sums.end(step);
      blocks.advance(step);
    }
    return sums.take(plan_.back())[0];
  }

  Ring ring_;
  std::vector<RingStep> plan_;
};

}  // namespace

std::shared_ptr<const Method> ring_full_method(Ring ring, std::vector<nn::AttentionColumns> columns, const nn::AttentionReach& reach) {
  return std::make_shared<RingFull>(std::move(ring), columns, reach);
}

}  // namespace tessera::context
