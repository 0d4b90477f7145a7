// One mixture-of-experts layer, forward and backward, for bench/peers/mixture.py, which takes turns with Hugging Face's. Reads a line, does it once, and
// answers with the processor seconds of this thread:
//   layer     forward, and backward to the input and all weights, of new tokens each time: experts have other numbers of rows in every step of a run
//   products  the layer's matrix products alone, at an even load: the bound
// Arguments: tokens dim ffn_dim experts experts_per_token fp32|bf16
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <string>

#include <ATen/Parallel.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/randn_like.h>
#include <ATen/ops/zeros_like.h>

#include "tessera/kernels/fp32_products.h"
#include "tessera/memory/host_cache.h"
#include "tessera/models/mixture.h"

namespace tessera {
namespace {

double thread_time() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Shape {
  int64_t tokens, dim, ffn_dim, experts, per_token;
  at::ScalarType dtype;
};

class Layer {
 public:
  explicit Layer(const Shape& shape) : shape_(shape) {
    ModelConfig config;
    config.family = "mixtral";
    config.dim = shape.dim;
    config.layers = 1;
    config.ffn_dim = shape.ffn_dim;
    config.experts = shape.experts;
    config.experts_per_token = shape.per_token;
    layer_ = MixtureFeedForward(config);
    layer_->to(shape.dtype);
    draw();
    gradient_ = at::randn_like(x_).detach();
  }

  void draw() { x_ = at::randn({1, shape_.tokens, shape_.dim}).to(shape_.dtype).requires_grad_(true); }

  /// Gradients are made anew, as after zero_grad(set_to_none).
  void run() {
    layer_->zero_grad();
    layer_(x_).backward(gradient_);
  }

 private:
  Shape shape_;
  MixtureFeedForward layer_ = nullptr;
  at::Tensor x_, gradient_;
};

/// Three products of an expert, each with its two gradients.
class Products {
 public:
  explicit Products(const Shape& shape) : experts_(shape.experts), rows_(shape.tokens * shape.per_token / shape.experts) {
    const auto make = [&](int64_t a, int64_t b) { return at::randn({a, b}).to(shape.dtype); };
    x_ = make(rows_, shape.dim), h_ = make(rows_, shape.ffn_dim), weight_ = make(shape.ffn_dim, shape.dim);
  }

  void run() {
    for (int64_t product = 0; product < 3 * experts_; ++product) {
      at::mm(x_, weight_.t());
      at::mm(h_, weight_);
      at::mm(h_.t(), x_);
    }
  }

 private:
  int64_t experts_, rows_;
  at::Tensor x_, h_, weight_;
};

int serve(const Shape& shape) {
  at::set_num_threads(1);
  const CacheHostMemory cache;  // as a run has
  const kernels::FastProducts products_as_in_a_run;
  Layer layer(shape);
  Products products(shape);
  for (std::string what; std::getline(std::cin, what);) {
    if (what == "layer") layer.draw();
    const double begin = thread_time();
    what == "products" ? products.run() : layer.run();
    std::printf("%.9f\n", thread_time() - begin);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace tessera

int main(int count, char** arguments) {
  if (count != 7) {
    std::fprintf(stderr, "usage: %s tokens dim ffn_dim experts experts_per_token fp32|bf16\n", arguments[0]);
    return 2;
  }
  const auto number = [&](int i) { return std::strtoll(arguments[i], nullptr, 10); };
  const auto dtype = std::string(arguments[6]) == "bf16" ? at::kBFloat16 : at::kFloat;
  return tessera::serve({number(1), number(2), number(3), number(4), number(5), dtype});
}
