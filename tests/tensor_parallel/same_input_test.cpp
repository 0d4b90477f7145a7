// comm.check: what has to be the same on every rank of a tensor-parallel group, and comes from outside.

#include <atomic>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/testing.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

constexpr TensorParallelOptions kCheck{.check_inputs = true};

/// What each rank is told where `spoil` gave some of them another batch; empty where nothing is thrown.
std::vector<std::string> told(int ranks, bool sequence, const std::function<void(int rank, Sample&)>& spoil, const TensorParallelOptions& options = kCheck) {
  std::vector<std::string> texts(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    Sample batch = sample(2, 8, 29);
    spoil(world.rank(), batch);
    TokenNet net = on_meta([] { return TokenNet(); });
    const auto tensor = parallelize_module(net, world.group(), token_net_plan(sequence), options);
    materialize(net, 7, testing_support::test_device());
    try {
      forward_backward(net, batch);
    } catch (const CommError& error) {
      texts[static_cast<size_t>(world.rank())] = error.what();
    }
  });
  return texts;
}

TEST(SameInput, EqualOnesPass) {
  for (const int ranks : {1, 2, 5}) {
    for (const std::string& text : told(ranks, ranks == 5, [](int, Sample&) {})) EXPECT_EQ(text, "");
  }
  // Another object, with other strides and the same values.
  for (const std::string& text : told(2, false, [](int rank, Sample& batch) {
         if (rank == 1) batch.tokens = batch.tokens.t().contiguous().t();
       })) {
    EXPECT_EQ(text, "");
  }
}

TEST(SameInput, OtherIdsAreFoundOnEveryRankAndTheOddOneIsNamed) {
  for (const int ranks : {2, 3, 8}) {
    const int odd = ranks / 2;
    const auto texts = told(ranks, ranks == 3, [&](int rank, Sample& batch) {
      if (rank == odd) batch.tokens[1][7] = (batch.tokens[1][7] + 1) % 29;
    });
    for (const std::string& text : texts) {
      EXPECT_THAT(text,
                  AllOf(HasSubstr("argument 0 of 'embed' has to be the same on every rank of world"),
                        HasSubstr("deal samples by the rank along the data axes alone"), HasSubstr("rank " + std::to_string(odd) + " was given another one")));
    }
  }
}

TEST(SameInput, OtherShapesAndLabelsAreFound) {
  for (const std::string& text : told(3, false, [](int rank, Sample& batch) {
         if (rank == 0) batch = sample(2, 6, 29);
       })) {
    EXPECT_THAT(text, HasSubstr("'embed' has to be the same on every rank of world, and rank 0 was given"));
  }
  for (const std::string& text : told(3, true, [](int rank, Sample& batch) {
         if (rank > 0) batch.labels[1][rank] = 0;
       })) {
    EXPECT_THAT(text, HasSubstr("argument 1 of 'head' has to be the same on every rank of world, and ranks 1, 2 were given"));
  }
}

TEST(SameInput, WithoutTheCheckNothingIsCompared) {
  for (const std::string& text : told(2, false, [](int rank, Sample& batch) { batch.labels[0][1] = rank; }, {})) EXPECT_EQ(text, "");
}

/// Activations come from outside where the plan embeds no ids.
TEST(SameInput, OtherActivationsAreFound) {
  const ParallelPlan prepared{{"", PrepareInput{.from = TensorLayout::Replicated, .to = TensorLayout::Copied}},
                              {"w1", ColumnParallel{.input = TensorLayout::Copied}},
                              {"w3", ColumnParallel{.input = TensorLayout::Copied}},
                              {"w2", RowParallel{}}};
  const ParallelPlan plain{{"w1", ColumnParallel{}}, {"w3", ColumnParallel{}}, {"w2", RowParallel{}}};
  for (const bool direct : {false, true}) {
    std::atomic<int> thrown = 0;
    run_ranks(3, [&](World& world) {
      Gated layer = on_meta([] { return Gated(10, 17); });
      const auto tensor = parallelize_module(layer, world.group(), direct ? plain : prepared, kCheck);
      materialize(layer, 7, testing_support::test_device());
      const at::Tensor x = at::ones({4, 10});
      layer(x);
      if (world.rank() == 2) x[3][9] = 1.5;
      try {
        layer(x);
      } catch (const CommError& error) {
        ++thrown;
        EXPECT_THAT(error.what(), AllOf(HasSubstr(direct ? "argument 0 of 'w1'" : "argument 0 of ''"), HasSubstr("rank 2 was given another one")));
      }
    });
    EXPECT_EQ(thrown, 3);
  }
}

}  // namespace
}  // namespace tessera
