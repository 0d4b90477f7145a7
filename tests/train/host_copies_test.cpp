// What is updated on the host has copies there. A program that writes its weights between steps (a clamp, an average that is swapped in, a checkpoint of
// libtorch's) writes the model's parameters, and the copies have to follow, also where what they are copies of are parts of buckets, with counters of their
// own.

#include <filesystem>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include "tessera/checkpoint/torch_optimizer.h"
#include "tessera/comm/testing.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/names.h"
#include "tessera/nn/sharing.h"
#include "tessera/offload/host_gradients.h"
#include "tessera/offload/host_optimizer.h"
#include "tessera/offload/paged_optimizer.h"
#include "tessera/optim/adamw.h"
#include "tessera/zero/zero_optimizer.h"
#include "tests/train/wrapped.h"

namespace tessera {
namespace {

using namespace testing_support;
using comm::run_ranks;
using comm::World;

constexpr int kHostSteps = 4;

std::unique_ptr<optim::Optimizer> adamw_of(const std::vector<nn::NamedParameter>& parameters) {
  return std::make_unique<optim::AdamW>(optim::decay_groups(parameters, "all", 0.1));
}

std::unique_ptr<optim::Optimizer> adamw_on_the_host(const std::vector<nn::NamedParameter>& parameters) {
  return std::make_unique<HostOptimizer>(parameters, at::kCPU, adamw_of);
}

std::unique_ptr<optim::Optimizer> delayed_on_the_host(const std::vector<nn::NamedParameter>& parameters) {
  return std::make_unique<HostOptimizer>(parameters, at::kCPU, adamw_of, HostOptimizer::kPieceBytes, /*delayed=*/true);
}

enum class Writes { InPlace, BySetData };

void write_weights(torch::nn::Module& net, int step, Writes how) {
  if (step != 1) return;
  const c10::NoGradGuard no_grad;
  for (at::Tensor parameter : net.parameters()) {
    if (how == Writes::InPlace) {
      parameter.mul_(0.5).clamp_(-0.2, 0.3);
    } else {
      parameter.set_data(parameter.detach().mul(0.5));
      parameter.set_data(parameter.detach().clamp(-0.2, 0.3));
    }
  }
}

void pass(Net& net, World& world, int step) {
  const Batch batch = part_of(whole_batch(samples, step), world.size(), world.rank());
  loss_of(net.forward(batch.x), batch.y, samples).backward();
}

/// What each rank's model is after steps of the plain loop with weights written between them.
std::vector<std::vector<at::Tensor>> in_the_loop(int ranks, const std::string& technique, Writes how, const auto& make) {
  std::vector<std::vector<at::Tensor>> values(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    Net net;
    const auto wrapper = wrap_by(technique, net, {.shard = world.group()});
    auto optimizer = zero_optimizer(*wrapper, make);
    for (int step = 0; step < kHostSteps; ++step) {
      optimizer.zero_grad();
      pass(net, world, step);
      optimizer.step(1e-2);
      write_weights(net, step, how);
    }
    unshard_all({wrapper.get()});
    values[static_cast<size_t>(world.rank())] = values_of(net);
  });
  return values;
}

/// The same with gradients that go to the host while backward runs.
std::vector<std::vector<at::Tensor>> streamed(int ranks, const std::string& technique, Writes how) {
  std::vector<std::vector<at::Tensor>> values(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](World& world) {
    Net net;
    const auto sums = std::make_shared<HostSums>(at::kCPU, int64_t{1} << 20);
    std::unique_ptr<GradientSynchronizer> inner;
    if (technique == "ddp") {
      inner = std::make_unique<DistributedDataParallel>(net, world.group(), DdpOptions{.sizes = small_buckets, .relay = sums});
    } else {
      inner = std::make_unique<ShardedDataParallel>(net, ShardGroups{.shard = world.group()},
                                                    ZeroOptions{.stage = technique == "zero1" ? 1 : 2, .sizes = small_buckets, .relay = sums});
    }
    const auto updated = inner->updated();
    HostGradients host(std::move(inner), updated, sums);
    const auto optimizer = adamw_of(host.updated());
    for (int step = 0; step < kHostSteps; ++step) {
      const MicroBatchPosition only{.index = world.rank(), .last = true};
      host.begin_step();
      host.before_micro_batch(only);
      pass(net, world, step);
      host.after_micro_batch(only);
      host.finish();
      optimizer->step(1e-2);
      host.after_update();
      write_weights(net, step, how);
    }
    values[static_cast<size_t>(world.rank())] = values_of(net);
  });
  return values;
}

void expect_bits(const std::vector<std::vector<at::Tensor>>& found, const std::vector<std::vector<at::Tensor>>& expected) {
  for (size_t rank = 0; rank < expected.size(); ++rank) EXPECT_TRUE(same_bits(found[rank], expected[rank])) << rank;
}

TEST(HostCopies, FollowWhoWritesTheModelsParameters) {
  for (const int ranks : {1, 2, 3}) {
    for (const std::string& technique : techniques) {
      for (const Writes how : {Writes::InPlace, Writes::BySetData}) {
        SCOPED_TRACE(technique + (how == Writes::BySetData ? " by set_data on " : " on ") + std::to_string(ranks));
        const auto expected = in_the_loop(ranks, technique, how, adamw_of);
        expect_bits(in_the_loop(ranks, technique, how, adamw_on_the_host), expected);
        if (technique != "fsdp") expect_bits(streamed(ranks, technique, how), expected);
      }
    }
  }
}

/// The update of the step before is shown where a program has frozen the parameter since, and on every rank.
TEST(HostCopies, ADelayedUpdateOfWhatWasFrozenSinceIsBroughtTogether) {
  const auto train = [](int ranks, const std::string& technique) {
    std::vector<std::vector<at::Tensor>> values(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](World& world) {
      Net net;
      const auto wrapper = wrap_by(technique, net, {.shard = world.group()});
      auto optimizer = zero_optimizer(*wrapper, delayed_on_the_host);
      for (int step = 0; step < kHostSteps; ++step) {
        net.first->weight.set_requires_grad(step < 2);
        optimizer.zero_grad();
        pass(net, world, step);
        optimizer.step(1e-2);
      }
      unshard_all({wrapper.get()});
      values[static_cast<size_t>(world.rank())] = values_of(net);
    });
    return values;
  };
  const auto alone = train(1, "ddp").front();
  for (const std::string& technique : techniques) {
    for (const int ranks : {2, 3}) {
      for (const auto& values : train(ranks, technique)) EXPECT_LT(largest_difference(values, alone), 10 * parity) << technique << " on " << ranks;
    }
  }
}

/// A step that is left out shows nothing: the update comes in the one behind it.
TEST(HostCopies, ADelayedUpdateOfWhatWasFrozenSinceIsBroughtTogetherBehindASkippedStep) {
  const auto train = [](int ranks, const std::string& technique) {
    std::vector<std::vector<at::Tensor>> values(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](World& world) {
      Net net;
      const auto wrapper = wrap_by(technique, net, {.shard = world.group()});
      auto optimizer = zero_optimizer(*wrapper, delayed_on_the_host);
      for (int step = 0; step < kHostSteps; ++step) {
        net.first->weight.set_requires_grad(step < 2);
        optimizer.zero_grad();
        pass(net, world, step);
        optimizer.step(1e-2, at::full({1}, step == 2 ? 1.0f : 0.0f));
      }
      unshard_all({wrapper.get()});
      values[static_cast<size_t>(world.rank())] = values_of(net);
    });
    return values;
  };
  const auto alone = train(1, "ddp").front();
  for (const std::string& technique : techniques) {
    for (const auto& values : train(2, technique)) EXPECT_LT(largest_difference(values, alone), 10 * parity) << technique;
  }
}

/// Taken up where the parameter is frozen, by another process or in the midst of a run: the first step shows the update that was under way when it was saved.
TEST(HostCopies, ADelayedUpdateThatIsLoadedForWhatIsFrozenByNowIsBroughtTogether) {
  const std::string folder = ::testing::TempDir() + "host_copies_frozen";
  struct Trained {
    std::vector<at::Tensor> saved, values;
  };
  const auto train = [&](int ranks, const std::string& technique, bool running) {
    std::vector<Trained> all(static_cast<size_t>(ranks));
    run_ranks(ranks, [&](World& world) {
      auto& own = all[static_cast<size_t>(world.rank())];
      Net before;
      const auto earlier = wrap_by(technique, before, {.shard = world.group()});
      auto optimizer = zero_optimizer(*earlier, delayed_on_the_host);
      const auto steps = [&](Net& net, auto& making, std::initializer_list<int> numbers) {
        for (const int step : numbers) {
          making.zero_grad();
          pass(net, world, step);
          making.step(1e-2);
        }
      };
      steps(before, optimizer, {0, 1});
      const auto checkpoint = checkpoint::save(folder, 2, before, optimizer.inner(), world.group());
      const auto go_on = [&](Net& net, GradientSynchronizer& wrapper, auto& going_on) {
        checkpoint::load(checkpoint, net, going_on.inner());
        steps(net, going_on, {2, 3});
        unshard_all({&wrapper});
        own.values = values_of(net);
      };
      if (running) {
        steps(before, optimizer, {5, 6});
        before.first->weight.set_requires_grad(false);
        steps(before, optimizer, {7, 8});
        return go_on(before, *earlier, optimizer);
      }
      Net after;
      after.first->weight.set_requires_grad(false);
      const auto later = wrap_by(technique, after, {.shard = world.group()});
      auto resumed = zero_optimizer(*later, delayed_on_the_host);
      go_on(after, *later, resumed);
    });
    std::filesystem::remove_all(folder);
    return all;
  };
  for (const bool running : {false, true}) {
    const auto alone = train(1, "ddp", running).front().values;
    for (const std::string& technique : techniques) {
      for (const int ranks : {2, 3}) {
        SCOPED_TRACE(technique + " on " + std::to_string(ranks) + (running ? ", running" : ""));
        const auto all = train(ranks, technique, running);
        for (const auto& each : all) {
          EXPECT_TRUE(same_bits(each.values, all.front().values)) << "replicas part";
          EXPECT_LT(largest_difference(each.values, alone), 10 * parity);
        }
      }
    }
  }
}

/// Nothing is loaded, so the update that is under way is none of what the program writes then, and nothing overwrites it.
TEST(HostCopies, WhatIsWrittenBehindALoadThatWasRefusedStays) {
  const std::string folder = ::testing::TempDir() + "host_copies_refused";
  const auto step = [](Net& net, optim::Optimizer& optimizer, int number) {
    net.zero_grad();
    const Batch batch = whole_batch(samples, number);
    const at::ScalarType dtype = net.scale.scalar_type();
    loss_of(net.forward(batch.x.to(dtype)), batch.y.to(dtype), samples).backward();
    optimizer.step(1e-2);
  };
  Net wide;
  wide.to(at::kDouble);
  HostOptimizer of_wide(nn::unique_parameters(wide), at::kCPU, adamw_of, HostOptimizer::kPieceBytes, /*delayed=*/true);
  step(wide, of_wide, 0);
  const auto other = checkpoint::save(folder, 1, wide, of_wide, comm::Group::self());
  const auto train = [&](bool loads) {
    Net net;
    HostOptimizer optimizer(nn::unique_parameters(net), at::kCPU, adamw_of, HostOptimizer::kPieceBytes, /*delayed=*/true);
    if (loads) EXPECT_THAT(refusal([&] { checkpoint::load(other, net, optimizer); }), ::testing::HasSubstr("LoadOptions::convert"));
    {
      const c10::NoGradGuard no_grad;
      for (at::Tensor parameter : net.parameters()) parameter.mul_(0.5);
    }
    for (const auto& held : optimizer.state_to_save()) {
      if (held.state == optim::kNextState) EXPECT_TRUE(at::equal(held.tensor, net.named_parameters()[held.parameter].detach())) << held.parameter;
    }
    for (const int number : {0, 1, 2}) step(net, optimizer, number);
    return values_of(net);
  };
  EXPECT_TRUE(same_bits(train(true), train(false)));
  std::filesystem::remove_all(folder);
}

/// What was saved without a delay is where a delayed run goes on from; what was under way when it was loaded is lost.
TEST(HostCopies, ADelayedUpdateGoesOnFromWhatIsLoaded) {
  const std::string folder = ::testing::TempDir() + "host_copies";
  const auto on_one = [](const std::function<void(Net&, optim::Optimizer&)>& use, bool delayed) {
    Net net;
    HostOptimizer optimizer(nn::unique_parameters(net), at::kCPU, adamw_of, HostOptimizer::kPieceBytes, delayed);
    use(net, optimizer);
  };
  const auto step = [](Net& net, optim::Optimizer& optimizer, int number) {
    net.zero_grad();
    const Batch batch = whole_batch(samples, number);
    loss_of(net.forward(batch.x), batch.y, samples).backward();
    optimizer.step(1e-2);
  };
  std::vector<at::Tensor> saved;
  std::filesystem::path checkpoint;
  on_one(
      [&](Net& net, optim::Optimizer& optimizer) {
        for (const int number : {0, 1}) step(net, optimizer, number);
        checkpoint = checkpoint::save(folder, 2, net, optimizer, comm::Group::self());
        saved = values_of(net);
      },
      false);
  on_one(
      [&](Net& net, optim::Optimizer& optimizer) {
        for (const int number : {5, 6, 7}) step(net, optimizer, number);
        checkpoint::load(checkpoint, net, optimizer);
        EXPECT_TRUE(same_bits(values_of(net), saved));
        step(net, optimizer, 2);  // begins an update, and shows none
        EXPECT_TRUE(same_bits(values_of(net), saved));
      },
      true);
  std::filesystem::remove_all(folder);
}

/// HostGradients around a wrapper of that name, in steps that say what they are of.
struct Streamed {
  Streamed(Net& net, World& world, bool zero) : Streamed(net, world.group(), zero) {}
  Streamed(Net& net, const comm::Group& data, bool zero) {
    std::unique_ptr<GradientSynchronizer> inner;
    if (zero) {
      inner = std::make_unique<ShardedDataParallel>(net, ShardGroups{.shard = data}, ZeroOptions{.stage = 2, .relay = sums});
    } else {
      inner = std::make_unique<DistributedDataParallel>(net, data, DdpOptions{.relay = sums});
    }
    const auto updated = inner->updated();
    host = std::make_unique<HostGradients>(std::move(inner), updated, sums);
  }
  void step(Net& net, World& world, int step) {
    const MicroBatchPosition only{.index = world.rank(), .last = true};
    host->begin_step();
    host->before_micro_batch(only);
    pass(net, world, step);
    host->after_micro_batch(only);
    host->finish();
  }
  std::shared_ptr<HostSums> sums = std::make_shared<HostSums>(at::kCPU, int64_t{1} << 20);
  std::unique_ptr<HostGradients> host;
};

/// The model's gradients are those on the host: its norm, and what an optimizer of the model updates.
TEST(HostCopies, TheModelsNormAndUpdateAreThoseOnTheHost) {
  for (const int ranks : {1, 2, 3}) {
    for (const bool zero : {false, true}) {
      for (const bool frozen : {false, true}) {
        run_ranks(ranks, [&](World& world) {
          Net net;
          if (frozen) net.scale.set_requires_grad(false);
          Streamed streamed(net, world, zero);
          streamed.step(net, world, 0);
          const double by_wrapper = clip_grad_norm(*streamed.host, 1e9).item<double>();
          EXPECT_GT(by_wrapper, 0);
          EXPECT_EQ(clip_grad_norm(net, 1e9).item<double>(), by_wrapper);
          const at::Tensor before = net.last->weight.detach().clone();
          auto optimizer = zero_optimizer(net, adamw_of);
          optimizer.step(1e-2);
          EXPECT_FALSE(at::equal(net.last->weight, before)) << ranks << " ranks, zero " << zero;
        });
      }
    }
  }
}

/// Ranks that compute one model together have a term each of its gradients, as norms and biases under sequence parallelism.
TEST(HostCopies, ATermThatIsUnfrozenLaterIsSummed) {
  const auto train = [](World& world, bool zero, bool asks) {
    Net net;
    for (const auto& parameter : nn::unique_parameters(net)) {
      nn::add_sharing(parameter.tensor, {.axis = world.group().name(), .rank = world.rank(), .holders = world.size(), .is_term = true});
    }
    net.scale.set_requires_grad(false);
    Streamed streamed(net, comm::Group::self(), zero);
    const auto updated = streamed.host->updated();
    const auto optimizer = adamw_of(updated);
    for (int step = 0; step < kHostSteps; ++step) {
      net.scale.set_requires_grad(step == 1 || step == 2);
      for (const auto& copy : asks ? streamed.host->updated() : std::vector<nn::NamedParameter>()) {
        EXPECT_EQ(copy.tensor.requires_grad(), nn::updated_for(copy.tensor).requires_grad()) << copy.name;
      }
      streamed.step(net, world, step);
      nn::sum_terms(world.group(), asks ? streamed.host->updated() : updated);
      optimizer->step(1e-2);
      streamed.host->after_update();
    }
    return values_of(net);
  };
  for (const bool zero : {false, true}) {
    for (const bool asks : {false, true}) {
      SCOPED_TRACE(zero);
      std::vector<at::Tensor> alone;
      run_ranks(1, [&](World& world) { alone = train(world, zero, asks); });
      std::vector<std::vector<at::Tensor>> values(2);
      run_ranks(2, [&](World& world) { values[static_cast<size_t>(world.rank())] = train(world, zero, asks); });
      EXPECT_TRUE(same_bits(values[0], values[1]));
      EXPECT_LT(largest_difference(values[0], alone), 10 * parity);
    }
  }
}

/// As a program saves it; what is on its way to a file is one tensor at a time.
TEST(HostCopies, PagedStateIsSavedATensorAtATimeByAProgram) {
  const std::string folder = ::testing::TempDir() + "paged_state";
  MemoryTracker memory;
  const TrackMemory track(memory);
  torch::nn::Sequential net;
  for (int i = 0; i < 8; ++i) net->push_back(torch::nn::Linear(torch::nn::LinearOptions(16, 16).bias(false)));
  constexpr int64_t kOne = 16 * 16 * 4;
  PagedOptimizer paged(nn::unique_parameters(*net), {.place = OffloadPlace::Host, .piece_bytes = kOne}, adamw_of);
  net->forward(at::ones({1, 16})).sum().backward();
  paged.step(1e-2);
  const auto device = [](const MemoryByCategory& bytes) { return bytes[static_cast<size_t>(MemoryCategory::Optimizer)]; };
  const int64_t before = device(memory.current_by_category()), all = memory.current(), on_host = total_of(memory.host_by_category());
  memory.reset_peak();
  const auto saved = checkpoint::save(folder, 1, *net, paged, comm::Group::self());
  EXPECT_EQ(device(memory.current_by_category()), before) << "none has come where it is updated";
  EXPECT_LE(memory.peak() + total_of(memory.host_peak_by_category()), all + on_host + 4 * kOne);
  std::map<std::string, at::Tensor> want;
  for (const auto& held : paged.state()) want[held.parameter + held.state] = held.tensor.clone();
  paged.step(1e-2);
  checkpoint::load(saved, *net, paged);
  for (const auto& held : paged.state()) EXPECT_TRUE(at::equal(held.tensor, want.at(held.parameter + held.state))) << held.parameter << held.state;
  std::filesystem::remove_all(folder);
}

TEST(HostCopies, APlainLoopIsRefusedOnOneRankToo) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](World& world) {
      Net net;
      const Streamed streamed(net, world, /*zero=*/false);
      EXPECT_THROW(pass(net, world, 0), ConfigError) << ranks;
    });
  }
}

/// libtorch's SGD writes behind the version counter: that there was a gradient tells.
TEST(HostCopies, AnUpdateWhoseGradientsWereClearedComesBack) {
  run_ranks(2, [](World& world) {
    Net net;
    Streamed streamed(net, world, /*zero=*/true);
    std::vector<at::Tensor> copies;
    for (const auto& copy : streamed.host->updated()) copies.push_back(copy.tensor);
    torch::optim::SGD sgd(copies, torch::optim::SGDOptions(0.1));
    const at::Tensor before = net.last->weight.detach().clone();
    streamed.step(net, world, 0);
    sgd.step();
    sgd.zero_grad();
    streamed.host->after_update();
    EXPECT_FALSE(at::equal(net.last->weight, before));
  });
}

/// Each optimizer brings its own update back, also behind another's.
TEST(HostCopies, TwoOptimizersUpdateEachItsOwn) {
  run_ranks(2, [](World& world) {
    Net net;
    Streamed streamed(net, world, /*zero=*/true);
    const auto sgd_of = [](bool last) {
      return [last](const std::vector<nn::NamedParameter>& all) {
        std::vector<at::Tensor> own;
        for (const auto& parameter : all) {
          if (parameter.name.starts_with("last") == last) own.push_back(parameter.tensor);
        }
        return std::make_unique<torch::optim::SGD>(own, torch::optim::SGDOptions(0.1));
      };
    };
    auto body = zero_optimizer(*streamed.host, sgd_of(false)), head = zero_optimizer(*streamed.host, sgd_of(true));
    const at::Tensor first = net.first->weight.detach().clone(), last = net.last->weight.detach().clone();
    streamed.step(net, world, 0);
    body.step();
    EXPECT_FALSE(at::equal(net.first->weight, first));
    EXPECT_TRUE(at::equal(net.last->weight, last));
    head.step();
    EXPECT_FALSE(at::equal(net.last->weight, last)) << "not a step later";
  });
}

}  // namespace
}  // namespace tessera
