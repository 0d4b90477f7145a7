#pragma once

#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>

#include "tessera/core/error.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/sample_scope.h"

namespace tessera::testing_support {

template <class F>
std::string refusal(F&& f) {
  try {
    f();
  } catch (const ConfigError& e) {
    return e.what();
  }
  return "not refused";
}

/// tanh(w2 gelu(w1 x)) + x, counting its calls.
struct BlockImpl : nn::Module {
  BlockImpl(int64_t dim, std::optional<nn::Linear> shared) : w1(shared ? *shared : nn::Linear(dim, dim)), w2(dim, dim) {
    register_module("w1", w1);
    register_module("w2", w2);
    register_module("dropout", dropout);
  }
  at::Tensor forward(const at::Tensor& x) {
    ++calls;
    return dropout(at::tanh(w2(at::gelu(w1(x))))) + x;
  }
  nn::Linear w1, w2;
  nn::Dropout dropout{0.25};
  int calls = 0;
};
TESSERA_MODULE(Block);

struct NetImpl : nn::Module {
  explicit NetImpl(int blocks, bool shared = false) {
    torch::nn::ModuleList list;
    std::optional<nn::Linear> weight;
    if (shared) weight = nn::Linear(8, 8);
    for (int i = 0; i < blocks; ++i) list->push_back(layers.emplace_back(8, weight).ptr());
    register_module("layers", list);
    nn::assign_paths(*this);
    int64_t n = 0;
    at::NoGradGuard no_grad;
    for (auto& p : parameters()) p.copy_(at::sin(at::arange(p.numel(), at::kFloat) + static_cast<double>(++n)).view_as(p) * 0.5);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = x;
    for (auto& layer : layers) h = layer(h);
    return h;
  }
  int calls() const {
    int sum = 0;
    for (const auto& layer : layers) sum += layer->calls;
    return sum;
  }
  std::vector<Block> layers;
};
TESSERA_MODULE(Net);

inline at::Tensor input(int64_t rows = 3) { return at::cos(at::arange(rows * 8, at::kFloat)).view({rows, 8}); }

struct Result {
  at::Tensor loss;
  std::vector<at::Tensor> gradients;  ///< of the input, then of the parameters
};

inline Result run(Net& net, int64_t rows = 3) {
  nn::SampleScope sample({.seed = 5, .step = 2});
  net->zero_grad();
  at::Tensor x = input(rows).requires_grad_();
  Result result{.loss = net(x).pow(2).sum(), .gradients = {}};
  result.loss.backward();
  result.gradients.push_back(x.grad());
  for (const auto& p : net->parameters()) result.gradients.push_back(p.grad().clone());
  return result;
}

inline void expect_same_bits(const Result& got, const Result& want) {
  EXPECT_TRUE(at::equal(got.loss, want.loss));
  ASSERT_EQ(got.gradients.size(), want.gradients.size());
  for (size_t i = 0; i < got.gradients.size(); ++i) EXPECT_TRUE(at::equal(got.gradients[i], want.gradients[i])) << "gradient " << i;
}

}  // namespace tessera::testing_support
