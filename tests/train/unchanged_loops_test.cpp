// What loops of libtorch programs do besides zero_grad, forward, backward and step, under each wrapper against one process: autocast, data loaders, schedulers,
// averages of weights, gradients that are scaled by hand, loops that are left in the midst of an accumulation, compressed reductions, two optimizers.

#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/map.h>
#include <torch/data/datasets/tensor.h>
#include <torch/data/samplers/distributed.h>
#include <torch/data/transforms/stack.h>
#include <torch/optim/adam.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>
#include <unistd.h>

#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/testing.h"
#include "tessera/data_parallel/power_sgd.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/nn/collect.h"
#include "tests/train/wrapped.h"

namespace tessera {
namespace {

using namespace testing_support;
using comm::run_ranks;
using comm::World;

/// What a program is written against, of one process or of many.
struct LoopOf {
  Net& net;
  torch::optim::Optimizer& optimizer;  ///< for schedulers
  std::function<void()> zero_grad, step;
  std::function<std::vector<nn::NamedParameter>()> updated;
  std::function<Attachment()> no_sync = [] { return Attachment(); };
  std::function<Batch(int64_t step)> mine;
  std::function<void(const nn::NamedParameter&, const at::Tensor&)> show = {};  ///< puts a result aside that lies over a parameter

  at::Tensor loss(int64_t step) const {
    const Batch batch = mine(step);
    return loss_of(net.forward(batch.x), batch.y, samples);
  }
};

using LoopProgram = std::function<void(const LoopOf&)>;

std::unique_ptr<torch::optim::Optimizer> sgd_in_loop(const std::vector<at::Tensor>& parts) {
  return std::make_unique<torch::optim::SGD>(parts, torch::optim::SGDOptions(0.05).momentum(0.9));
}

using NamedTensors = std::map<std::string, at::Tensor>;

NamedTensors on_one(const LoopProgram& program) {
  Net net;
  const auto optimizer = sgd_in_loop(net.parameters());
  NamedTensors shown;
  program({.net = net,
           .optimizer = *optimizer,
           .zero_grad = [&] { optimizer->zero_grad(); },
           .step = [&] { optimizer->step(); },
           .updated = [&] { return nn::unique_parameters(net); },
           .mine = [](int64_t step) { return whole_batch(samples, step); },
           .show = [&](const auto& parameter, const at::Tensor& value) { shown["shown." + parameter.name] = value.detach().clone(); }});
  for (const auto& parameter : nn::unique_parameters(net)) shown[parameter.name] = parameter.tensor.detach().clone();
  return shown;
}

NamedTensors on_ranks(int ranks, const std::string& technique, const LoopProgram& program) {
  SliceCollector collected;
  run_ranks(ranks, [&](World& world) {
    Net net;
    const auto wrapper = wrap_by(technique, net, halves_of(technique, world));
    auto optimizer = zero_optimizer(*wrapper, sgd_in_loop);
    program({.net = net,
             .optimizer = optimizer.inner(),
             .zero_grad = [&] { optimizer.zero_grad(); },
             .step = [&] { optimizer.step(); },
             .updated = [&] { return wrapper->updated(); },
             .no_sync = [&] { return wrapper->no_sync(); },
             .mine = [&](int64_t step) { return part_of(whole_batch(samples, step), world.size(), world.rank()); },
             .show = [&](const auto& parameter, const at::Tensor& value) { collected.add("shown." + parameter.name, value, nn::slice_of(parameter.tensor)); }});
    collected.add_values(wrapper->updated());
  });
  return collected.whole();
}

void expect_same(const NamedTensors& found, const NamedTensors& expected, double bound) {
  EXPECT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(found.contains(name)) << name;
    EXPECT_LT(largest_difference({found.at(name)}, {tensor}), bound) << name;
  }
}

class UnchangedLoops : public ::testing::TestWithParam<std::string> {
 protected:
  static void expect_one_processs(const LoopProgram& program) {
    const auto expected = on_one(program);
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(ranks);
      expect_same(on_ranks(ranks, GetParam(), program), expected, 10 * parity);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(PlainLoop, UnchangedLoops, ::testing::ValuesIn(techniques), [](const auto& info) { return info.param; });

TEST_P(UnchangedLoops, ASchedulerOfLibtorchs) {
  expect_one_processs([](const LoopOf& loop) {
    torch::optim::StepLR schedule(loop.optimizer, 1, 0.5);
    for (int step = 0; step < 4; ++step) {
      loop.zero_grad();
      loop.loss(step).backward();
      loop.step();
      schedule.step();
    }
  });
}

TEST_P(UnchangedLoops, AnAverageOfTheWeights) {
  expect_one_processs([](const LoopOf& loop) {
    std::vector<at::Tensor> averages;
    for (const auto& parameter : loop.updated()) averages.push_back(parameter.tensor.detach().clone());
    for (int step = 0; step < 3; ++step) {
      loop.zero_grad();
      loop.loss(step).backward();
      loop.step();
      const at::NoGradGuard no_grad;
      const auto updated = loop.updated();
      for (size_t i = 0; i < updated.size(); ++i) averages[i].mul_(0.9).add_(updated[i].tensor, 0.1);
    }
    const auto updated = loop.updated();
    for (size_t i = 0; i < updated.size(); ++i) loop.show(updated[i], averages[i]);
  });
}

TEST_P(UnchangedLoops, GradientsThatAreScaledByHand) {
  expect_one_processs([](const LoopOf& loop) {
    for (int step = 0; step < 3; ++step) {
      loop.zero_grad();
      {
        const auto held = loop.no_sync();
        (loop.loss(2 * step) * 1024).backward();
      }
      (loop.loss(2 * step + 1) * 1024).backward();
      const at::NoGradGuard no_grad;
      bool finite = true;
      for (const auto& parameter : loop.updated()) finite = finite && at::isfinite(parameter.tensor.grad()).all().item<bool>();
      EXPECT_TRUE(finite);
      for (const auto& parameter : loop.updated()) parameter.tensor.mutable_grad().div_(1024);
      loop.step();
    }
  });
}

/// An epoch that ends in the midst of an accumulation: what it left is given up, or the next one adds to it.
TEST_P(UnchangedLoops, AnAccumulationThatIsLeft) {
  for (const bool gives_up : {true, false}) {
    expect_one_processs([&](const LoopOf& loop) {
      loop.zero_grad();
      for (int epoch = 0; epoch < 3; ++epoch) {
        for (int batch = 0; batch < 5; ++batch) {
          const bool last = batch % 2 == 1;
          {
            const auto held = last ? Attachment() : loop.no_sync();
            loop.loss(5 * epoch + batch).backward();
          }
          if (!last) continue;
          loop.step();
          loop.zero_grad();
        }
        if (gives_up) loop.zero_grad();
      }
    });
  }
}

TEST_P(UnchangedLoops, EvaluationWithinAnAccumulation) {
  expect_one_processs([](const LoopOf& loop) {
    for (int step = 0; step < 3; ++step) {
      loop.zero_grad();
      for (int pass = 0; pass < 3; ++pass) {
        const auto held = pass < 2 ? loop.no_sync() : Attachment();
        loop.loss(3 * step + pass).backward();
        loop.net.eval();
        {
          const at::NoGradGuard no_grad;
          loop.loss(step);
        }
        loop.net.train();
      }
      loop.step();
    }
  });
}

TEST_P(UnchangedLoops, ASecondBackwardOverOneGraph) {
  expect_one_processs([](const LoopOf& loop) {
    for (int step = 0; step < 3; ++step) {
      loop.zero_grad();
      const at::Tensor loss = loop.loss(step);
      loss.backward({}, /*retain_graph=*/true);
      if (step == 1) loop.zero_grad();
      loss.backward();
      loop.step();
    }
  });
}

/// While it lives, products are in bf16; casts of weights are forgotten at its end, as torch.autocast does.
class Autocast {
 public:
  Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::increment_nesting();
  }
  ~Autocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
};

/// A rank's gradients are rounded for its own samples, so one process takes the ranks' parts one after the other. In a second step a weight that differs in its
/// last bit may be another number in bf16; a cast that is stale would be off by a learning rate.
TEST_P(UnchangedLoops, Autocast) {
  const auto loss_under_autocast = [](Net& net, const Batch& batch) {
    const Autocast autocast;
    return loss_of(net.forward(batch.x).to(at::kFloat), batch.y, samples);
  };
  for (const int ranks : {2, 4}) {
    for (const int steps : {1, 2}) {
      SCOPED_TRACE(std::to_string(ranks) + " ranks, " + std::to_string(steps) + " steps");
      Net whole;
      const auto optimizer = sgd_in_loop(whole.parameters());
      for (int step = 0; step < steps; ++step) {
        optimizer->zero_grad();
        for (int rank = 0; rank < ranks; ++rank) loss_under_autocast(whole, part_of(whole_batch(samples, step), ranks, rank)).backward();
        optimizer->step();
      }
      NamedTensors expected;
      for (const auto& parameter : nn::unique_parameters(whole)) expected[parameter.name] = parameter.tensor.detach();
      const auto found = on_ranks(ranks, GetParam(), [&](const LoopOf& loop) {
        for (int step = 0; step < steps; ++step) {
          loop.zero_grad();
          loss_under_autocast(loop.net, loop.mine(step)).backward();
          loop.step();
        }
      });
      expect_same(found, expected, steps == 1 ? 10 * parity : 1e-3);
    }
  }
}

TEST_P(UnchangedLoops, ADataLoaderThatDealsSamples) {
  constexpr size_t rows = 11, batch = 2;
  const auto data = [] { return torch::data::datasets::TensorDataset(whole_batch(rows).x).map(torch::data::transforms::Stack<torch::data::TensorExample>()); };
  const auto rows_of = [&](size_t ranks, size_t rank) {
    std::vector<std::vector<at::Tensor>> epochs;
    torch::data::samplers::DistributedRandomSampler sampler(rows, ranks, rank);
    for (size_t epoch = 0; epoch < 2; ++epoch) {
      sampler.set_epoch(epoch);
      auto& batches = epochs.emplace_back();
      const auto loader = torch::data::make_data_loader(data(), sampler, torch::data::DataLoaderOptions().batch_size(batch).workers(rank % 2));
      for (const auto& example : *loader) batches.push_back(example.data);
    }
    return epochs;
  };
  const auto mean = [](Net& net, const at::Tensor& x) { return net.forward(x).square().mean(); };
  constexpr int ranks = 2;
  Net whole;
  const auto optimizer = sgd_in_loop(whole.parameters());
  const auto first = rows_of(ranks, 0), second = rows_of(ranks, 1);
  for (size_t epoch = 0; epoch < 2; ++epoch) {
    ASSERT_EQ(first[epoch].size(), second[epoch].size());
    for (size_t i = 0; i < first[epoch].size(); ++i) {
      optimizer->zero_grad();
      ((mean(whole, first[epoch][i]) + mean(whole, second[epoch][i])) / ranks).backward();
      optimizer->step();
    }
  }
  SliceCollector collected;
  run_ranks(ranks, [&](World& world) {
    Net net;
    const auto wrapper = wrap_by(GetParam(), net, {.shard = world.group()}, {.average = true});
    auto parts = zero_optimizer(*wrapper, sgd_in_loop);
    torch::data::samplers::DistributedRandomSampler sampler(rows, ranks, static_cast<size_t>(world.rank()));
    for (size_t epoch = 0; epoch < 2; ++epoch) {
      sampler.set_epoch(epoch);
      const auto loader = torch::data::make_data_loader(data(), sampler, torch::data::DataLoaderOptions().batch_size(batch).workers(1));
      for (const auto& example : *loader) {
        parts.zero_grad();
        mean(net, example.data).backward();
        parts.step();
      }
    }
    collected.add_values(wrapper->updated());
  });
  NamedTensors expected;
  for (const auto& parameter : nn::unique_parameters(whole)) expected[parameter.name] = parameter.tensor.detach();
  expect_same(collected.whole(), expected, 10 * parity);
}

/// Two optimizers over one model, saved together and loaded in another layout, go on as one process does.
TEST_P(UnchangedLoops, TwoOptimizersInOneCheckpoint) {
  const auto folder = std::filesystem::temp_directory_path() / ("tessera-two-optimizers-" + std::to_string(getpid()) + "-" + GetParam());
  struct Both {
    torch::optim::Adam first;
    torch::optim::SGD second;
    explicit Both(const std::vector<nn::NamedParameter>& updated)
        : first(some(updated, true), torch::optim::AdamOptions(1e-2)), second(some(updated, false), torch::optim::SGDOptions(0.05).momentum(0.9)) {}
    static std::vector<at::Tensor> some(const std::vector<nn::NamedParameter>& updated, bool matrices) {
      std::vector<at::Tensor> tensors;
      for (const auto& parameter : updated) {
        if ((nn::slice_of(parameter.tensor).shape.size() > 1) == matrices) tensors.push_back(parameter.tensor);
      }
      return tensors;
    }
  };
  const auto train = [](Net& net, Both& both, int ranks, int rank, int64_t from, const std::function<void()>& clear, const std::function<void()>& updated) {
    for (int64_t step = from; step < from + 2; ++step) {
      clear();
      backward(net, part_of(whole_batch(samples, step), ranks, rank));
      both.first.step();
      both.second.step();
      updated();
    }
  };
  Net whole;
  Both reference(nn::unique_parameters(whole));
  train(whole, reference, 1, 0, 0, [&] { whole.zero_grad(); }, [] {});
  train(whole, reference, 1, 0, 2, [&] { whole.zero_grad(); }, [] {});
  SliceCollector collected;
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](World& world) {
      Net net;
      const auto wrapper = wrap_by(GetParam(), net, {.shard = world.group()});
      Both both(wrapper->updated());
      const auto steps_from = [&](int64_t from) {
        train(net, both, ranks, world.rank(), from, [&] { wrapper->clear_gradients(); }, [&] { wrapper->after_update(); });
      };
      if (ranks == 2) {
        steps_from(0);
        checkpoint::save(folder, 2, net, {both.first, both.second}, world.group());
        return;
      }
      const auto saved = folder / "step-00000002";
      EXPECT_THAT(refusal([&] { checkpoint::load(saved, net, both.first); }), ::testing::HasSubstr("the checkpoint's optimizer is adam+sgd"));
      EXPECT_THAT(refusal([&] { checkpoint::load(saved, net, {both.second, both.first}); }), ::testing::HasSubstr("and this one is sgd+adam"));
      checkpoint::load(saved, net, {both.first, both.second});
      steps_from(2);
      collected.add_values(wrapper->updated());
    });
  }
  std::filesystem::remove_all(folder);
  NamedTensors expected;
  for (const auto& parameter : nn::unique_parameters(whole)) expected[parameter.name] = parameter.tensor.detach();
  expect_same(collected.whole(), expected, 100 * parity);  // Adam makes a step of what a rounding is
}

/// Compressed sums differ from exact ones; the plain loop makes of them what an engine's calls do, to the bit, accumulation included.
TEST(PowerSgdInThePlainLoop, IsThatOfTheExplicitCalls) {
  for (const int passes : {1, 2}) {
    std::vector<std::vector<at::Tensor>> values(6);
    for (const bool plain : {true, false}) {
      run_ranks(3, [&](World& world) {
        Net net;
        const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 1, .min_compression = 1});
        DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = hook});
        const auto optimizer = sgd_in_loop(net.parameters());
        for (int step = 0; step < 5; ++step) {
          const Batch mine = part_of(whole_batch(samples, step), 3, world.rank());
          if (plain) optimizer->zero_grad();
          if (!plain) ddp.begin_step();
          for (int pass = 0; pass < passes; ++pass) {
            const bool last = pass + 1 == passes;
            const auto held = plain && !last ? ddp.no_sync() : Attachment();
            if (!plain) ddp.before_micro_batch({.index = pass, .last = last});
            backward(net, part_of(mine, passes, pass));
            if (!plain) ddp.after_micro_batch({.index = pass, .last = last});
          }
          if (!plain) ddp.finish();
          optimizer->step();
          ddp.after_update();
        }
        values[static_cast<size_t>(world.rank() + (plain ? 0 : 3))] = values_of(net);
      });
    }
    for (const auto& other : values) EXPECT_TRUE(same_bits(other, values.front())) << passes;
  }
}

}  // namespace
}  // namespace tessera
