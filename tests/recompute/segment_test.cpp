// Segments: the inputs of every k-th module are kept, and each module runs twice whatever k is.

#include <gmock/gmock.h>

#include "tessera/nn/saved_tensors.h"
#include "tessera/recompute/recompute.h"
#include "tests/recompute/net.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;
using ::testing::HasSubstr;

/// Counts what is saved around recomputation, and leaves it where it is.
struct CountsSaved final : nn::SavedTensorHooks {
  std::unique_ptr<nn::SavedTensor> pack(const at::Tensor&) override {
    ++saved;
    return nullptr;
  }
  int saved = 0;
};

int kept_inputs(Net& net) {
  const auto counter = std::make_shared<CountsSaved>();
  const nn::SavedTensorScope scope(counter);
  nn::SampleScope sample({.seed = 5, .step = 2});
  net(input().requires_grad_());
  return counter->saved;
}

TEST(RecomputeSegments, KeepEveryKthInputAndComputeEachModuleAgainOnce) {
  for (const bool shared : {false, true}) {
    Net net(5, shared);
    const Result plain = run(net);
    const std::vector<std::pair<int64_t, int>> kept{{0, 5}, {1, 5}, {2, 3}, {3, 2}, {4, 2}, {5, 1}, {9, 1}};
    for (const auto& [segment, inputs] : kept) {
      SCOPED_TRACE(segment);
      const auto again = recompute(net, {.segment = segment});
      const int before = net->calls();
      expect_same_bits(run(net), plain);
      EXPECT_EQ(net->calls() - before, 10);
      EXPECT_EQ(kept_inputs(net), inputs);
    }
  }
}

/// Gradients of a pass with and without segments, bit for bit, whatever stands between the layers.
template <class AnyNet>
void expect_same_gradients(AnyNet& net) {
  const auto pass = [&] {
    net.zero_grad();
    nn::SampleScope sample({.seed = 5, .step = 2});
    net.forward(input()).pow(2).sum().backward();
    std::vector<at::Tensor> gradients;
    for (const auto& p : net.parameters()) gradients.push_back(p.grad().clone());
    return gradients;
  };
  const auto plain = pass();
  const auto again = recompute(net, {.segment = 4});
  const auto found = pass();
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(found[i], plain[i])) << i;
}

TEST(RecomputeSegments, AnInputThatIsNoOutputOfTheModuleBeforeIsKept) {
  struct ApartImpl : NetImpl {
    ApartImpl() : NetImpl(4) {}
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor h = x;
      for (size_t i = 0; i < layers.size(); ++i) h = i == 2 ? layers[i](h * 2) : layers[i](h);
      return h;
    }
  };
  ApartImpl net;
  expect_same_gradients(net);
}

TEST(RecomputeSegments, AnOutputThatIsWrittenInPlaceBeforeTheNextModuleIsKept) {
  struct WrittenImpl : NetImpl {
    WrittenImpl() : NetImpl(4) {}
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor h = x;
      for (size_t i = 0; i < layers.size(); ++i) {
        if (i == 2) h.mul_(2);
        h = layers[i](h);
      }
      return h;
    }
  };
  WrittenImpl net;
  expect_same_gradients(net);
}

TEST(RecomputeSegments, PassesThatAreAliveTogetherAndGraphsThatAreKept) {
  Net net(5);
  const auto pass = [&] {
    net->zero_grad();
    std::vector<at::Tensor> losses;
    for (int64_t rows = 1; rows <= 3; ++rows) {
      nn::SampleScope sample({.seed = 5, .step = rows});
      losses.push_back(net(input(rows)).pow(2).sum());
    }
    losses[1].backward({}, /*retain_graph=*/true);
    losses[0].backward();
    losses[2].backward();
    losses[1].backward();
    std::vector<at::Tensor> gradients;
    for (const auto& p : net->parameters()) gradients.push_back(p.grad().clone());
    return gradients;
  };
  const auto plain = pass();
  const auto again = recompute(net, {.segment = 3});
  const auto found = pass();
  for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(found[i], plain[i])) << i;
}

TEST(RecomputeSegments, LieInsideOfAModuleThatIsRecomputed) {
  Net net(4);
  const Result plain = run(net);
  const auto inner = recompute(net, {.segment = 2});
  const auto outer = recompute(net, {.modules = ""});
  expect_same_bits(run(net), plain);
}

TEST(RecomputeSegments, RefuseWhatTheyDoNotGoWith) {
  Net net(2);
  EXPECT_THAT(refusal([&] { (void)recompute(net, {.segment = -1}); }), HasSubstr("recompute.segment = -1"));
  EXPECT_THAT(refusal([&] { (void)recompute(net, {.every = 2, .segment = 2}); }), HasSubstr("recompute.segment = 2"));
  EXPECT_THAT(refusal([&] { (void)recompute(net, {.segment = 2, .mode = RecomputeMode::Selective}); }),
              HasSubstr("set recompute.mode = full (RecomputeMode::Full)"));
}

}  // namespace
}  // namespace tessera
