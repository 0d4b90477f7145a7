// The textbook feed-forward layer, w2(silu(w1(x)) * w3(x)), on several ranks: w1 and w3 cut by columns, w2 by rows (Megatron-LM, arXiv:1909.08053).
//   tessera run --nproc_per_node 8 path/to/feed_forward_tp       a mesh of 8
//   feed_forward_tp                                              one process, which has the whole layer and sends nothing
// Each rank holds 1/8 of every weight. One all-reduce in forward adds the ranks' outputs up, one in backward the gradients of x. Rank 0 says what it holds,
// what was sent, and how far output and gradients are from one device's.
#include <cstdio>
#include <exception>
#include <memory>
#include <string>

#include <ATen/ATen.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/mesh/mesh.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/tensor_parallel/parallelize.h"

namespace {

struct FeedForwardImpl : tessera::nn::Module {
  FeedForwardImpl(int64_t dim, int64_t hidden) : w1(no_bias(dim, hidden)), w2(no_bias(hidden, dim)), w3(no_bias(dim, hidden)) {
    register_module("w1", w1);
    register_module("w2", w2);
    register_module("w3", w3);
  }
  at::Tensor forward(const at::Tensor& x) { return w2(at::silu(w1(x)) * w3(x)); }

  static tessera::nn::LinearOptions no_bias(int64_t in, int64_t out) { return tessera::nn::LinearOptions(in, out).bias(false); }
  tessera::nn::Linear w1, w2, w3;
};
TESSERA_MODULE(FeedForward);

constexpr int64_t kDim = 64, kHidden = 172;  // 172 is no multiple of 8: any size may be cut

/// Forward and backward of the same x everywhere; returns the output and leaves gradients.
at::Tensor pass(FeedForward& layer, at::Tensor& x) {
  x = (at::arange(4 * kDim, at::kFloat).view({4, kDim}) / kDim).sin_().requires_grad_();
  const at::Tensor y = layer(x);
  y.square().sum().backward();
  return y.detach();
}

double largest(const at::Tensor& a, const at::Tensor& b) { return ((a - b).abs().max() / b.abs().max()).item<double>(); }

void train() {
  const auto recorder = std::make_shared<tessera::comm::Recorder>();  // only to show what is sent
  auto world = tessera::comm::World::from_environment({.decorators = {tessera::comm::recording(recorder)}});
  const tessera::Mesh mesh(world, {{"tp", world.size()}});

  FeedForward layer = tessera::on_meta([] { return FeedForward(kDim, kHidden); });
  // x is copied to the ranks once for w1 and w3 together, so that its gradient is summed once. (Without the first line and the inputs' layouts, each of the two
  // would copy x for itself: the same numbers, one all-reduce more.)
  const tessera::ParallelPlan plan{{"", tessera::PrepareInput{.from = tessera::TensorLayout::Replicated, .to = tessera::TensorLayout::Copied}},
                                   {"w1", tessera::ColumnParallel{.input = tessera::TensorLayout::Copied}},
                                   {"w3", tessera::ColumnParallel{.input = tessera::TensorLayout::Copied}},
                                   {"w2", tessera::RowParallel{}}};
  const auto parallel = tessera::parallelize_module(layer, mesh["tp"], plan, {.watch_terms = false});  // nothing is updated: ranks need not compare parts

  tessera::materialize(layer, /*seed=*/1);  // this rank's part of the values that one device draws

  FeedForward whole = tessera::on_meta([] { return FeedForward(kDim, kHidden); });
  tessera::materialize(whole, /*seed=*/1);

  at::Tensor x, x_whole;
  recorder->clear();
  const at::Tensor y = pass(layer, x), y_whole = pass(whole, x_whole);
  if (world.rank() != 0) return;
  for (const auto& [name, tensor, aliases] : tessera::nn::unique_parameters(*layer)) {
    const tessera::Slice slice = tessera::nn::slice_of(tensor);  // begin:end of rows, and of columns
    std::printf("rank 0 of %d holds %s of %s, which is [%lld, %lld]\n", world.size(), tessera::to_string(slice.boxes.at(0)).c_str(), name.c_str(),
                static_cast<long long>(slice.shape[0]), static_cast<long long>(slice.shape[1]));
  }
  for (const auto& record : recorder->records()) {
    const std::string module = record.site.empty() ? "the layer, for what goes in" : record.site + ", for what comes out";
    std::printf("sent: %s of %lld elements by %s\n", record.op.c_str(), static_cast<long long>(record.elements), module.c_str());
  }
  const at::Tensor w1 = tessera::take(whole->w1->weight.grad(), tessera::nn::slice_of(layer->w1->weight));
  std::printf("largest relative difference from one device: output %.1e, gradient of x %.1e, of w1 %.1e\n", largest(y, y_whole),
              largest(x.grad(), x_whole.grad()), largest(layer->w1->weight.grad(), w1));
}

}  // namespace

int main() {
  try {
    train();
    return 0;
  } catch (const tessera::ConfigError& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
