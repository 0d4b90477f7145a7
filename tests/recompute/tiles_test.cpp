#include "tessera/recompute/tiles.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/memory/memory.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/experts.h"
#include "tessera/recompute/recompute.h"
#include "tests/recompute/net.h"

namespace tessera {
namespace {

using namespace tessera::testing_support;
using ::testing::HasSubstr;

struct WideImpl : nn::Module {
  WideImpl(int64_t dim, int64_t width) : w1(dim, width), w2(width, dim) {
    register_module("w1", w1);
    register_module("dropout", dropout);
    register_module("w2", w2);
  }
  at::Tensor forward(const at::Tensor& x) {
    if (nn::bypassed(*this)) return nn::call(*this, x);
    ++calls;
    return w2(dropout(at::gelu(w1(x))));
  }
  nn::Linear w1, w2;
  nn::Dropout dropout{0.25};
  int calls = 0;
};
TESSERA_MODULE(Wide);

struct AroundImpl : nn::Module {
  AroundImpl(int64_t dim, int64_t width) : inner(dim, width) { register_module("inner", inner); }
  at::Tensor forward(const at::Tensor& x) { return inner(x) + x; }
  Wide inner;
};
TESSERA_MODULE(Around);

constexpr int64_t kDim = 5, kWidth = 19;

/// Output, and gradients of x and of the weights.
std::vector<at::Tensor> pass(Around& model, const at::Tensor& data, const nn::SampleContext& where) {
  const nn::SampleScope scope(where);
  const at::Tensor x = data.clone().requires_grad_();
  const at::Tensor out = model(x);
  out.backward(at::sin(at::arange(out.numel(), at::kFloat)).view_as(out));
  std::vector<at::Tensor> all{out.detach(), x.grad()};
  for (auto& parameter : model->parameters()) {
    all.push_back(parameter.grad());
    parameter.mutable_grad() = at::Tensor();
  }
  return all;
}

void expect_near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_LE((got[i] - want[i]).abs().max().item<double>(), 1e-6 * want[i].abs().max().item<double>()) << "tensor " << i;
  }
}

TEST(Tiles, GiveWhatTheWholeGives) {
  Around model(kDim, kWidth);
  nn::assign_paths(*model);
  const at::Tensor x = at::randn({2, 13, kDim}, at::make_generator<at::CPUGeneratorImpl>(1));
  const at::Tensor some = at::tensor({0, 1, 2, 3, 4, 5, 6, 20, 21, 22, 23, 24, 25}, at::kLong);
  // Masks are drawn by the place of each token: in a whole sequence, and in one of which other ranks hold the rest.
  for (const auto& where :
       {nn::SampleContext{.seed = 3, .step = 2, .first_sample = 4, .seq_len = 13},
        nn::SampleContext{.seed = 3, .step = 2, .first_sample = 4, .positions = some, .seq_len = 26}, nn::SampleContext{.seed = 1, .step = 1}}) {
    const auto whole = pass(model, x, where);
    for (const int64_t tile : {1, 2, 6, 9, 26, 1000}) {
      SCOPED_TRACE(tile);
      const auto tiled = tile_tokens(*model, "inner", tile);
      expect_near(pass(model, x, where), whole);
      const auto again = recompute(model, {.modules = "inner"});  // one inside the other
      expect_near(pass(model, x, where), whole);
    }
  }
}

TEST(Tiles, AreComputedOnceMoreWhereGradientsAreAskedFor) {
  Around model(kDim, kWidth);
  const at::Tensor x = at::randn({2, 13, kDim});
  const auto tiled = tile_tokens(*model, "inner", 8);  // 4 columns of both rows: 4 tiles
  pass(model, x, {.seed = 3, .step = 2});
  EXPECT_EQ(model->inner->calls, 8);
  model->eval();
  model(x);
  EXPECT_EQ(model->inner->calls, 12);
  EXPECT_EQ(model(at::randn({2, 1, kDim})).size(1), 1);
}

TEST(Tiles, KeepTheInputAndHoldOneTile) {
  constexpr int64_t kTokens = 512, kTile = 32, kWide = 64, kNarrow = 4, kFloat = 4;
  const auto bytes = [&](bool in_tiles) {
    Around model(kNarrow, kWide);
    nn::assign_paths(*model);
    Attachment tiled;
    if (in_tiles) tiled = tile_tokens(*model, "inner", kTile);
    const at::Tensor x = at::randn({1, kTokens, kNarrow}).requires_grad_();
    MemoryTracker tracker;
    const TrackMemory tracking(tracker);
    const nn::SampleScope scope({.seed = 3, .step = 2});
    const at::Tensor out = model(x);
    const int64_t kept = tracker.current();
    tracker.reset_peak();
    out.sum().backward();
    return std::pair(kept, tracker.peak());
  };
  const auto [kept, peak] = bytes(true);
  const auto [whole_kept, whole_peak] = bytes(false);
  EXPECT_GT(whole_kept, 2 * kTokens * kWide * kFloat);
  EXPECT_LE(kept, 3 * kTokens * kNarrow * kFloat + 4096) << "outputs, and no inner tensor";
  EXPECT_LE(peak, 6 * kTokens * kNarrow * kFloat + 6 * kTile * kWide * kFloat + 4 * kNarrow * kWide * kFloat + 4096);
  EXPECT_LT(4 * peak, whole_peak);
}

/// Rows of several experts, or some of one, in a tile; places that nobody took come last.
TEST(ExpertTiles, GiveWhatTheWholeGives) {
  nn::GroupedExperts experts(4, kDim, 7, 0.5, 0.5);
  nn::assign_paths(*experts);
  const at::Tensor counts = at::tensor({3, 0, 9, 2}, at::kLong), data = at::sin(at::arange(16 * kDim, at::kFloat)).view({16, kDim});
  const auto pass = [&] {
    const at::Tensor x = data.clone().requires_grad_();
    const at::Tensor out = experts(x, counts);
    out.backward(at::cos(at::arange(out.numel(), at::kFloat)).view_as(out));
    std::vector<at::Tensor> all{out.detach(), x.grad()};
    for (auto& parameter : experts->parameters()) all.push_back(std::exchange(parameter.mutable_grad(), {}));
    return all;
  };
  const auto whole = pass();
  for (const int64_t tile : {1, 3, 5, 14, 16, 100}) {
    SCOPED_TRACE(tile);
    const auto tiled = tile_experts(*experts, "", tile);
    expect_near(pass(), whole);
  }
  Around model(kDim, kWidth);
  EXPECT_THAT(refusal([&] { (void)tile_experts(*model, "inner", 4); }), HasSubstr("is no GroupedExperts"));
}

TEST(ExpertTiles, KeepTheRowsAndHoldOneTile) {
  constexpr int64_t kRows = 512, kTile = 32, kWide = 64, kNarrow = 4, kFloat = 4;
  const auto bytes = [&](int64_t tile) {
    nn::GroupedExperts experts(2, kNarrow, kWide, 0.5, 0.5);
    nn::assign_paths(*experts);
    const Attachment tiled = tile > 0 ? tile_experts(*experts, "", tile) : Attachment();
    const at::Tensor x = at::randn({kRows, kNarrow}).requires_grad_(), counts = at::tensor({400, 112}, at::kLong);
    MemoryTracker tracker;
    const TrackMemory tracking(tracker);
    const at::Tensor out = experts(x, counts);
    const int64_t kept = tracker.current();
    tracker.reset_peak();
    out.sum().backward();
    return std::pair(kept, tracker.peak());
  };
  const auto [kept, peak] = bytes(kTile);
  const auto [whole_kept, whole_peak] = bytes(0);
  EXPECT_GT(whole_kept, 3 * kRows * kWide * kFloat);
  EXPECT_LE(kept, 3 * kRows * kNarrow * kFloat + 4096);
  EXPECT_LT(4 * peak, whole_peak);
}

TEST(Tiles, Refusals) {
  Around model(kDim, kWidth);
  nn::assign_paths(*model);
  EXPECT_THAT(refusal([&] { (void)tile_tokens(*model, "inner", 0); }), HasSubstr("recompute.ffn_tile = 0"));
  EXPECT_THAT(refusal([&] { (void)tile_tokens(*model, "iner", 4); }), HasSubstr("inner"));
  const auto tiled = tile_tokens(*model, "inner", 4);
  EXPECT_THAT(refusal([&] { model(at::randn({3, kDim})); }), HasSubstr("'inner' does not take one tensor [B, S, D]"));
}

}  // namespace
}  // namespace tessera
