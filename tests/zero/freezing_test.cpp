#include <functional>

#include "tessera/zero/zero_optimizer.h"
#include "tests/zero/plain_loop.h"
#include "tests/zero/support.h"

/// Parameters that are frozen, and unfrozen, between steps.
namespace tessera {
namespace {

using namespace testing_support;

TEST(ZeroPlainLoop, FreezingAndUnfreezingAtAnyTime) {
  for (const auto& make : {make_sgd, make_adam}) {
    expect_parity(
        [](Net& net, const Loop& loop) {
          const std::vector<std::pair<bool, bool>> stages{{false, true}, {true, true}, {true, false}, {false, true}, {true, true}};
          for (size_t stage = 0; stage < stages.size(); ++stage) {
            set_trained(net, stages[stage].first, stages[stage].second);
            for (int step = 0; step < 2; ++step) {
              loop.zero_grad();
              backward(net, loop.mine(static_cast<int64_t>(2 * stage) + step));
              loop.step();
            }
          }
        },
        make, [](Net& net) { set_trained(net, false, true); });
  }
}

/// A fine-tuning program makes a new optimizer, over what is trained now, when it has unfrozen or frozen layers: no step lies between.
TEST(ZeroPlainLoop, AnOptimizerOverWhatWasJustUnfrozenTrainsIt) {
  const auto make = [](const std::vector<at::Tensor>& parameters) {
    std::vector<at::Tensor> trained;
    for (const at::Tensor& parameter : parameters) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    return make_sgd(trained);
  };
  const std::vector<std::pair<bool, bool>> stages{{false, true}, {true, true}, {true, false}};
  const auto train = [&](Net& net, const auto& optimizer_of, const std::function<Batch(int64_t)>& mine) {
    for (size_t stage = 0; stage < stages.size(); ++stage) {
      set_trained(net, stages[stage].first, stages[stage].second);
      auto optimizer = optimizer_of(net);
      for (int step = 0; step < 2; ++step) {
        optimizer->zero_grad();
        backward(net, mine(static_cast<int64_t>(2 * stage) + step));
        optimizer->step();
      }
    }
  };
  Net reference;
  train(reference, [&](Net& net) { return make(net.parameters()); }, [](int64_t step) { return whole_batch(samples, step); });
  for (const auto& [ranks, replicas] : {Layout{2, 1}, Layout{3, 1}, Layout{4, 2}}) {
    for (const Way& way : ways) {
      run_ranks(ranks, [&, ranks = ranks, replicas = replicas](World& world) {
        Net net;
        set_trained(net, stages[0].first, stages[0].second);
        ShardedDataParallel zero(net, groups_of(world, replicas), options_of(way));
        struct Optimizer {
          decltype(zero_optimizer(zero, make)) of;
          void zero_grad() { of.zero_grad(); }
          void step() { of.step(); }
        };
        train(
            net, [&](Net&) { return std::make_unique<Optimizer>(zero_optimizer(zero, make)); },
            [&](int64_t step) { return part_of(whole_batch(samples, step), ranks, world.rank()); });
        EXPECT_LT(largest_difference(weights_of(net), weights_of(reference)), 10 * parity) << ranks << " ranks, stage " << way.stage;
      });
    }
  }
}

/// As on one process, where it goes on moving the parameter: also where others of its bucket, whose memory it shares, go on.
TEST(ZeroPlainLoop, AGradientThatNobodyClearedOutlivesFreezing) {
  for (const char* frozen : {"first.weight", "first.bias", "last.weight", "scale"}) {
    expect_parity([&](Net& net, const Loop& loop) {
      backward(net, loop.mine(0));
      loop.step();
      net.named_parameters()[frozen].requires_grad_(false);
      for (int step = 1; step < 3; ++step) {
        for (at::Tensor parameter : net.parameters()) {
          if (parameter.requires_grad()) parameter.mutable_grad().reset();
        }
        backward(net, loop.mine(step));
        loop.step();
      }
    });
  }
}

TEST(ZeroPlainLoop, WhatIsFrozenFromTheStartIsNeitherReducedNorGathered) {
  run_ranks(2, [&](World& world) {
    const auto recorder = std::make_shared<comm::Recorder>();
    const comm::GroupInfo info{.name = "world", .rank = world.rank(), .size = 2, .ranks = {}};
    const comm::Group group(info, comm::make_record_engine(recorder, info, world.group().engine()));
    Net net;
    for (const at::Tensor& parameter : net.middle->parameters()) at::Tensor(parameter).requires_grad_(false);
    ShardedDataParallel zero(net, {.shard = group}, {.stage = 2, .sizes = small_buckets, .buffers = BufferBroadcast::Never});
    int64_t trained = 0;
    for (const auto& bucket : zero.layout().buckets) {
      bool frozen = false;
      for (const auto& slot : bucket.slots) frozen |= zero.shards()[slot.parameter].name.starts_with("middle");
      if (!frozen) trained += zero.layout().numel(bucket) * 4;
    }
    auto optimizer = zero_optimizer(zero, make_sgd);
    backward(net, whole_batch(samples));
    recorder->clear();
    optimizer.zero_grad();
    backward(net, whole_batch(samples));
    optimizer.step();
    int64_t bytes = 0;
    for (const auto& record : recorder->records()) {
      if (record.site == "zero.bucket" || record.site == "zero.parameters") bytes += record.sent_bytes;
    }
    EXPECT_EQ(bytes, trained / 2 * 2);
  });
}

}  // namespace
}  // namespace tessera
