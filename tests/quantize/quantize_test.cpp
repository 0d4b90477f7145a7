#include "tessera/quantize/quantize.h"

#include <cmath>

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/parameter.h"
#include "tessera/quantize/sharded_weights.h"

namespace tessera {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct PairImpl : nn::Module {
  PairImpl() : first(13, 7), second(7, 5), norm(5) {
    register_module("first", first);
    register_module("second", second);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::relu(first(x))); }
  nn::Linear first, second;
  nn::RMSNorm norm;
};
TESSERA_MODULE(Pair);

void freeze(torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) parameter.set_requires_grad(false);
}

TEST(Quantize, TheLayerMultipliesByWhatItsCodesSay) {
  for (const auto format : {kernels::WeightFormat::Int8, kernels::WeightFormat::Nf4}) {
    Pair pair;
    freeze(*pair);
    const at::Tensor weight = pair->first->weight.clone(), bias = pair->first->bias.clone(), x = at::randn({4, 13});
    const kernels::QuantizeForm form{.format = format, .block = 5};
    const auto report = quantize::quantize_weights(*pair, {.modules = {"fir*"}, .form = form}, at::kCPU);
    EXPECT_EQ(report.weights, std::vector<std::string>{"first.weight"});
    EXPECT_EQ(report.elements, 7 * 13);
    EXPECT_FALSE(pair->first->weight.defined());
    EXPECT_EQ(nn::unique_parameters(*pair).front().name, "first.bias");
    const auto matrix = kernels::quantize(weight, form, {.rows = 7, .columns = 13, .whole_columns = 13}, at::kCPU);
    EXPECT_EQ(report.bytes, matrix.bytes());
    EXPECT_TRUE(at::allclose(pair->first(x), at::matmul(x, kernels::dequantize(matrix, 0, 7, at::kFloat).t()) + bias, 1e-5, 1e-5));
    EXPECT_EQ(pair(x).sizes(), at::IntArrayRef({4, 5}));
  }
}

struct Pass {
  at::Tensor y, dx;
  bool operator==(const Pass& other) const { return at::equal(y, other.y) && at::equal(dx, other.dx); }
};

Pass pass_of(Pair& pair, const at::Tensor& x) {
  const at::Tensor input = x.detach().clone().requires_grad_();
  const at::Tensor y = pair(input);
  y.square().sum().backward();
  return {y.detach(), input.grad()};
}

/// Uneven rows, ranks without any, blocks that go over the ends of rows: the bits of one device, of some of its bytes.
TEST(Quantize, RanksThatShareTheRowsComputeAsOne) {
  for (const int ranks : {2, 3, 5, 8}) {
    for (const auto format : {kernels::WeightFormat::Int8, kernels::WeightFormat::Nf4}) {
      for (const bool twice : {false, true}) {
        for (const bool reshard : {true, false}) {
          SCOPED_TRACE(testing::Message() << ranks << " ranks, twice " << twice << ", reshard " << reshard);
          const kernels::QuantizeForm form{.format = format, .block = 5, .double_scales = twice};
          torch::manual_seed(3);
          const at::Tensor x = at::randn({4, 13}), first = at::randn({7, 13}), second = at::randn({5, 7});
          const auto made = [&](const comm::Group& group, quantize::Report& report) {
            Pair pair;
            freeze(*pair);
            pair->first->weight.copy_(first);
            pair->second->weight.copy_(second);
            pair->first->bias.zero_();
            pair->second->bias.zero_();
            const auto fill = [&](const at::Tensor& weight, const at::Tensor& whole) { whole.copy_(weight); };
            report = quantize::quantize_weights(*pair, {{"first", "second"}, form, {.group = group, .reshard_after_forward = reshard}}, at::kCPU, fill);
            return pair;
          };
          quantize::Report whole;
          Pair alone = made({}, whole);
          const Pass expected = pass_of(alone, x);
          comm::run_ranks(ranks, [&](comm::World& world) {
            quantize::Report share;
            Pair pair = made(world.group(), share);
            EXPECT_TRUE(pass_of(pair, x) == expected);
            const at::Tensor elements = at::full({1}, share.elements);
            comm::all_reduce(world.group(), elements);
            EXPECT_EQ(elements.item<int64_t>(), whole.elements);
            EXPECT_LT(share.bytes, whole.bytes);
            const at::NoGradGuard no_grad;
            EXPECT_TRUE(at::equal(pair(x), expected.y));
          });
        }
      }
    }
  }
}

/// A rank keeps its rows, and of the others' what one product takes, for as long as that takes.
TEST(Quantize, WhatIsGatheredGoesBehindItsProduct) {
  for (const bool reshard : {true, false}) {
    comm::run_ranks(2, [&](comm::World& world) {
      nn::Linear layer(torch::nn::LinearOptions(256, 128).bias(false));
      freeze(*layer);
      struct Holder : torch::nn::Module {
        explicit Holder(const nn::Linear& layer) { register_module("layer", layer); }
      } holder(layer);
      MemoryTracker tracker;
      const TrackMemory tracked(tracker);
      quantize::Options options{{"layer"}, {.format = kernels::WeightFormat::Int8, .block = 64}, {.group = world.group(), .reshard_after_forward = reshard}};
      const auto fill = [](const at::Tensor& weight, const at::Tensor& whole) { whole.copy_(weight); };
      const auto report = quantize::quantize_weights(holder, options, at::kCPU, fill);
      constexpr int64_t kWhole = 256 * 128 * 17 / 16;
      EXPECT_EQ(report.bytes, kWhole / 2);
      EXPECT_EQ(tracker.current(MemoryCategory::Parameters), kWhole / 2);
      const at::Tensor y = layer(at::ones({2, 256}).requires_grad_());
      EXPECT_EQ(tracker.current(MemoryCategory::Comm), reshard ? 0 : kWhole);
      y.sum().backward();
      EXPECT_EQ(tracker.current(MemoryCategory::Comm), 0);
    });
  }
}

/// Uses in a forward, in what is computed again, and in a backward pass, as a model of four layers makes them.
TEST(ShardedWeights, TheNextIsOnItsWayWithinAPass) {
  comm::run_ranks(3, [](comm::World& world) {
    constexpr int64_t kLayers = 4;
    std::vector<at::Tensor> wholes;
    const auto weights = std::make_shared<quantize::ShardedWeights>(/*ahead=*/true);
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const at::Tensor whole = at::full({5, 5}, static_cast<double>(layer + 1));
      const auto matrix = kernels::quantize(whole, {.format = kernels::WeightFormat::Int8}, {.rows = 5, .columns = 5, .whole_columns = 5}, at::kCPU);
      weights->add(quantize::ShardedMatrix(matrix, world.group()));
      wholes.push_back(kernels::dequantize(matrix, 0, 5, at::kFloat));
    }
    const auto forward = [&](at::Tensor x) {
      for (size_t layer = 0; layer < kLayers; ++layer) x = kernels::quantized_linear(x, [weights, layer] { return weights->gather(layer); });
      return x;
    };
    at::Tensor product = wholes[3].matmul(wholes[2]).matmul(wholes[1]).matmul(wholes[0]);
    const auto step = [&] {
      const at::Tensor x = at::ones({2, 5}).requires_grad_();
      forward(x).sum().backward();
      EXPECT_TRUE(at::allclose(x.grad(), product.sum(0).expand({2, 5})));
    };
    const auto in = [&](const std::function<void()>& uses) {
      const auto before = weights->statistics();
      uses();
      return std::pair(weights->statistics().gathers - before.gathers, weights->statistics().foretold - before.foretold);
    };
    EXPECT_EQ(in(step), std::pair(2 * kLayers, int64_t{0})) << "nobody knows yet";
    step();
    EXPECT_EQ(in(step), std::pair(2 * kLayers, 2 * (kLayers - 1))) << "but for the first of each pass";
    {
      const at::NoGradGuard evaluating;
      EXPECT_EQ(in([&] { forward(at::ones({1, 5})); }), std::pair(kLayers, kLayers - 1));
      EXPECT_TRUE(at::allclose(forward(at::ones({1, 5})), product.sum(1).unsqueeze(0)));
    }
    EXPECT_EQ(in(step), std::pair(2 * kLayers, 2 * (kLayers - 1))) << "none for a pass that may not come";
    // Another order costs what was on its way.
    weights->gather(0);
    EXPECT_EQ(in([&] { weights->gather(3); }).second, 0);
    EXPECT_TRUE(at::equal(kernels::dequantize(*weights->gather(3), 0, 5, at::kFloat), wholes[3]));
    const auto unforetold = std::make_shared<quantize::ShardedWeights>(/*ahead=*/false);
    for (size_t layer = 0; layer < kLayers; ++layer) unforetold->add(weights->at(layer));
    for (int pass = 0; pass < 3; ++pass) {
      for (size_t layer = 0; layer < kLayers; ++layer) unforetold->gather(layer);
    }
    EXPECT_EQ(unforetold->statistics().foretold, 0);
  });
}

TEST(Quantize, RefusesByName) {
  Pair pair;
  const auto quantized = [&](const std::string& modules) { return [&pair, modules] { quantize::quantize_weights(*pair, {.modules = {modules}}, at::kCPU); }; };
  EXPECT_THAT(quantized("second"), ThrowsMessage<ConfigError>(HasSubstr("'second.weight' is to be trained")));
  freeze(*pair);
  EXPECT_THAT(quantized("secon"), ThrowsMessage<ConfigError>(HasSubstr("the nearest path is 'second'")));
  pair->second->weight[2][3] = NAN;
  EXPECT_THAT(quantized("second"), ThrowsMessage<ConfigError>(HasSubstr("quantize: 'second.weight' holds numbers that are not finite")));
  pair->second->weight[2][3] = 1;
  EXPECT_THAT(quantized("norm"), ThrowsMessage<ConfigError>(HasSubstr("names 'norm' and no linear layer")));
}

}  // namespace
}  // namespace tessera
