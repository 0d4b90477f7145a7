#include "tessera/context_parallel/context_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support.h"
#include "tessera/kernels/choice.h"
#include "tessera/nn/dropout.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/sample_scope.h"
#include "tessera/recompute/recompute.h"
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
      if (method != ContextMethod::Ulysses) {
        EXPECT_THAT(refusal([&] { model(x, x, x, std::nullopt); }), HasSubstr("merges scores in fp32"));
      } else if (x.is_cuda()) {
        EXPECT_THAT(refusal([&] { model(x, x, x, std::nullopt); }), HasSubstr("tiles in Double: CUDA has kernels for fp32"));
      } else {
        EXPECT_NO_THROW(model(x, x, x, std::nullopt));
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

/// As the layers of a model drop what attention gives.
struct DroppingImpl : nn::Module {
  DroppingImpl() {
    register_module("core", core);
    register_module("dropout", dropout);
    register_module("pooled", pooled);
    nn::assign_paths(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor heads = x.unflatten(-1, {2, 4});
    return dropout(core(heads, heads, heads, std::nullopt, std::nullopt).flatten(-2));
  }
  nn::AttentionCore core;
  nn::Dropout dropout{0.4}, pooled{0.4};
};
TESSERA_MODULE(Dropping);

/// Output and the input's gradient of a step, and what is dropped of [B, D], which has no columns.
std::vector<at::Tensor> dropped(Dropping& model, const at::Tensor& x) {
  const nn::SampleScope scope({.seed = 5, .step = 2, .first_sample = 4});
  const at::Tensor input = x.detach().requires_grad_(), out = model(input);
  out.mul(out).sum().backward();
  return {out.detach(), input.grad(), model->pooled(at::ones({3, 8}))};
}

TEST(ContextParallelTest, DropsWhatOneProcessDrops) {
  const at::Tensor x = normal({3, 13, 8}, 1).to(test_device());
  Dropping one;
  const auto whole = dropped(one, x);
  for (const int ranks : {2, 3}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      Dropping model;
      const auto context = context_parallel(model, world.group(), {}, "core");
      const auto recomputed = world.size() == 3 ? recompute(model, {.modules = ""}) : Attachment();
      for (const SequenceCut& cut : {SequenceCut::contiguous(13, ranks), SequenceCut::head_tail(13, ranks)}) {
        const at::Tensor columns = cut.positions(world.rank(), test_device());
        context->set_cut(cut);
        const auto own = dropped(model, x.index_select(1, columns));
        EXPECT_TRUE(at::equal(own[0].eq(0), whole[0].index_select(1, columns).eq(0)));
        EXPECT_LE(difference({own[0], own[1]}, {whole[0], whole[1]}, columns), 1e-5);
        EXPECT_TRUE(at::equal(own[2], whole[2]));
        EXPECT_THAT([&] { model->dropout(own[0].unflatten(-1, {2, 4})); },
                    ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("has no one dimension of columns")));
      }
    });
  }
}

}  // namespace
}  // namespace tessera
