#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <vector>

#include "support.h"
#include "tests/nn/plain_loop.h"

/// zero_grad, forward, backward, step: the loop of a program on one device, unchanged.
namespace tessera::testing_support {

using comm::run_ranks;
using comm::World;

inline std::unique_ptr<GradientSynchronizer> make_ddp(torch::nn::Module& module, const comm::Group& group) {
  return std::make_unique<DistributedDataParallel>(module, group, DdpOptions{.sizes = small_buckets});
}

/// A program that trains with whatever wraps its model: `mine` is this rank's part of a batch.
struct Program {
  std::function<void(Net&, GradientSynchronizer*, torch::optim::Optimizer&, const std::function<Batch(int64_t)>& mine)> train;
  MakeOptimizer make_optimizer = make_sgd;
};

/// Runs it on one process without a wrapper, and on ranks with one; holds the weights and the gradients it leaves against each other.
inline void expect_parity(const Program& program, std::initializer_list<int> sizes = {1, 2, 3}) {
  Net reference;
  const auto optimizer = program.make_optimizer(reference.parameters());
  program.train(reference, nullptr, *optimizer, [](int64_t step) { return whole_batch(samples, step); });
  for (const int ranks : sizes) {
    std::vector<std::vector<at::Tensor>> weights(ranks);
    run_ranks(ranks, [&](World& world) {
      Net net;
      const auto ddp = make_ddp(net, world.group());
      const auto optimizer = program.make_optimizer(net.parameters());
      program.train(net, ddp.get(), *optimizer, [&](int64_t step) { return part_of(whole_batch(samples, step), ranks, world.rank()); });
      EXPECT_LT(largest_difference(gradients_of(net), gradients_of(reference)), 10 * parity) << ranks << " ranks";  // after steps that differ by rounding
      weights[world.rank()] = weights_of(net);
    });
    for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(same_bits(weights[rank], weights[0])) << "rank " << rank << " of " << ranks;
    EXPECT_LT(largest_difference(weights[0], weights_of(reference)), 10 * parity) << ranks << " ranks";
  }
}

}  // namespace tessera::testing_support
