#include "tessera/context_parallel/context_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support.h"
#include "tessera/kernels/choice.h"
#include "tessera/nn/linear.h"
#include "tests/refusal.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using namespace testing_support;
using ::testing::HasSubstr;

at::Tensor ones(int64_t columns, int64_t heads) { return at::ones({1, columns, heads, 4}); }

TEST(ContextParallelRefuses, WhatCannotBeCut) {
  comm::run_ranks(3, [](comm::World& world) {
    Attending model;
    const auto attach = [&](const ContextParallelOptions& options) { return context_parallel(model, world.group(), options, "core"); };
    EXPECT_THAT(refusal([&] { attach({.method = ContextMethod::UlyssesRing, .ulysses = 2}); }), HasSubstr("context.ulysses = 2: must divide the 3 ranks"));
    EXPECT_THAT(refusal([&] { attach({.ulysses = 3}); }), HasSubstr("has no meaning with context.method = ring"));
    EXPECT_THAT(refusal([&] { (void)context_parallel(model, world.group(), {}, "cores"); }), HasSubstr("core"));
    nn::Linear linear(4, 4);
    torch::nn::Module plain;
    plain.register_module("linear", linear.ptr());
    EXPECT_THAT(refusal([&] { (void)context_parallel(plain, world.group(), {}, "linear"); }), HasSubstr("'linear' is no nn::AttentionCore"));

    const auto context = attach({.method = ContextMethod::Ulysses});
    EXPECT_THAT(refusal([&] { model(ones(4, 6), ones(4, 6), ones(4, 6), std::nullopt); }), HasSubstr("call set_cut"));
    EXPECT_THAT(refusal([&] { context->set_cut(SequenceCut::head_tail(2, 3)); }), HasSubstr("a sequence of 2 columns leaves rank 2 of 3 without any"));
    EXPECT_THAT(refusal([&] { context->set_cut(SequenceCut::head_tail(12, 2)); }), HasSubstr("a cut over 2 ranks for a group of 3"));
    context->set_cut(SequenceCut::head_tail(12, 3));
    EXPECT_THAT(refusal([&] { model(ones(5, 6), ones(5, 6), ones(5, 6), std::nullopt); }), HasSubstr("5 columns, while set_cut says that rank"));
    EXPECT_THAT(refusal([&] { model(ones(4, 6), ones(9, 6), ones(9, 6), std::nullopt); }), HasSubstr("4 queries to 9 keys"));
    EXPECT_THAT(refusal([&] { model(ones(4, 2), ones(4, 2), ones(4, 2), std::nullopt); }),
                HasSubstr("2 query heads on each rank cannot be dealt over 3 ranks; at most 2 ranks"));
    EXPECT_THAT(refusal([&] { model(ones(4, 5), ones(4, 2), ones(4, 2), std::nullopt); }), HasSubstr("5"));
  });
}

/// One rank would stop at a sum of two types, and the others wait.
TEST(ContextParallelRefuses, DoubleWhereScoresAreMerged) {
  comm::run_ranks(2, [](comm::World& world) {
    const kernels::KernelChoiceGuard plainly(kernels::KernelChoice::Reference);
    for (const auto method : {ContextMethod::Ring, ContextMethod::RingFull, ContextMethod::AllGather, ContextMethod::UlyssesRing, ContextMethod::Ulysses}) {
      Attending model;
      const auto context = context_parallel(model, world.group(), {.method = method, .ulysses = method == ContextMethod::UlyssesRing ? 1 : 0}, "core");
      context->set_cut(SequenceCut::head_tail(8, 2));
      const at::Tensor x = ones(4, 2).to(at::kDouble);
      if (method == ContextMethod::Ulysses) {
        EXPECT_NO_THROW(model(x, x, x, std::nullopt));
      } else {
        EXPECT_THAT(refusal([&] { model(x, x, x, std::nullopt); }), HasSubstr("merges scores in fp32"));
      }
    }
  });
}

TEST(ContextParallelTest, DetachesWhenDestroyed) {
  comm::run_ranks(2, [](comm::World& world) {
    Attending model;
    const at::Tensor x = normal({1, 4, 2, 4}, 1);
    const at::Tensor alone = model(x, x, x, std::nullopt);
    {
      const auto context = context_parallel(model, world.group(), {}, "core");
      context->set_cut(SequenceCut::contiguous(8, 2));
      EXPECT_EQ(at::equal(model(x, x, x, std::nullopt), alone), world.rank() == 0) << "the first half sees no other";
    }
    EXPECT_TRUE(at::equal(model(x, x, x, std::nullopt), alone));
  });
}

TEST(ContextParallelTest, FollowsTheCutOfEachCall) {
  comm::run_ranks(2, [](comm::World& world) {
    Attending model;
    const auto context = context_parallel(model, world.group(), {}, "core");
    for (const int64_t length : {8, 5, 12}) {
      const SequenceCut cut = SequenceCut::head_tail(length, 2);
      const AttentionCase c{.length = length};
      const Passes whole = on_one_device(c);
      const at::Tensor columns = cut.positions(world.rank(), testing_support::test_device());
      std::vector<at::Tensor> own;
      for (const at::Tensor& tensor : whole.in) own.push_back(tensor.index_select(1, columns));
      context->set_cut(cut);
      EXPECT_LE(difference(pass(model, own), whole.out, columns), 1e-5);
    }
  });
}

}  // namespace
}  // namespace tessera
