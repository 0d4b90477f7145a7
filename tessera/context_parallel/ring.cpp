#include "tessera/context_parallel/ring.h"

#include "tessera/nn/tiled_attention.h"

// The plan says everything; this only carries it out. One call of a step's kernel lies between the start of its messages and the wait for them.

namespace tessera::context {

namespace {

class RingAttention : public Method {
 public:
  RingAttention(Ring ring, const std::vector<nn::AttentionColumns>& columns, const nn::AttentionReach& reach)
      : ring_(std::move(ring)), plan_(ring_plan(columns, ring_.place, reach)) {}

  Result forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const override {
    TravellingBlocks blocks(ring_, {k, v});
    nn::TiledAttention attention(q);
    for (const RingStep& step : plan_) {
      blocks.pass_on(step);
      attention.add(blocks[0], blocks[1], step.tiles);
      blocks.advance(step);
    }
    const auto [output, log_sum_exp] = attention.finish();
    return {.output = output, .kept = log_sum_exp};
  }

  Gradients backward(const at::Tensor& grad_output, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Result& forward) const override {
    TravellingBlocks blocks(ring_, {k, v});
    TravellingSums sums(ring_, 2, k);
    nn::TiledAttentionBackward attention(grad_output, q, {.output = forward.output, .log_sum_exp = forward.kept});
    for (const RingStep& step : plan_) {
      sums.begin(step);
      blocks.pass_on(step);
      attention.add(blocks[0], blocks[1], step.tiles, sums[0], sums[1]);
      sums.end(step);
      blocks.advance(step);
    }
    const at::Tensor own = sums.take(plan_.back());
    return {.q = attention.finish(), .k = own[0].to(k.scalar_type()), .v = own[1].to(v.scalar_type())};
  }

 private:
  Ring ring_;
  std::vector<RingStep> plan_;
};

}  // namespace

std::shared_ptr<const Method> ring_method(Ring ring, std::vector<nn::AttentionColumns> columns, const nn::AttentionReach& reach) {
  return std::make_shared<RingAttention>(std::move(ring), columns, reach);
}

}  // namespace tessera::context
