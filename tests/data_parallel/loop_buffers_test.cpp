#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>

#include "support.h"
#include "tessera/data_parallel/tree_reduction.h"
#include "tessera/nn/sync_batch_norm.h"
#include "tests/data_parallel/plain_loop.h"

/// Buffers in the plain loop: the first rank has the word when a step is complete.
namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

TEST(DdpPlainLoop, BuffersAreRankZerosWhenAStepIsComplete) {
  struct Normed : torch::nn::Module {
    Normed() {
      norm = register_module("norm", torch::nn::BatchNorm1d(5));
      net = register_module("net", std::make_shared<Net>());
    }
    at::Tensor forward(const at::Tensor& x) { return net->forward(norm(x)); }
    torch::nn::BatchNorm1d norm{nullptr};
    std::shared_ptr<Net> net;
  };
  std::vector<at::Tensor> means(3);
  run_ranks(3, [&](World& world) {
    Normed model;
    DistributedDataParallel ddp(model, world.group());
    const auto loss = [&](int64_t step) {
      const Batch mine = part_of(whole_batch(samples, step), 3, world.rank());
      return loss_of(model.forward(mine.x), mine.y, samples);
    };
    const at::Tensor first = loss(0), second = loss(1);  // the second graph lives while the first step ends
    first.backward();
    second.backward();
    means[world.rank()] = model.norm->running_mean.clone();
  });
  EXPECT_GT(means[0].abs().max().item<double>(), 0);
  EXPECT_TRUE(at::equal(means[0], means[1]) && at::equal(means[0], means[2]));
}

/// A mask that grows with the longest sequence that a rank has seen.
struct Masked : torch::nn::Module {
  Masked() {
    net = register_module("net", std::make_shared<Net>());
    register_buffer("table", at::ones({4}));
    register_buffer("mask", at::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x) { return net->forward(x) * named_buffers()["mask"].sum(); }
  void grow(int64_t size) { named_buffers()["mask"].set_data(at::ones({size})); }
  std::shared_ptr<Net> net;
};

TEST(DdpPlainLoop, BuffersOfAnotherSizeOnARankAreRefusedByName) {
  for (const int ranks : {2, 3}) {
    for (const bool find_unused : {false, true}) {
      for (const bool tree : {false, true}) {
        for (const bool by_calls : {false, true}) {
          run_ranks(ranks, [&](World& world) {
            Masked model;
            std::unique_ptr<GradientSynchronizer> wrapped =
                std::make_unique<DistributedDataParallel>(model, world.group(), DdpOptions{.find_unused_parameters = find_unused});
            const TreeReductionOptions options{.num_micro_batches = ranks, .find_unused_parameters = find_unused};
            if (tree) wrapped = std::make_unique<TreeReduction>(model, world.group(), options);
            const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
            const auto step = [&] {
              if (!by_calls) return loss_of(model.forward(mine.x), mine.y, samples).backward();
              wrapped->begin_step();
              wrapped->before_micro_batch({.index = world.rank(), .last = true});
              loss_of(model.forward(mine.x), mine.y, samples).backward();
              wrapped->after_micro_batch({.index = world.rank(), .last = true});
              wrapped->finish();
            };
            for (const int64_t size : {2, 5}) {  // alike on all ranks
              model.grow(size);
              EXPECT_NO_THROW(step());
            }
            if (world.rank() == ranks - 1) model.grow(6);
            const std::string said = refusal(step);
            EXPECT_THAT(said, HasSubstr(std::string("'mask', here [") + (world.rank() == ranks - 1 ? '6' : '5') + "], Float, has another shape"));
            EXPECT_THAT(said, HasSubstr("BufferBroadcast::AtStart or Never"));
          });
        }
      }
    }
  }
}

TEST(DdpPlainLoop, ABufferThatOneRankHasNotIsRefused) {
  run_ranks(2, [&](World& world) {
    Masked model;
    DistributedDataParallel ddp(model, world.group());
    if (world.rank() == 1) model.register_buffer("hidden", at::ones({3}));
    EXPECT_THAT(refusal([&] { model.forward(whole_batch(samples).x).sum().backward(); }),
                HasSubstr(std::string("are ") + (world.rank() == 1 ? '3' : '2') + " on this rank, and not as many on every rank of world"));
  });
}

/// In evaluation a norm's gradient is of its statistics, which a graph holds; those that become rank 0's meanwhile are others to it.
TEST(DdpPlainLoop, StatisticsThatAnEvaluationsGraphHoldsDoNotChangeUnderIt) {
  struct Normed : torch::nn::Module {
    Normed() {
      norm = register_module("norm", torch::nn::BatchNorm1d(5));
      net = register_module("net", std::make_shared<Net>());
    }
    at::Tensor forward(const at::Tensor& x) { return net->forward(norm(x)); }
    torch::nn::BatchNorm1d norm{nullptr};
    std::shared_ptr<Net> net;
  };
  run_ranks(2, [&](World& world) {
    Normed model;
    DistributedDataParallel ddp(model, world.group());
    const Batch mine = part_of(whole_batch(samples), 2, world.rank());
    const at::Tensor training = loss_of(model.forward(mine.x), mine.y, samples);  // from here on statistics are each rank's own
    model.eval();
    const at::Tensor evaluation = loss_of(model.forward(mine.x), mine.y, samples);
    const int64_t before = model.norm->running_mean._version();
    training.backward();
    EXPECT_EQ(model.norm->running_mean._version(), before + world.rank());
    if (world.rank() == 1) {
      const Attachment held = ddp.no_sync();
      EXPECT_THROW(evaluation.backward(), c10::Error);
    }
  });
}

}  // namespace
}  // namespace tessera
