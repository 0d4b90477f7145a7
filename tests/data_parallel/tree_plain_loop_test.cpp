#include <gmock/gmock.h>
#include <torch/nn/modules/embedding.h>

#include "support.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tests/data_parallel/plain_loop.h"

/// The plain loop over the fixed tree.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

TEST(TreePlainLoop, ClearingWithinARunStartsItAnew) {
  for (const bool set_to_none : {true, false}) {
    run_ranks(2, [&](World& world) {
      Net net, reference;
      TreeReduction tree(net, world.group(), {.num_micro_batches = 4});
      const auto run = [&](int64_t first) {
        for (int64_t i = 0; i < 2; ++i) {
          const Attachment local = i < 1 ? tree.no_sync() : Attachment();
          backward(net, part_of(whole_batch(samples, first + i), 2, world.rank()));
        }
      };
      run(0);
      {
        const Attachment local = tree.no_sync();
        backward(net, whole_batch(samples, 7));
      }
      net.zero_grad(set_to_none);
      run(2);
      for (const int step : {2, 3}) backward(reference, whole_batch(samples, step));
      EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), parity);
      {
        const Attachment local = tree.no_sync();
        backward(net, whole_batch(samples, 7));
      }
      net.scale.mutable_grad() = at::Tensor();
      EXPECT_THAT(refusal([&] { backward(net, whole_batch(samples)); }), HasSubstr("the gradient of 'scale' was cleared within a run of micro-batches"));
    });
  }
}

TEST(TreePlainLoop, AParameterThatGetsAnotherFormWithinARunIsRefused) {
  run_ranks(2, [&](World& world) {
    Net net;
    TreeReduction tree(net, world.group(), {.num_micro_batches = 4});
    {
      const Attachment local = tree.no_sync();
      backward(net, whole_batch(samples));
    }
    net.scale.set_data(at::ones({70}));
    EXPECT_THAT(refusal([&] { net.scale.sum().backward(); }), HasSubstr("TreeReduction: 'scale' was given values of shape [70], Float on cpu"));
  });
}

TEST(TreePlainLoop, HasTheBitsOfTheExplicitCalls) {
  constexpr int64_t micro_batches = 6;
  const auto run = [&](bool plain, int ranks) {
    std::vector<at::Tensor> gradients;
    run_ranks(ranks, [&](World& world) {
      Net net;
      TreeReduction tree(net, world.group(), {.num_micro_batches = micro_batches});
      const int64_t mine = micro_batches / ranks, first = world.rank() * mine;
      if (!plain) tree.begin_step();
      for (int64_t i = 0; i < mine; ++i) {
        const MicroBatchPosition position{.index = first + i, .last = i + 1 == mine};
        const Attachment local = plain && !position.last ? tree.no_sync() : Attachment();
        if (!plain) tree.before_micro_batch(position);
        backward(net, whole_batch(samples, position.index));
        if (!plain) tree.after_micro_batch(position);
      }
      if (!plain) tree.finish();
      if (world.rank() == 0) gradients = gradients_of(net);
      if (!plain) return;
      EXPECT_THAT(refusal([&] {
                    for (int64_t i = 0; i < mine + 1; ++i) {
                      const Attachment local = i < mine ? tree.no_sync() : Attachment();
                      backward(net, whole_batch(samples));
                    }
                  }),
                  HasSubstr("micro-batches (num_micro_batches)"));
    });
    return gradients;
  };
  const auto expected = run(false, 1);
  for (const int ranks : {1, 2, 3}) EXPECT_TRUE(same_bits(run(true, ranks), expected)) << ranks;
}

TEST(TreePlainLoop, AGradientFromBeforeTheWrapperIsRefusedUntilItIsCleared) {
  run_ranks(2, [](World& world) {
    Net net;
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    backward(net, mine);
    const TreeReduction tree(net, world.group(), {.num_micro_batches = 2});
    for (int pass = 0; pass < 2; ++pass) EXPECT_THAT(refusal([&] { backward(net, mine); }), HasSubstr("has a gradient from before it was wrapped"));
  });
}

TEST(TreePlainLoop, AnEmbeddingThatWritesItsRowsInForwardIsRefused) {
  run_ranks(2, [](World& world) {
    torch::nn::Sequential net(torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 3).max_norm(1.0)));
    EXPECT_THAT(refusal([&] { const TreeReduction tree(*net, world.group(), {.num_micro_batches = 2}); }), HasSubstr("'0' is an embedding with max_norm"));
  });
}

TEST(TreePlainLoop, WhatIsUnfrozenWithinARunIsRefused) {
  run_ranks(2, [](World& world) {
    Net net;
    net.scale.set_requires_grad(false);
    TreeReduction tree(net, world.group(), {.num_micro_batches = 4});
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    {
      const Attachment local = tree.no_sync();
      backward(net, mine);
    }
    net.scale.set_requires_grad(true);
    EXPECT_THAT(refusal([&] { backward(net, mine); }), HasSubstr("'scale' was unfrozen within a step"));
  });
}

}  // namespace
}  // namespace tessera
