#include "tessera/data_parallel/tree_reduction.h"

#include <gmock/gmock.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/weight_gradients.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

/// Micro-batch `index` of a global batch of `count`, of 2 samples.
void backward_of(Net& net, int64_t index, int64_t count, at::Device device = testing_support::test_device()) {
  const Batch batch = whole_batch(2, index);
  loss_of(net.forward(batch.x.to(device)), batch.y.to(device), 2 * count).backward();
}

/// One step as the engine takes it: this rank's run, or one padding micro-batch where the run is empty.
void take_step(Net& net, GradientSynchronizer& synchronizer, int64_t count, const comm::Group& group, at::Device device = testing_support::test_device()) {
  const auto [begin, size] = chunk(count, group.size(), group.rank());
  synchronizer.begin_step();
  const int64_t turns = chunk(count, group.size(), 0).second;  // ranks with fewer run padding
  for (int64_t turn = 0; turn < turns; ++turn) {
    const MicroBatchPosition position{.index = begin + turn, .last = turn + 1 == turns, .padding = turn >= size};
    synchronizer.before_micro_batch(position);
    backward_of(net, position.padding ? 99 : position.index, count, device);
    synchronizer.after_micro_batch(position);
  }
  synchronizer.finish();
}

std::vector<at::Tensor> on_one_rank(int64_t count, int64_t steps = 1) {
  Net net;
  TreeReduction tree(net, comm::Group::self(), {.num_micro_batches = count});
  for (int64_t step = 0; step < steps; ++step) take_step(net, tree, count, comm::Group::self());
  return gradients_of(net);
}

class TreeWorldSizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Tree, TreeWorldSizes, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(TreeWorldSizes, TheSameBitsForAnyDealing) {
  const int ranks = GetParam();
  for (const int64_t count : {int64_t{1}, int64_t{3}, int64_t{8}, int64_t{13}}) {
    const auto expected = on_one_rank(count);
    run_ranks(ranks, [&](World& world) {
      Net net;
      TreeReduction tree(net, world.group(), {.num_micro_batches = count});
      for (int step = 0; step < 2; ++step) {
        take_step(net, tree, count, world.group());
        EXPECT_TRUE(same_bits(gradients_of(net), expected)) << count << " micro-batches, rank " << world.rank() << ", step " << step;
      }
    });
  }
}

/// One weight, of which a rank's pass brings the gradients of several ranks' micro-batches, the last of them first.
struct Told : torch::nn::Module {
  at::Tensor weight = register_parameter("weight", at::zeros({5, 3}, testing_support::test_device()));
  static at::Tensor gradient(int64_t micro_batch) { return (at::arange(15, at::kFloat).view({5, 3}) * (micro_batch + 0.37)).sin(); }
};

at::Tensor told_by_sources(int ranks, int sources, int64_t count) {
  at::Tensor sum;
  run_ranks(ranks, [&](World& world) {
    Told module;
    TreeReduction tree(module, world.group(), {.num_micro_batches = count, .sources = sources});
    nn::WeightGradients told(nn::WeightGradients::When::AtOnce);
    const auto run_of = [&](int source) { return chunk(count, ranks * sources, world.rank() * sources + source); };
    const auto [begin, size] = run_of(sources - 1);  // of this rank itself, which may have padding where others have none
    tree.begin_step();
    const int64_t passes = chunk(count, ranks * sources, 0).second;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const MicroBatchPosition position{.index = begin + pass, .last = pass + 1 == passes, .padding = pass >= size};
      tree.before_micro_batch(position);
      for (int source = sources - 1; source >= 0; --source) {
        const auto [first, own] = run_of(source);
        const at::Tensor gradient = Told::gradient(pass < own ? first + pass : 99);
        told.leave(module.weight, [&] { return gradient.mul(0.75); }, source);  // in two parts
        told.leave(module.weight, [&] { return gradient.mul(0.25); }, source);
      }
      tree.after_micro_batch(position);
    }
    tree.finish();
    if (world.rank() == 0) sum = module.weight.grad().clone();
  });
  return sum;
}

TEST(Tree, TheSameBitsWhereAPassBringsSeveralMicroBatches) {
  for (const int64_t count : {int64_t{1}, int64_t{3}, int64_t{8}, int64_t{13}}) {
    const at::Tensor expected = told_by_sources(1, 1, count);
    for (const auto& [ranks, sources] : {std::pair{1, 2}, {2, 2}, {1, 5}, {3, 2}, {2, 4}}) {
      EXPECT_TRUE(at::equal(told_by_sources(ranks, sources, count), expected)) << count << " micro-batches, " << ranks << " ranks of " << sources;
    }
  }
}

TEST(Tree, RefusesAGradientOfNobodysMicroBatch) {
  Told module;
  TreeReduction tree(module, comm::Group::self(), {.num_micro_batches = 4, .sources = 2});
  tree.begin_step();
  tree.before_micro_batch({.index = 0});
  EXPECT_THROW(module.weight.sum().backward(), InternalError);
}

TEST(Tree, EqualsThePlainSumWithinParity) {
  Net net;
  for (int64_t index = 0; index < 13; ++index) backward_of(net, index, 13);
  EXPECT_LT(largest_difference(on_one_rank(13), gradients_of(net)), parity);
}

TEST(Tree, TheComparisonSeesADroppedMicroBatch) {
  Net net;
  for (int64_t index = 0; index < 13; ++index) {
    if (index != 5) backward_of(net, index, 13);
  }
  EXPECT_GT(largest_difference(on_one_rank(13), gradients_of(net)), 100 * parity);
}

TEST(Tree, StepsDoNotMix) { EXPECT_TRUE(same_bits(on_one_rank(6, 3), on_one_rank(6, 1))); }

TEST(Tree, KeepsNoMoreThanTheHeaderSays) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  Net net;
  int64_t bytes = 0;
  for (const at::Tensor& parameter : net.parameters()) bytes += static_cast<int64_t>(parameter.nbytes());
  for (const int64_t count : {int64_t{1}, int64_t{8}, int64_t{13}}) {
    TreeReduction tree(net, comm::Group::self(), {.num_micro_batches = count});
    tracker.reset_peak();
    int64_t most = 0;
    tree.begin_step();
    for (int64_t index = 0; index < count; ++index) {
      tree.before_micro_batch({.index = index, .last = index + 1 == count});
      most = std::max(most, tracker.current(MemoryCategory::Gradients));
      backward_of(net, index, count);
      tree.after_micro_batch({.index = index});
    }
    tree.finish();
    EXPECT_LE(most, (tree_root_level(count) + 1) * bytes);
    EXPECT_EQ(tracker.current(MemoryCategory::Gradients), bytes);
    tree.begin_step();
    EXPECT_EQ(tracker.current(MemoryCategory::Gradients), 0);
  }
}

TEST(Tree, SendsWhatTheHeaderSays) {
  constexpr int64_t count = 5;
  std::vector<std::shared_ptr<comm::Recorder>> recorders{std::make_shared<comm::Recorder>(), std::make_shared<comm::Recorder>()};
  run_ranks(2,
            [&](World& world) {
              Net net;
              TreeReduction tree(net, world.group(), {.num_micro_batches = count});
              recorders[world.rank()]->clear();
              take_step(net, tree, count, world.group());
              std::vector<std::string> ops;
              for (const auto& record : recorders[world.rank()]->records()) ops.push_back(record.op);
              EXPECT_EQ(ops,
                        world.rank() == 0 ? (std::vector<std::string>{"recv", "recv", "broadcast"}) : (std::vector<std::string>{"send", "send", "broadcast"}));
              EXPECT_EQ(tree.statistics().num_collectives, 3);
              EXPECT_EQ(tree.statistics().num_early, 0);
            },
            {.decorators = {[&](auto inner, const comm::GroupInfo& group) { return comm::make_record_engine(recorders[group.rank], group, inner); }}});
}

TEST(Tree, AParameterOfHalfPrecisionIsSummedInFull) {
  torch::nn::Module module;
  const at::Tensor weight = module.register_parameter("weight", at::ones({2}, at::kBFloat16));
  TreeReduction tree(module, comm::Group::self(), {.num_micro_batches = 3});
  tree.begin_step();
  for (int64_t index = 0; index < 3; ++index) {
    tree.before_micro_batch({.index = index, .last = index == 2});
    (weight * (index == 0 ? 256.0 : 0.75)).sum().backward();
    tree.after_micro_batch({.index = index});
  }
  tree.finish();
  EXPECT_EQ(weight.grad().scalar_type(), at::kBFloat16);
  EXPECT_EQ(weight.grad()[0].item<float>(), at::BFloat16(257.5f));  // adding 0.75 in bf16 twice would stay at 256
}

TEST(Tree, UnusedParametersAreRefusedByName) {
  run_ranks(2, [&](World& world) {
    Net net;
    net.register_parameter("spare", at::ones({2}));
    TreeReduction tree(net, world.group(), {.num_micro_batches = 4});
    EXPECT_THAT(refusal([&] { take_step(net, tree, 4, world.group()); }),
                HasSubstr("on rank " + std::to_string(world.rank()) + " of world, 1 of 8 parameters got no gradient in this step: 'spare'"));
    TreeReduction lenient(net, world.group(), {.num_micro_batches = 4, .find_unused_parameters = true});
    take_step(net, lenient, 4, world.group());
    EXPECT_FALSE(net.named_parameters()["spare"].grad().defined());
    EXPECT_TRUE(net.scale.grad().defined());
  });
}

TEST(Tree, WhatIsRegisteredAfterWrappingIsRefusedByName) {
  run_ranks(2, [&](World& world) {
    Net net;
    TreeReduction tree(net, world.group(), {.num_micro_batches = 4});
    net.register_parameter("gain", at::ones({3}));
    EXPECT_THAT(refusal([&] { take_step(net, tree, 4, world.group()); }), HasSubstr("TreeReduction: 'gain' of module "));
  });
}

TEST(Tree, WhatPaddingAloneUsesIsUnused) {
  run_ranks(2, [&](World& world) {
    Net net;
    const at::Tensor spare = net.register_parameter("spare", at::ones({2}));
    TreeReduction tree(net, world.group(), {.num_micro_batches = 3, .find_unused_parameters = true});  // the second rank has one, and one of padding
    tree.begin_step();
    for (int64_t turn = 0; turn < 2; ++turn) {
      const MicroBatchPosition position{.index = 2 * world.rank() + turn, .last = turn == 1, .padding = world.rank() == 1 && turn == 1};
      tree.before_micro_batch(position);
      backward_of(net, position.padding ? 99 : position.index, 3);
      if (position.padding) spare.sum().backward();
      tree.after_micro_batch(position);
    }
    tree.finish();
    EXPECT_FALSE(spare.grad().defined());
    EXPECT_TRUE(net.scale.grad().defined());
  });
}

TEST(Tree, MicroBatchesOutOfOrderOrMissingAreRefused) {
  Net net;
  TreeReduction tree(net, comm::Group::self(), {.num_micro_batches = 2});
  tree.begin_step();
  EXPECT_THROW(tree.before_micro_batch({.index = 1}), InternalError);
  EXPECT_THAT(refusal([&] { tree.finish(); }), HasSubstr("finish() was called before after()"));
  tree.begin_step();  // what an exception broke off is given up
  EXPECT_THAT(refusal([&] { tree.begin_step(); }), HasSubstr("begin_step() was called again"));
  tree.begin_step();
  EXPECT_THAT(refusal([&] { tree.finish(); }), HasSubstr("the step ended after 0 of the 2 micro-batches of rank 0"));
  EXPECT_THROW((void)TreeReduction(net, comm::Group::self(), {.num_micro_batches = 0}), InternalError);
}

TEST(Tree, ADryRunMakesTheSameCalls) {
  constexpr int64_t count = 7;
  std::vector<CollectiveEvent> real;
  run_ranks(3, [&](World& world) {
    const auto recorder = std::make_shared<comm::Recorder>();
    const comm::GroupInfo info{.name = "world", .rank = world.rank(), .size = 3, .ranks = {}};
    const comm::Group group(info, comm::make_record_engine(recorder, info, world.group().engine()));
    Net net;
    TreeReduction tree(net, group, {.num_micro_batches = count});
    take_step(net, tree, count, group);
    if (world.rank() == 1) real = recorder->records();
  });
  const auto recorder = std::make_shared<comm::Recorder>();
  World world = World::dry(3, 1, recorder);
  const auto net = on_meta([] { return std::make_shared<Net>(); });
  TreeReduction tree(*net, world.group(), {.num_micro_batches = count});
  take_step(*net, tree, count, world.group(), at::kMeta);
  const std::vector<CollectiveEvent> planned = recorder->records();
  ASSERT_EQ(planned.size(), real.size());
  for (size_t i = 0; i < real.size(); ++i) {
    EXPECT_EQ(planned[i].op, real[i].op) << i;
    EXPECT_EQ(planned[i].shape, real[i].shape) << i;
    EXPECT_EQ(planned[i].peer, real[i].peer) << i;
  }
}

}  // namespace
}  // namespace tessera
