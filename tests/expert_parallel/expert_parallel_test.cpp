#include "tessera/expert_parallel/expert_parallel.h"

#include <map>
#include <mutex>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/layout/slice.h"
#include "tessera/models/mixture.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/meta.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using testing_support::refusal;

constexpr int64_t kDim = 12;

ModelConfig sizes(int64_t experts, int64_t per_token = 2) {
  return {.family = "mixtral", .dim = kDim, .layers = 1, .heads = 2, .ffn_dim = 7, .experts = experts, .experts_per_token = per_token};
}

MixtureFeedForward on_meta_mixture(const ModelConfig& config) {
  auto mixture = on_meta([&] { return MixtureFeedForward(config); });
  nn::assign_paths(*mixture);
  return mixture;
}

/// Weights large enough that experts differ by more than roundings.
void draw(MixtureFeedForward& mixture) {
  materialize(*mixture, 5, testing_support::test_device());
  const at::NoGradGuard no_grad;
  for (const auto& parameter : mixture->parameters()) parameter.mul_(20);
}

at::Tensor numbers(int64_t rows, double phase) { return (at::arange(rows * kDim, at::kFloat) * 0.37 + phase).sin().view({1, rows, kDim}); }

using Tensors = std::map<std::string, at::Tensor>;

/// Output, and gradients of the input and of every parameter.
Tensors passes(MixtureFeedForward& mixture, const at::Tensor& input) {
  const at::Tensor x = input.clone().requires_grad_(true);
  const at::Tensor out = mixture(x);
  out.backward(numbers(input.size(1), 1.5));
  Tensors found{{"out", out.detach()}, {"x", x.grad()}};
  for (const auto& parameter : mixture->named_parameters()) found[parameter.key()] = parameter.value().grad().clone();
  return found;
}

void expect_near(const at::Tensor& actual, const at::Tensor& expected, const std::string& what) {
  ASSERT_EQ(actual.sizes(), expected.sizes()) << what;
  if (expected.numel() == 0) return;
  EXPECT_LE((actual - expected).abs().max().item<double>(), 1e-5 * std::max(1e-3, expected.abs().max().item<double>())) << what;
}

/// `tokens` of each rank; the oracle computes each rank's tokens with whole experts, and sums their gradients.
void expect_as_whole(const ModelConfig& config, const std::vector<int64_t>& tokens) {
  const int ranks = static_cast<int>(tokens.size());
  Tensors sums;
  std::vector<Tensors> expected;
  for (int rank = 0; rank < ranks; ++rank) {
    MixtureFeedForward whole = on_meta_mixture(config);
    draw(whole);
    expected.push_back(passes(whole, numbers(tokens[static_cast<size_t>(rank)], rank)));
    for (const auto& [name, gradient] : expected.back()) {
      if (name.starts_with("experts.")) sums[name] = sums.contains(name) ? sums[name] + gradient : gradient;
    }
  }
  run_ranks(ranks, [&](World& world) {
    MixtureFeedForward mixture = on_meta_mixture(config);
    const auto parallel = expert_parallel(*mixture, world.group());
    draw(mixture);
    const auto own = static_cast<size_t>(world.rank());
    const std::string where = " of rank " + std::to_string(own) + " of " + std::to_string(ranks);
    for (const auto& [name, found] : passes(mixture, numbers(tokens[own], world.rank()))) {
      if (!sums.contains(name)) {
        expect_near(found, expected[own].at(name), name + where);
        continue;
      }
      const auto [begin, size] = chunk(sums.at(name).size(0), ranks, world.rank());
      expect_near(found, sums.at(name).narrow(0, begin, size), name + where);
    }
  });
}

TEST(ExpertParallel, EqualsWholeExpertsOnEachRanksTokens) {
  expect_as_whole(sizes(6), {5, 7});
  expect_as_whole(sizes(6), {5, 1, 4});
  expect_as_whole(sizes(10, 3), {5, 3, 7, 2, 4});
  expect_as_whole(sizes(8), {3, 3, 3, 3, 3, 3, 3, 3});
}

TEST(ExpertParallel, TakesRanksWithoutTokensAndOneExpertForAll) {
  expect_as_whole(sizes(4), {0, 5});
  expect_as_whole(sizes(4), {0, 0, 3, 0});
  expect_as_whole(sizes(2, 1), {1, 1});
}

TEST(ExpertParallel, KeepsCapacityAndSharedExpertsAsTheyAre) {
  ModelConfig config = sizes(6);
  config.shared_ffn_dim = 5;
  config.shared_gate = true;
  expect_as_whole(config, {5, 7});
  run_ranks(2, [&](World& world) {
    MoeConfig moe;
    moe.capacity_factor = 0.5;
    const at::Tensor x = numbers(9, world.rank());
    MixtureFeedForward whole = on_meta_mixture(config), mixture = on_meta_mixture(config);
    const auto parallel = expert_parallel(*mixture, world.group());
    for (MixtureFeedForward* one : {&whole, &mixture}) {
      draw(*one);
      (*one)->set_training(moe);
    }
    const Tensors expected = passes(whole, x), found = passes(mixture, x);
    for (const char* name : {"out", "x", "router.weight", "shared.w1.weight"}) expect_near(found.at(name), expected.at(name), name);
  });
}

/// Shapes do not follow the data: what a capacity leaves empty stays, behind all rows that are taken.
TEST(ExpertParallel, GivesAsManyRowsAsItTook) {
  run_ranks(2, [](World& world) {
    MixtureFeedForward mixture = on_meta_mixture(sizes(4));
    const auto parallel = expert_parallel(*mixture, world.group());
    draw(mixture);
    auto* const experts = dynamic_cast<nn::GroupedExpertsImpl*>(mixture->named_children()["experts"].get());
    const at::Tensor out = experts->forward(numbers(9, world.rank()).view({9, kDim}), at::tensor({1, 2, 0, 3}, at::kLong));
    ASSERT_EQ(out.sizes(), at::IntArrayRef({9, kDim}));
    EXPECT_GT(out.narrow(0, 0, 6).abs().min().item<float>(), 0);
    EXPECT_EQ(out.narrow(0, 6, 3).abs().max().item<float>(), 0);
  });
}

/// Ranks 0 and 1 route the same tokens, and so do ranks 2 and 3; experts lie on all four.
TEST(ExpertParallel, ComputesRowsOnceWhereRanksRouteTheSameTokens) {
  for (const int64_t tokens : {1, 5, 6}) {
    Tensors sums;
    std::vector<Tensors> expected;
    for (int pair = 0; pair < 2; ++pair) {
      MixtureFeedForward whole = on_meta_mixture(sizes(8));
      draw(whole);
      expected.push_back(passes(whole, numbers(tokens, pair + 0.4)));
      for (const auto& [name, gradient] : expected.back()) sums[name] = pair == 0 ? gradient : sums[name] + gradient;
    }
    run_ranks(4, [&](World& world) {
      const comm::Group same = world.subgroup({world.rank() / 2 * 2, world.rank() / 2 * 2 + 1}, "tp");
      MixtureFeedForward mixture = on_meta_mixture(sizes(8));
      const auto parallel = expert_parallel(*mixture, world.group(), {.same_tokens = same});
      draw(mixture);
      const Tensors found = passes(mixture, numbers(tokens, world.rank() / 2 + 0.4));
      const Tensors& own = expected[static_cast<size_t>(world.rank() / 2)];
      for (const char* name : {"out", "x", "router.weight"}) expect_near(found.at(name), own.at(name), name);
      for (const char* name : {"experts.w1", "experts.w2", "experts.w3"}) {
        const int64_t rows = sums.at(name).size(0) / 4;
        expect_near(found.at(name), sums.at(name).narrow(0, rows * world.rank(), rows), name);
      }
    });
  }
}

TEST(ExpertParallel, DrawsTheSameExpertsAndKeepsThoseWithValues) {
  MixtureFeedForward whole = on_meta_mixture(sizes(6));
  materialize(*whole, 5, testing_support::test_device());
  run_ranks(3, [&](World& world) {
    MixtureFeedForward drawn = on_meta_mixture(sizes(6)), cut = on_meta_mixture(sizes(6));
    materialize(*cut, 5, testing_support::test_device());
    const auto first = expert_parallel(*drawn, world.group()), second = expert_parallel(*cut, world.group());
    materialize(*drawn, 5, testing_support::test_device());
    for (MixtureFeedForward* one : {&drawn, &cut}) {
      for (const auto& parameter : (*one)->named_parameters()) {
        const at::Tensor part = take(whole->named_parameters()[parameter.key()].detach(), nn::slice_of(parameter.value()));
        EXPECT_TRUE(at::equal(parameter.value(), part)) << parameter.key();
      }
    }
  });
}

TEST(ExpertParallel, SendsTheChosenRowsOnce) {
  const int ranks = 4;
  const int64_t tokens = 6, per_token = 2, experts = 8;
  std::mutex mutex;
  std::map<std::string, int64_t> rows;
  run_ranks(ranks, [&](World& world) {
    const auto records = std::make_shared<comm::Recorder>();
    const comm::Group group({.name = "ep", .rank = world.rank(), .size = ranks, .timeout = std::chrono::seconds(60)},
                            comm::make_record_engine(records, {.name = "ep", .rank = world.rank(), .size = ranks}, world.group().engine()));
    MixtureFeedForward mixture = on_meta_mixture(sizes(experts));
    const auto parallel = expert_parallel(*mixture, group);
    draw(mixture);
    std::vector<int64_t> to(ranks);
    passes(mixture, numbers(tokens, world.rank()));
    int64_t bytes = 0, calls = 0;
    for (const auto& record : records->records()) {
      bytes += record.sent_bytes;
      ++calls;
    }
    EXPECT_EQ(calls, 5);  // counts; rows there and back; their gradients back and there
    const std::lock_guard lock(mutex);
    rows["sent"] += bytes - (ranks - 1) * experts / ranks * 8;
  });
  // Of all ranks together a row that leaves comes back, and so does its gradient.
  EXPECT_EQ(rows["sent"] % (4 * kDim * 4), 0);
  EXPECT_LE(rows["sent"], 4 * ranks * tokens * per_token * kDim * 4);
  EXPECT_GE(rows["sent"], 4 * ranks * tokens * per_token * kDim * 4 / 2);
}

TEST(ExpertParallel, RefusesWhatCannotBeDealt) {
  run_ranks(2, [](World& world) {
    MixtureFeedForward odd = on_meta_mixture(sizes(5)), even = on_meta_mixture(sizes(4));
    EXPECT_THAT(refusal([&] { expert_parallel(*odd, world.group()); }), HasSubstr("'experts' has 5 experts, which 2 ranks do not divide"));
    EXPECT_THAT(refusal([&] { expert_parallel(*even, world.group(), {.experts = "expert"}); }), HasSubstr("experts"));
    EXPECT_THAT(refusal([&] { expert_parallel(*even, world.group(), {.experts = "router"}); }), HasSubstr("is no GroupedExperts"));
  });
}

TEST(ExpertParallel, TellsItsWeightsFromTheRest) {
  MixtureFeedForward mixture = on_meta_mixture(sizes(4));
  std::vector<std::string> theirs, rest;
  for (const auto& parameter : nn::unique_parameters(*mixture, experts_of(*mixture, true))) theirs.push_back(parameter.name);
  for (const auto& parameter : nn::unique_parameters(*mixture, experts_of(*mixture, false))) rest.push_back(parameter.name);
  EXPECT_THAT(theirs, ::testing::ElementsAre("experts.w1", "experts.w2", "experts.w3"));
  EXPECT_THAT(rest, ::testing::ElementsAre("router.weight"));
}

}  // namespace
}  // namespace tessera
