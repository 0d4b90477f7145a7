#include <gmock/gmock.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/nn/net.h"

/// Gradients that are not dense real numbers.
namespace tessera {
namespace {

using namespace testing_support;
using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;

class UnusualGradients : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(PlainLoop, UnusualGradients, ::testing::Values("ddp", "zero1", "zero2", "fsdp"), [](const auto& info) { return info.param; });

std::unique_ptr<GradientSynchronizer> wrap(const std::string& wrapper, torch::nn::Module& module, World& world) {
  if (wrapper == "ddp") return std::make_unique<DistributedDataParallel>(module, world.group());
  if (wrapper == "fsdp") return fully_shard(module, world.group());
  return std::make_unique<ShardedDataParallel>(module, ShardGroups{.shard = world.group()}, ZeroOptions{.stage = wrapper == "zero1" ? 1 : 2});
}

/// A filter in the domain of frequencies, between real numbers.
struct Filter : torch::nn::Module {
  Filter() {
    weights = register_parameter("weights", at::view_as_complex(random_tensor({5, 2}, "weights")));
    register_module("head", head);
    fill_parameters(*head);
  }
  at::Tensor forward(const at::Tensor& x) { return head(at::real(x * weights * weights)); }
  at::Tensor weights;
  torch::nn::Linear head{5, 3};
};

std::unique_ptr<torch::optim::SGD> sgd_of_model(const std::vector<at::Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05));
}

TEST_P(UnusualGradients, ComplexParametersTrainAsInOneProcess) {
  constexpr int steps = 3;
  Filter whole;
  const auto optimizer = sgd_of_model(whole.parameters());
  std::vector<double> norms;
  for (int step = 0; step < steps; ++step) {
    const Batch batch = whole_batch(samples, step);
    optimizer->zero_grad();
    loss_of(whole.forward(batch.x), batch.y, samples).backward();
    double squares = 0;
    for (const at::Tensor& parameter : whole.parameters()) squares += parameter.grad().abs().square().sum().item<double>();
    norms.push_back(std::sqrt(squares));
    EXPECT_NEAR(clip_grad_norm(whole, 0.5).item<double>(), norms.back(), 1e-5 * norms.back());
    optimizer->step();
  }
  for (const int ranks : {2, 3, 5}) {
    run_ranks(ranks, [&](World& world) {
      Filter model;
      const auto wrapper = wrap(GetParam(), model, world);
      auto updates = zero_optimizer(*wrapper, sgd_of_model);
      for (int step = 0; step < steps; ++step) {
        const Batch mine = part_of(whole_batch(samples, step), ranks, world.rank());
        updates.zero_grad();
        loss_of(model.forward(mine.x), mine.y, samples).backward();
        EXPECT_NEAR(clip_grad_norm(*wrapper, 0.5).item<double>(), norms[static_cast<size_t>(step)], 1e-5 * norms[static_cast<size_t>(step)]);
        updates.step();
      }
      if (GetParam() == "fsdp") unshard(model);
      EXPECT_LT((model.weights - whole.weights).abs().max().item<double>(), 1e-5);
      EXPECT_LT(largest_difference(model.head->parameters(), whole.head->parameters()), parity);
    });
  }
}

TEST_P(UnusualGradients, ASparseOneIsRefusedByName) {
  run_ranks(2, [&](World& world) {
    torch::nn::Embedding table(torch::nn::EmbeddingOptions(7, 4).sparse(true));
    fill_parameters(*table);
    const auto wrapper = wrap(GetParam(), *table, world);
    const std::string said = refusal([&] { table->forward(at::arange(3)).sum().backward(); });
    EXPECT_THAT(said, ::testing::AllOf(HasSubstr("'weight'"), HasSubstr("sparse(true)")));
  });
}

}  // namespace
}  // namespace tessera
