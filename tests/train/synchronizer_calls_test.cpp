// Calls, passes and actions that go wrong under every technique, and what a dry run makes of them.

#include <gmock/gmock.h>

#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/nn/meta.h"
#include "tests/train/synchronizer_contract.h"

namespace tessera {
namespace {

using namespace testing_support;
using namespace testing_support::contract;
using ::testing::HasSubstr;

class SynchronizerCalls : public SynchronizerContract {};
INSTANTIATE_TEST_SUITE_P(, SynchronizerCalls, ::testing::ValuesIn(techniques_of_the_contract()), [](const auto& info) { return info.param.name; });

TEST_P(SynchronizerCalls, APassThatEndsByAnExceptionLeavesWhatWasThereBefore) {
  const auto fail = [](Net& net) {
    at::Tensor hidden = net.first(whole_batch(samples).x);
    hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("in backward"); });
    EXPECT_THROW(net.last(at::tanh(net.middle(at::tanh(hidden)) * net.scale)).sum().backward(), std::runtime_error);
  };
  for (const bool cleared : {true, false}) {
    expect_gradients_of_one_process(
        [&](Net& net, GradientSynchronizer* sync, const auto& mine) {
          if (sync != nullptr) fail(net);
          for (int step = 0; step < 2; ++step) {
            backward(net, mine(2 * step));
            if (sync != nullptr) fail(net);
            if (cleared) clear(net, sync);
            backward(net, mine(2 * step + 1));
          }
        },
        {}, sizes(/*several=*/true));
  }
  for (const int ranks : sizes(/*several=*/true)) {  // by explicit calls the next step finds it out
    SliceCollector gradients;
    on_ranks(ranks, {}, [&](Rank& rank) {
      rank.sync->begin_step();
      rank.sync->before_micro_batch(rank.position(0, 1));
      fail(rank.net);
      accumulations[1].run(rank, rank.mine(0), 1);
      gradients.add_gradients(rank.sync->updated());
    });
    Net reference;
    backward(reference, whole_batch(samples));
    EXPECT_LT(difference_of(gradients.whole(), gradients_by_name(reference)), parity);
  }
}

/// In a forward, in a backward before its first gradient, in weight gradients: begin_step gives the step up, and what it had accumulated.
TEST_P(SynchronizerCalls, AnActionThatIsBrokenOffGivesItsStepUp) {
  Net reference;
  backward(reference, whole_batch(samples));
  for (const ActionKind action : {ActionKind::Forward, ActionKind::Backward, ActionKind::Weights}) {
    for (const int ranks : sizes(/*several=*/true)) {
      SliceCollector gradients;
      on_ranks(ranks, {.passes = 2}, [&](Rank& rank) {
        rank.sync->begin_step();
        const bool left = action == ActionKind::Weights;
        for (int pass = 0; pass < (left ? 2 : 1); ++pass) {
          MicroBatchPosition position = rank.position(pass, 2);
          position.weights_later = left;
          rank.sync->before_micro_batch(position);
          rank.backward(rank.mine(pass + 1));
          rank.sync->after_micro_batch(position);
        }
        if (action == ActionKind::Backward) {
          rank.sync->before(ActionKind::Forward, rank.position(1, 2));
          rank.sync->after(ActionKind::Forward, rank.position(1, 2));
        }
        rank.sync->before(action, rank.position(left ? 0 : 1, 2));  // an exception comes
        accumulations[1].run(rank, rank.mine(0), 2);
        gradients.add_gradients(rank.sync->updated());
      });
      EXPECT_LT(difference_of(gradients.whole(), gradients_by_name(reference)), parity) << "action " << static_cast<int>(action) << ", " << ranks << " ranks";
    }
  }
}

TEST_P(SynchronizerCalls, AGradientWithAHistoryIsRefusedByName) {
  for (const int ranks : sizes(/*several=*/true)) {
    on_ranks(ranks, {}, [&](Rank& rank) {
      const Batch mine = rank.mine(0);
      const at::Tensor loss = loss_of(rank.net.forward(mine.x), mine.y, samples);
      const std::string text = refusal([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); });
      EXPECT_THAT(text, HasSubstr("got a gradient that has a history (backward with create_graph)"));
      EXPECT_THAT(text, HasSubstr("torch::autograd::grad("));
    });
  }
}

TEST_P(SynchronizerCalls, CallsThatAreMissingOrOutOfOrderAreRefusedByName) {
  for (const int ranks : {replicas(), 2 * replicas()}) {
    on_ranks(ranks, {.passes = 2}, [&](Rank& rank) {
      GradientSynchronizer& sync = *rank.sync;
      const auto first = rank.position(0, 2), last = rank.position(1, 2);
      EXPECT_THAT(refusal([&] { sync.finish(); }), HasSubstr("finish() was called without begin_step()"));
      EXPECT_THAT(refusal([&] { sync.before_micro_batch(first); }), HasSubstr("before_micro_batch(), or before() of a forward, was called outside a step"));
      EXPECT_THAT(refusal([&] { sync.after_micro_batch(first); }),
                  HasSubstr("after_micro_batch(), or after() of a backward, was called without before_micro_batch()"));
      sync.begin_step();
      if (!GetParam().restarts) {
        EXPECT_THAT(refusal([&] { sync.begin_step(); }), HasSubstr("begin_step() was called again before finish()"));
        sync.begin_step();
      }
      sync.before_micro_batch(first);
      EXPECT_THAT(refusal([&] { sync.before_micro_batch(first); }),
                  HasSubstr("was called before after_micro_batch(), or after() of a backward, of the one before"));
      EXPECT_THAT(refusal([&] { sync.finish(); }), HasSubstr("finish() was called before after_micro_batch()"));
      rank.backward(rank.mine(0));
      sync.after_micro_batch(first);
      EXPECT_THAT(refusal([&] { sync.after_update(); }), HasSubstr("after_update() was called before finish()"));
      EXPECT_THAT(refusal([&] { sync.finish(); }), HasSubstr("no call said MicroBatchPosition::last"));
      EXPECT_THAT(refusal([&] { sync.before(ActionKind::Backward, last); }),
                  HasSubstr("before() of a backward was called before the forward of its micro-batch"));
      EXPECT_THAT(refusal([&] { sync.before(ActionKind::Weights, last); }), HasSubstr("for what no backward has left for later"));
      sync.before(ActionKind::Forward, last);
      EXPECT_THAT(refusal([&] { sync.after(ActionKind::Backward, last); }), HasSubstr("was called without before_micro_batch()"));
      const at::Tensor loss = loss_of(rank.net.forward(rank.mine(0).x), rank.mine(0).y, samples);
      sync.after(ActionKind::Forward, last);
      EXPECT_THAT(refusal([&] { sync.finish(); }), HasSubstr("before the backward of 1 micro-batches whose forward has run"));
      sync.before(ActionKind::Backward, last);
      loss.backward();
      sync.after(ActionKind::Backward, last);
      EXPECT_THAT(refusal([&] { sync.before_micro_batch(last); }), HasSubstr("was called after the step's last micro-batch"));
      sync.finish();
      rank.update();
    });
  }
}

struct Buffered : Net {
  Buffered() { register_buffer("table", at::ones({6})); }
};

TEST_P(SynchronizerCalls, ADryRunMakesTheSameCalls) {
  const Wanted wanted{.passes = 2};
  const auto train = [&](Net& net, const ShardGroups& groups, int rank, at::Device device, comm::Recorder& recorder) {
    const auto sync = GetParam().wrap(net, groups, wanted);
    if (device == at::kMeta) materialize(net, 1, device);
    if (GetParam().shards) recorder.clear();  // of a model on meta nothing is made equal when it is wrapped: it has no values yet
    for (int step = 0; step < 2; ++step) {
      const Batch batch = whole_batch(samples);
      sync->begin_step();
      for (int pass = 0; pass < 2; ++pass) {
        const MicroBatchPosition position{.index = 2 * rank + pass, .last = pass == 1};
        sync->before_micro_batch(position);
        backward(net, {batch.x.to(device), batch.y.to(device)});
        sync->after_micro_batch(position);
      }
      sync->finish();
      sync->after_update();
    }
  };
  const int ranks = replicas() > 1 ? 4 : 3;
  std::vector<CollectiveEvent> real;
  comm::run_ranks(ranks, [&](World& world) {
    const auto recorder = std::make_shared<comm::Recorder>();
    const auto recorded = [&](const comm::Group& group) {
      if (group.size() == 1) return group;
      comm::GroupInfo info{.name = group.name(), .rank = group.rank(), .size = group.size(), .ranks = {}};
      for (int member = 0; member < group.size(); ++member) info.ranks.push_back(group.world_rank(member));
      return comm::Group(info, comm::make_record_engine(recorder, info, group.engine()));
    };
    const ShardGroups groups = groups_in(world);
    Buffered net;
    train(net, {.shard = recorded(groups.shard), .replicate = recorded(groups.replicate)}, world.rank(), at::kCPU, *recorder);
    if (world.rank() == 1) real = recorder->records();
  });
  const auto recorder = std::make_shared<comm::Recorder>();
  World world = World::dry(ranks, 1, recorder);
  const auto net = on_meta([] { return std::make_shared<Buffered>(); });
  train(*net, groups_in(world), 1, at::kMeta, *recorder);
  const std::vector<CollectiveEvent> planned = recorder->records();
  ASSERT_EQ(planned.size(), real.size());
  for (size_t i = 0; i < real.size(); ++i) {
    EXPECT_EQ(planned[i].op, real[i].op) << i;
    EXPECT_EQ(planned[i].shape, real[i].shape) << i;
    EXPECT_EQ(planned[i].dtype, real[i].dtype) << i;
    EXPECT_EQ(planned[i].site, real[i].site) << i;
    EXPECT_EQ(planned[i].peer, real[i].peer) << i;
  }
}

}  // namespace
}  // namespace tessera
