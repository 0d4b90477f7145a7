#pragma once

#include <functional>
#include <vector>

#include <torch/csrc/autograd/autograd.h>

#include "tessera/nn/attach.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/nn/plain_loop.h"
#include "tests/zero/support.h"

/// zero_grad, forward, backward, step: the loop of a program on one device, with an optimizer made by zero_optimizer.
namespace tessera::testing_support {

using Torch = torch::optim::Optimizer;

/// What a program is written against, with a wrapper and without.
struct Loop {
  std::function<void()> zero_grad, step;
  std::function<Attachment()> no_sync = [] { return Attachment(); };
  std::function<Batch(int64_t step)> mine;
};

struct Layout {
  int ranks, replicas;
};

/// Runs a program on one process, and under every way of ShardedDataParallel; holds the weights against each other.
inline void expect_parity(const std::function<void(Net&, const Loop&)>& train, const MakeOptimizer& make = make_sgd,
                          const std::function<void(Net&)>& prepare = {}) {
  Net reference;
  if (prepare) prepare(reference);
  const auto optimizer = make(reference.parameters());
  train(reference,
        {.zero_grad = [&] { optimizer->zero_grad(); }, .step = [&] { optimizer->step(); }, .mine = [](int64_t step) { return whole_batch(samples, step); }});
  for (const auto& [ranks, replicas] : {Layout{1, 1}, Layout{2, 1}, Layout{3, 1}, Layout{4, 2}}) {
    for (const Way& way : ways) {
      std::vector<std::vector<at::Tensor>> weights(ranks);
      run_ranks(ranks, [&, ranks = ranks, replicas = replicas](World& world) {
        Net net;
        if (prepare) prepare(net);
        ShardedDataParallel zero(net, groups_of(world, replicas), options_of(way));
        auto optimizer = zero_optimizer(zero, make);
        train(net, {.zero_grad = [&] { optimizer.zero_grad(); },
                    .step = [&] { optimizer.step(); },
                    .no_sync = [&] { return zero.no_sync(); },
                    .mine = [&](int64_t step) { return part_of(whole_batch(samples, step), ranks, world.rank()); }});
        weights[world.rank()] = weights_of(net);
        for (const at::Tensor& parameter : net.parameters()) at::Tensor(parameter).requires_grad_(false);  // before its destruction
      });
      for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(same_bits(weights[rank], weights[0])) << "rank " << rank << " of " << ranks;
      EXPECT_LT(largest_difference(weights[0], weights_of(reference)), 10 * parity) << ranks << " ranks, stage " << way.stage;
    }
  }
}

inline void set_trained(Net& net, bool first, bool last) {
  for (const at::Tensor& parameter : net.first->parameters()) at::Tensor(parameter).requires_grad_(first);
  for (const at::Tensor& parameter : net.last->parameters()) at::Tensor(parameter).requires_grad_(last);
}

inline std::vector<at::Tensor> local_gradients(Net& net, const Batch& mine) {
  return torch::autograd::grad({loss_of(net.forward(mine.x), mine.y, samples)}, net.parameters());
}

}  // namespace tessera::testing_support
