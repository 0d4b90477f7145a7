#include "tessera/nn/meta.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "tessera/core/error.h"
#include "tessera/core/memory.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/embedding.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/head.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sequential.h"

namespace tessera::nn {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(OnMetaTest, BuildsPlainModulesWithoutMemory) {
  MemoryTracker tracker;
  TrackMemory track(tracker);
  auto net = on_meta([] {
    return torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 8, 3)), torch::nn::BatchNorm2d(8), torch::nn::Linear(1 << 20, 1 << 20),
                                 torch::nn::Embedding(7, 5), torch::nn::LSTM(4, 4), torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})));
  });
  for (const auto& parameter : net->parameters()) EXPECT_TRUE(parameter.is_meta());
  for (const auto& buffer : net->buffers()) EXPECT_TRUE(buffer.is_meta());
  EXPECT_EQ(tracker.current(), 0);
  EXPECT_TRUE(at::ones({2}).is_cpu());  // the guard is gone
}

TEST(Materialize, KeepsHandlesHooksAndWorksForPlainModules) {
  auto net = on_meta([] { return torch::nn::Sequential(torch::nn::Linear(4, 3), torch::nn::BatchNorm1d(3), torch::nn::Linear(3, 2)); });
  const at::Tensor handle = net->parameters()[0];
  materialize(net, 7);
  EXPECT_TRUE(handle.is_cpu());
  EXPECT_EQ(handle.unsafeGetTensorImpl(), net->parameters()[0].unsafeGetTensorImpl());
  EXPECT_LE(handle.abs().max().item<float>(), 0.5F);  // 1 / sqrt(4)
  EXPECT_GT(handle.abs().max().item<float>(), 0.2F);
  int calls = 0;
  const auto listening = GradientDispatcher::of(handle).listen([&](const at::Tensor&) { ++calls; });
  net->forward(at::randn({5, 4})).sum().backward();
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(handle.grad().sizes(), handle.sizes());
  for (const auto& buffer : net->named_buffers()) {
    if (buffer.key() == "1.num_batches_tracked") {
      EXPECT_EQ(buffer.value().item<int64_t>(), 1);
    }
  }
}

TEST(Materialize, BuffersAreRightAndUnknownOnesAreRefused) {
  auto norm = on_meta([] { return torch::nn::BatchNorm1d(3); });
  materialize(norm, 1);
  EXPECT_TRUE(at::equal(norm->running_mean, at::zeros({3})));
  EXPECT_TRUE(at::equal(norm->running_var, at::ones({3})));
  EXPECT_TRUE(at::equal(norm->weight, at::ones({3})));

  struct TableImpl : Module {
    explicit TableImpl(bool knows) : knows(knows) { table = register_buffer("table", at::arange(4, at::kFloat)); }
    bool reset_buffers() override {
      if (knows) at::arange_out(table, 4);
      return knows;
    }
    bool knows;
    at::Tensor table;
  };
  auto good = on_meta([] { return std::make_shared<TableImpl>(true); });
  materialize(*good, 1);
  EXPECT_TRUE(at::equal(good->table, at::arange(4, at::kFloat)));
  auto bad = on_meta([] { return std::make_shared<TableImpl>(false); });
  try {
    materialize(*bad, 1);
    FAIL() << "unknown buffers were accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("reset_buffers"));
  }
}

TEST(Materialize, ParametersWithoutARuleAreNamed) {
  struct RawImpl : torch::nn::Module {
    RawImpl() { scale = register_parameter("scale", at::ones({3})); }
    at::Tensor scale;
  };
  auto raw = on_meta([] { return std::make_shared<RawImpl>(); });
  auto root = std::make_shared<torch::nn::Module>("root");
  struct Root : torch::nn::Module {
    explicit Root(std::shared_ptr<RawImpl> raw) { register_module("raw", raw); }
  };
  auto holder = std::make_shared<Root>(raw);
  try {
    materialize(*holder, 1);
    FAIL() << "a parameter without a rule was accepted";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("'raw.scale'"));
    EXPECT_THAT(error.what(), HasSubstr("set_init"));
  }
  EXPECT_TRUE(raw->scale.is_meta());
  set_init(raw->scale, InitRule::constant(3));
  materialize(*holder, 1);
  EXPECT_TRUE(at::equal(raw->scale, at::full({3}, 3.0)));
}

TEST(Materialize, ValuesDependOnSeedAndNameAlone) {
  const auto build = [](bool meta) {
    const auto make = [] { return Sequential(Linear(5, 3), Linear(5, 3)); };
    return meta ? on_meta(make) : make();
  };
  auto a = build(true), b = build(false), c = build(true);
  materialize(a, 1);
  materialize(b, 1);
  materialize(c, 2);
  for (size_t i = 0; i < a->parameters().size(); ++i) {
    EXPECT_TRUE(at::equal(a->parameters()[i], b->parameters()[i]));
    EXPECT_FALSE(at::equal(a->parameters()[i], c->parameters()[i]));
  }
  EXPECT_FALSE(at::equal(a->parameters()[0], a->parameters()[2]));
}

TEST(Materialize, AnySliceHoldsWhatTheWholeHoldsThere) {
  std::mt19937 random(3);
  const auto pick = [&](int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); };
  for (int trial = 0; trial < 60; ++trial) {
    const std::vector<int64_t> shape{pick(1, 9), pick(1, 9), pick(1, 4)};
    Slice slice{"layers.3.w", shape, {}, {}};
    const int kind = trial % 4;
    if (kind == 0) {  // rows, possibly none
      const int64_t begin = pick(0, shape[0]);
      slice = Slice::along("layers.3.w", shape, 0, begin, pick(0, shape[0] - begin));
    } else if (kind == 1) {  // columns
      const int64_t begin = pick(0, shape[1] - 1);
      slice = Slice::along("layers.3.w", shape, 1, begin, pick(1, shape[1] - begin));
    } else if (kind == 2) {  // two ends, as zig-zag layouts hold them
      if (shape[0] < 2) continue;
      slice.boxes = {{{0, 0, 0}, {1, shape[1], shape[2]}}, {{shape[0] - 1, 0, 0}, {1, shape[1], shape[2]}}};
    } else {  // boxes that differ in two dimensions: held flat
      if (shape[0] < 2 || shape[1] < 2) continue;
      slice.boxes = {{{0, 0, 0}, {1, 1, shape[2]}}, {{1, 1, 0}, {shape[0] - 1, shape[1] - 1, shape[2]}}};
    }
    for (const InitRule& rule : {InitRule::normal(0.5, 2), InitRule::uniform(-1, 3)}) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        at::Tensor whole = at::empty(shape, dtype), part = at::empty(slice.local_shape(), dtype);
        set_slice(whole, Slice::whole("layers.3.w", shape));
        set_slice(part, slice);
        for (const auto& tensor : {whole, part}) {
          set_init(tensor, rule);
          draw(tensor, 11);
        }
        EXPECT_TRUE(at::equal(part, take(whole, slice))) << "trial " << trial;
      }
    }
  }
}

TEST(Materialize, TakesTheShapeOfTheSlice) {
  auto linear = on_meta([] { return Linear(4, 6); });
  assign_paths(*linear, "layers.0.w1");
  EXPECT_EQ(slice_of(linear->weight).name, "layers.0.w1.weight");
  set_slice(linear->weight, Slice::along("layers.0.w1.weight", {6, 4}, 0, 2, 3));
  set_slice(linear->bias, Slice::along("layers.0.w1.bias", {6}, 0, 2, 3));
  materialize(linear, 5);
  EXPECT_EQ(linear->weight.sizes(), (std::vector<int64_t>{3, 4}));
  auto whole = Linear(4, 6);
  assign_paths(*whole, "layers.0.w1");
  materialize(whole, 5);
  EXPECT_TRUE(at::equal(linear->weight, whole->weight.narrow(0, 2, 3)));
  EXPECT_TRUE(at::equal(linear->bias, whole->bias.narrow(0, 2, 3)));
  linear(at::randn({2, 4})).sum().backward();
  EXPECT_EQ(linear->weight.grad().sizes(), linear->weight.sizes());
}

TEST(Materialize, OnMetaTheSameBytesAreAccountedForAsOnTheCpu) {
  const auto bytes = [](at::Device device) {
    MemoryTracker tracker;
    TrackMemory track(tracker);
    auto net = on_meta([] { return Sequential(Linear(33, 17), Embedding(5, 3), torch::nn::BatchNorm1d(3)); });
    EXPECT_EQ(tracker.current(), 0);
    materialize(net, 1, device);
    EXPECT_EQ(tracker.current(), tracker.current(MemoryCategory::Parameters));
    materialize(net, 1, device);  // twice: not counted twice
    return tracker.current();
  };
  const int64_t expected = 4 * (33 * 17 + 17 + 5 * 3 + 3 * 4) + 8;
  EXPECT_EQ(bytes(at::kCPU), expected);
  EXPECT_EQ(bytes(at::kMeta), expected);
}

TEST(Parameter, PaddingRowsAreZeroInTheSliceThatHoldsThem) {
  Embedding whole(EmbeddingOptions(6, 2).padding_idx(-2));
  materialize(whole, 1);
  EXPECT_TRUE(at::equal(whole->weight[4], at::zeros({2})));
  EXPECT_FALSE(at::equal(whole->weight[3], at::zeros({2})));
  auto part = on_meta([] { return Embedding(EmbeddingOptions(6, 2).padding_idx(4)); });
  set_slice(part->weight, Slice::along("weight", {6, 2}, 0, 3, 2));
  materialize(part, 1);
  EXPECT_TRUE(at::equal(part->weight, whole->weight.narrow(0, 3, 2)));
}

struct TiedImpl : Module {
  TiedImpl() : embed(5, 3), head(embed->weight) {
    register_module("embed", embed);
    register_module("head", head);
  }
  at::Tensor forward(const at::Tensor& ids) { return head(embed(ids)); }
  Embedding embed;
  LanguageModelHead head;
};
TESSERA_MODULE(Tied);

TEST(Parameter, TiedOnesAreListedOnceWithTheirAliases) {
  auto tied = on_meta([] { return Tied(); });
  EXPECT_EQ(tied->named_parameters().size(), 2u);
  auto unique = unique_parameters(*tied);
  ASSERT_EQ(unique.size(), 1u);
  EXPECT_EQ(unique[0].name, "embed.weight");
  EXPECT_THAT(unique[0].aliases, ElementsAre("head.weight"));
  materialize(tied, 3);
  EXPECT_EQ(tied->embed->weight.unsafeGetTensorImpl(), tied->head->weight.unsafeGetTensorImpl());
  EXPECT_EQ(slice_of(tied->head->weight).name, "embed.weight");
  int calls = 0;
  const auto listening = GradientDispatcher::of(unique[0].tensor).listen([&](const at::Tensor&) { ++calls; });
  tied(at::tensor({0, 4})).sum().backward();
  EXPECT_EQ(calls, 1);
}

TEST(Parameter, SlicesBelongToTheTensorAndItsDetachedAliases) {
  at::Tensor tensor = at::ones({4, 2});
  EXPECT_FALSE(has_slice(tensor));
  EXPECT_TRUE(slice_of(tensor).is_whole());
  set_slice(tensor, Slice::along("w", {8, 2}, 0, 4, 4));
  const at::Tensor alias = tensor.detach();
  EXPECT_EQ(slice_of(alias).name, "w");
  set_slice(tensor, Slice::whole("v", {4, 2}));
  EXPECT_EQ(slice_of(alias).name, "w");  // its own from then on
  EXPECT_EQ(slice_of(tensor.narrow(0, 0, 1)).name, "");
  set_init(tensor, InitRule::ones());
  EXPECT_EQ(slice_of(tensor).name, "v");
  EXPECT_THROW(set_slice(tensor, Slice::along("w", {8, 2}, 0, 6, 4)), InternalError);
}

TEST(Parameter, DefaultsFollowLibtorch) {
  const torch::nn::Linear linear(16, 2);
  EXPECT_DOUBLE_EQ(default_init(*linear, "weight")->b, 0.25);
  EXPECT_DOUBLE_EQ(default_init(*linear, "bias")->b, 0.25);
  const torch::nn::Conv2d conv(torch::nn::Conv2dOptions(4, 8, 2).groups(2));
  EXPECT_DOUBLE_EQ(default_init(*conv, "bias")->b, 1 / std::sqrt(8.0));
  const torch::nn::LSTM lstm(4, 9);
  EXPECT_DOUBLE_EQ(default_init(*lstm, "weight_ih_l0")->b, 1.0 / 3);
  const torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({3}));
  EXPECT_EQ(default_init(*norm, "weight")->a, 1);
  EXPECT_EQ(default_init(*norm, "bias")->a, 0);
  const torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(4, 2).padding_idx(1));
  EXPECT_EQ(default_init(*embedding, "weight")->zero_row, 1);
  EXPECT_FALSE(default_init(torch::nn::Module("other"), "weight"));
}

}  // namespace
}  // namespace tessera::nn
