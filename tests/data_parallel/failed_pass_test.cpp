// A backward pass that fails where ranks use different parameters: reductions that one of them has started and the other has not must not meet the next step's.

#include <stdexcept>

#include <gmock/gmock.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/power_sgd.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

/// Layers of one size, so that a reduction of one could pass for another's.
struct Branching : torch::nn::Module {
  Branching() {
    for (auto* const layer : {&first, &second, &optional, &last}) register_module("layer" + std::to_string(children().size()), *layer);
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    int64_t number = 0;
    for (const at::Tensor& parameter : parameters()) parameter.copy_(at::arange(parameter.numel(), at::kDouble).add(++number).sin().view_as(parameter));
  }

  at::Tensor forward(at::Tensor x, bool branches, bool fails = false) {
    x = at::tanh(first(x));
    if (fails) x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
    x = at::tanh(second(x));
    if (branches) x = x + optional(x);
    return last(x);
  }

  torch::nn::Linear first{6, 6}, second{6, 6}, optional{6, 6}, last{6, 6};
};

at::Tensor rows(int step, int rank) { return at::arange(18, at::kDouble).mul(7 * step + rank + 1).cos().view({3, 6}); }

const DdpOptions kSmallBuckets{.sizes = {.bucket_bytes = 300, .first_bucket_bytes = 64}, .find_unused_parameters = true};

TEST(FailedPass, LeavesNothingToTheNextStep) {
  Branching alone;
  torch::optim::SGD reference(alone.parameters(), 0.1);
  for (const int step : {0, 2}) {
    reference.zero_grad();
    for (const int rank : {0, 1}) alone.forward(rows(step, rank), rank == 0).square().sum().backward();
    reference.step();
  }
  comm::run_ranks(2, [&](comm::World& world) {
    Branching model;
    DistributedDataParallel ddp(model, world.group(), kSmallBuckets);
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const auto pass = [&] { model.forward(rows(step, world.rank()), world.rank() == 0, /*fails=*/step == 1).square().sum().backward(); };
      if (step == 1) {
        EXPECT_THAT(pass, ThrowsMessage<std::runtime_error>(HasSubstr("planned")));
        continue;
      }
      pass();
      optimizer.step();
    }
    const auto want = alone.named_parameters();
    for (const auto& item : model.named_parameters()) EXPECT_LT((item.value() - want[item.key()]).abs().max().item<double>(), 1e-12) << item.key();
  });
}

/// Also of parameters whose gradient had not come when a pass that adds failed.
TEST(FailedPass, LeavesTheGradientsOfThePassBefore) {
  for (const int ranks : {2, 3}) {
    for (const bool all_fail : {true, false}) {
      for (const int64_t bytes : {64, 300, 1 << 20}) {
        comm::run_ranks(ranks, [&](comm::World& world) {
          Branching model;
          DistributedDataParallel ddp(model, world.group(), {.sizes = {.bucket_bytes = bytes, .first_bucket_bytes = bytes}, .find_unused_parameters = true});
          const auto pass = [&](int step, bool fails) { model.forward(rows(step, world.rank()), step == 0, fails).square().sum().backward(); };
          pass(0, false);
          std::vector<at::Tensor> before;
          for (const at::Tensor& parameter : model.parameters()) before.push_back(parameter.grad().clone());
          EXPECT_ANY_THROW(pass(1, all_fail || world.rank() == 1));
          for (size_t i = 0; i < before.size(); ++i) {
            const at::Tensor now = model.parameters()[i].grad();
            ASSERT_TRUE(now.defined()) << i;
            EXPECT_TRUE(at::equal(now, before[i])) << i;
          }
          pass(1, false);                               // adds
          for (size_t i = 0; i < before.size(); ++i) {  // the branch that it does not take has nothing to add
            EXPECT_EQ(at::equal(model.parameters()[i].grad(), before[i]), model.named_parameters().keys()[i].starts_with("layer2.")) << i;
          }
        });
      }
    }
  }
}

/// Terms of a mean in fp16 are divided where they lie, which is no clear of the program's, though they are all zeros.
TEST(FailedPass, LeavesTheGradientsThatAMeanInFp16WouldBeAddedTo) {
  struct Sums : torch::nn::Module {
    Sums() {
      for (const char* const name : {"late", "rank", "zeros"}) register_parameter(name, at::ones({40}, at::kHalf));
    }
    void pass(double of_rank, double of_zeros, bool fails) {  // the last comes first, and begins to cross
      at::Tensor late = parameters()[0] * 1;
      if (fails) late.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("planned"); });
      (late.sum() + (parameters()[1] * of_rank).sum() + (parameters()[2] * of_zeros).sum()).backward();
    }
  };
  for (const int ranks : {2, 3}) {
    for (const bool clears : {false, true}) {
      comm::run_ranks(ranks, [&](comm::World& world) {
        Sums model;
        DistributedDataParallel ddp(model, world.group(), {.sizes = {.bucket_bytes = 16, .first_bucket_bytes = 16}, .average = true});
        for (int step = 0; step < 2; ++step) {  // the second goes by the order of the first
          model.zero_grad();
          model.pass(1, 1, false);
        }
        if (clears) model.zero_grad(/*set_to_none=*/false);
        std::vector<at::Tensor> before;
        for (const at::Tensor& parameter : model.parameters()) before.push_back(parameter.grad().clone());
        EXPECT_THAT([&] { model.pass(world.rank(), 0, true); }, ThrowsMessage<std::runtime_error>(HasSubstr("planned")));
        for (size_t i = 0; i < before.size(); ++i) {
          const at::Tensor now = model.parameters()[i].grad();
          ASSERT_TRUE(now.defined()) << i;
          EXPECT_TRUE(at::equal(now, before[i])) << i;
        }
      });
    }
  }
}

/// And says so to who has not failed.
TEST(FailedPass, IsHeardOfOnOtherRanks) {
  comm::run_ranks(2, [&](comm::World& world) {
    Branching model;
    DistributedDataParallel ddp(model, world.group(), kSmallBuckets);
    const auto pass = [&](int step, bool fails) { model.forward(rows(step, world.rank()), world.rank() == 0, fails).square().sum().backward(); };
    if (world.rank() == 0) {
      EXPECT_THAT([&] { pass(0, true); }, ThrowsMessage<std::runtime_error>(HasSubstr("planned")));
    } else {
      EXPECT_THAT([&] { pass(0, false); }, ThrowsMessage<Error>(HasSubstr("the backward pass of another rank ended by an exception")));
    }
    for (const at::Tensor& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
    pass(1, false);
    for (const at::Tensor& parameter : model.parameters()) EXPECT_TRUE(parameter.grad().defined());
  });
}

/// Ranks that have begun unlike numbers of steps begin to compress in the same one.
TEST(FailedPass, IsNoStepOfPowerSgd) {
  for (const int fails : {0, 1}) {
    comm::run_ranks(2, [&](comm::World& world) {
      Branching model;
      const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 2, .min_compression = 0});
      DistributedDataParallel ddp(model, world.group(), {.find_unused_parameters = true, .hook = hook});
      const auto pass = [&](int step, bool stops) { model.forward(rows(step, world.rank()), true, stops).square().sum().backward(); };
      const auto is_compressed = [&] {  // what is owed says so
        return std::ranges::any_of(hook->state(),
                                   [](const HookTensor& held) { return held.name.starts_with("powersgd.error") && held.tensor.any().item<bool>(); });
      };
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        const bool drops = step == 1 && world.rank() >= fails;  // one rank, or all
        {
          const Attachment local = ddp.no_sync();
          if (drops) EXPECT_ANY_THROW(pass(10 + step, true));
          pass(10 + step, false);
        }
        pass(step, false);
        EXPECT_EQ(is_compressed(), step == 2) << "step " << step;
      }
    });
  }
}

}  // namespace
}  // namespace tessera
