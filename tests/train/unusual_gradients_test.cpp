#include <gmock/gmock.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include "tessera/comm/testing.h"
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/fsdp/fully_shard.h"
#include "tessera/optim/clip_grad_norm.h"
#include "tessera/zero/sharded_data_parallel.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/nn/net.h"
#include "tests/train/wrapped.h"

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

/// A sum with a gradient for the first of its terms alone, as libtorch's double backward of a convolution of no samples leaves some out.
struct FirstAlone : torch::autograd::Function<FirstAlone> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& a, const at::Tensor& b) { return a + b; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list gradients) {
    return {gradients.at(0), at::Tensor()};
  }
};

struct Shifted : torch::nn::Module {
  Shifted() {
    register_module("layer", layer);
    shift = register_parameter("shift", at::ones({4, 3}));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x, bool with_gradient) {
    const at::Tensor h = at::tanh(layer(x)).unsqueeze(1).expand({-1, 4, -1});
    return with_gradient ? h + shift : FirstAlone::apply(h + 0 * shift.detach(), shift);
  }
  torch::nn::Linear layer{5, 3};
  at::Tensor shift;
};

/// One pass alone, which leaves the parameter without a gradient, and one that adds to the step before.
TEST_P(UnusualGradients, AFunctionMayHaveNoneForAParameter) {
  const auto train = [](Shifted& model, const Batch& mine, bool adds, auto& optimizer) {
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      if (adds) model.forward(mine.x, /*with_gradient=*/true).square().sum().backward();
      model.forward(mine.x, /*with_gradient=*/false).square().sum().backward();
      optimizer.step();
    }
  };
  for (const bool adds : {false, true}) {
    Shifted whole;
    const auto optimizer = sgd_of_model(whole.parameters());
    train(whole, whole_batch(samples), adds, *optimizer);
    run_ranks(2, [&](World& world) {
      Shifted model;
      const auto wrapper = wrap_by(GetParam(), model, {.shard = world.group()}, {.unused = true});
      auto updates = zero_optimizer(*wrapper, sgd_of_model);
      train(model, part_of(whole_batch(samples), 2, world.rank()), adds, updates);
      unshard_all({wrapper.get()});
      EXPECT_LT(largest_difference(values_of(model), values_of(whole)), parity) << adds;
    });
  }
  run_ranks(2, [&](World& world) {
    Shifted model;
    const auto wrapper = wrap(GetParam(), model, world);
    EXPECT_THAT(refusal([&] { model.forward(whole_batch(samples).x, /*with_gradient=*/false).sum().backward(); }),
                ::testing::AllOf(HasSubstr("'shift'"), HasSubstr("find_unused_parameters")));
  });
}

/// As plain libtorch, which accumulates nothing for it.
TEST_P(UnusualGradients, AParameterMayBeFrozenBetweenForwardAndBackward) {
  const auto train = [](Net& net, const Batch& mine, auto& optimizer) {
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      const at::Tensor loss = loss_of(net.forward(mine.x), mine.y, samples);
      for (const at::Tensor& parameter : net.middle->parameters()) parameter.set_requires_grad(step != 1);
      loss.backward();
      optimizer.step();
      for (const at::Tensor& parameter : net.middle->parameters()) parameter.set_requires_grad(true);
    }
  };
  Net whole;
  const auto optimizer = sgd_of_model(whole.parameters());
  train(whole, whole_batch(samples), *optimizer);
  for (const bool unused : {false, true}) {
    run_ranks(2, [&](World& world) {
      Net model;
      const auto wrapper = wrap_by(GetParam(), model, {.shard = world.group()}, {.unused = unused});
      auto updates = zero_optimizer(*wrapper, sgd_of_model);
      train(model, part_of(whole_batch(samples), 2, world.rank()), updates);
      unshard_all({wrapper.get()});
      EXPECT_LT(largest_difference(values_of(model), values_of(whole)), parity);
    });
  }
}

}  // namespace
}  // namespace tessera
