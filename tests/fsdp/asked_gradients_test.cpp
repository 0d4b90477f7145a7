#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>

#include "support.h"

/// Gradients that a program asks for within a step of explicit calls (torch::autograd::grad): penalties, forces, saliency.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using namespace testing_support;

enum class Asks { Penalty, Saliency, Twice };

/// The loss of a batch, of `terms` micro-batches.
template <class Net>
at::Tensor asked_loss(Net& net, const Batch& batch, Asks asks) {
  const at::Tensor x = batch.x.detach().clone().requires_grad_();
  const at::Tensor out = net(x), loss = loss_of(out, batch.y, samples);
  const bool differentiated = asks != Asks::Saliency;
  const at::Tensor slope = torch::autograd::grad({out.sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/differentiated)[0];
  if (asks == Asks::Saliency) return loss + net(x + slope * 0.1).square().sum() / samples;
  const at::Tensor penalty = slope.square().sum() / samples;
  if (asks == Asks::Penalty) return loss + penalty;
  return loss + torch::autograd::grad({penalty}, {x}, {}, true, true)[0].square().sum() / samples;
}

enum class Order { OneByOne, ForwardsFirst, MicroBatches };

void step_of(DeepNet& net, GradientSynchronizer& sharded, const std::vector<Batch>& micro_batches, Asks asks, Order order) {
  const auto at = [&](size_t i) { return MicroBatchPosition{.index = static_cast<int64_t>(i), .last = i + 1 == micro_batches.size()}; };
  std::vector<at::Tensor> losses(micro_batches.size());
  const auto forward = [&](size_t i) {
    sharded.before(ActionKind::Forward, at(i));
    losses[i] = asked_loss(net, micro_batches[i], asks);
    sharded.after(ActionKind::Forward, at(i));
  };
  const auto backward = [&](size_t i) {
    sharded.before(ActionKind::Backward, at(i));
    losses[i].backward();
    sharded.after(ActionKind::Backward, at(i));
  };
  sharded.begin_step();
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    if (order == Order::MicroBatches) {
      sharded.before_micro_batch(at(i));
      asked_loss(net, micro_batches[i], asks).backward();
      sharded.after_micro_batch(at(i));
    } else {
      forward(i);
      if (order == Order::OneByOne) backward(i);
    }
  }
  for (size_t i = 0; order == Order::ForwardsFirst && i < micro_batches.size(); ++i) backward(i);
  sharded.finish();
}

TEST(FullyShardAsked, GradientsWithinAStepOfExplicitCallsEndNothing) {
  for (const Asks asks : {Asks::Penalty, Asks::Saliency, Asks::Twice}) {
    DeepNet whole;
    asked_loss(whole, whole_batch(samples), asks).backward();
    const Gradients expected = named_gradients(*whole);
    for (const auto trigger : kBoth) {
      if (trigger == ShardTrigger::Calls && asks != Asks::Saliency) continue;
      for (const Order order : {Order::OneByOne, Order::ForwardsFirst, Order::MicroBatches}) {
        for (const int ranks : {2, 3}) {
          run_ranks(ranks, [&](World& world) {
            DeepNet net;
            auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
            const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
            for (const int parts : {1, 2}) {
              std::vector<Batch> micro_batches;
              for (int i = 0; i < parts; ++i) micro_batches.push_back(part_of(mine, parts, i));
              step_of(net, *sharded, micro_batches, asks, order);
              EXPECT_LT(slice_difference(*net, expected), parity)
                  << static_cast<int>(asks) << static_cast<int>(order) << (trigger == ShardTrigger::Calls ? ", calls, " : ", operators, ") << ranks << " ranks";
            }
          });
        }
      }
    }
  }
}

/// A step that is given up behind such a pass has had no last backward that finish() would have to follow.
TEST(FullyShardAsked, AStepMayBeGivenUpBehindOne) {
  run_ranks(2, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = ShardTrigger::Operators});
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    sharded->begin_step();
    sharded->before(ActionKind::Forward, {.index = 0, .last = true});
    (void)asked_loss(net, mine, Asks::Saliency);
    EXPECT_NO_THROW(sharded->begin_step());
    DeepNet whole;
    asked_loss(whole, whole_batch(samples), Asks::Saliency).backward();
    step_of(net, *sharded, {mine}, Asks::Saliency, Order::OneByOne);
    EXPECT_LT(slice_difference(*net, named_gradients(*whole)), parity);
  });
}

}  // namespace
}  // namespace tessera
