#include "tessera/data_parallel/power_sgd.h"

#include <limits>

#include <gmock/gmock.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/core/rng.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/meta.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

/// What is carried under "powersgd.<kind>.<parameter>"; undefined where nothing is.
at::Tensor carried(const PowerSgd& hook, const std::string& kind, const std::string& parameter) {
  for (const HookTensor& held : hook.state()) {
    if (held.name == "powersgd." + kind + "." + parameter) return held.tensor;
  }
  return {};
}

/// Errors of all parameters of `net`, summed over ranks, in the order of registration; zeros where a parameter is not compressed.
std::vector<at::Tensor> total_errors(const torch::nn::Module& net, const PowerSgd& hook, const comm::Group& group) {
  std::vector<at::Tensor> errors;
  for (const auto& item : net.named_parameters()) {
    const at::Tensor error = carried(hook, "error", item.key());
    errors.push_back(error.defined() ? error.clone() : at::zeros_like(item.value()).detach());
    comm::all_reduce(group, errors.back());
  }
  return errors;
}

class PowerSgdWorlds : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Worlds, PowerSgdWorlds, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(PowerSgdWorlds, OfFullRankEqualsThePlainSum) {
  const int ranks = GetParam();
  constexpr int steps = 3;
  const auto expected = one_process(steps);
  std::vector<std::vector<at::Tensor>> last(ranks);
  run_ranks(ranks, [&](World& world) {
    Net net;
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 7, .start = 1, .min_compression = 0});
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = hook});
    for (int step = 0; step < steps; ++step) {
      run_step(net, ddp, part_of(whole_batch(samples, step), ranks, world.rank()));
      EXPECT_LT(largest_difference(gradients_of(net), expected[step]), parity) << "step " << step;
      last[world.rank()] = gradients_of(net);
      sgd(net, 0.05);
    }
  });
  for (int rank = 1; rank < ranks; ++rank) EXPECT_TRUE(same_bits(last[rank], last[0]));
}

TEST_P(PowerSgdWorlds, AccumulationEqualsOneBackward) {
  const int ranks = GetParam();
  std::vector<at::Tensor> at_once, accumulated;
  for (const bool accumulate : {false, true}) {
    run_ranks(ranks, [&](World& world) {
      Net net;
      DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 0})});
      const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
      const int passes = accumulate ? static_cast<int>(mine.x.size(0)) : 1;
      ddp.begin_step();
      for (int pass = 0; pass < passes; ++pass) {
        const Attachment local = pass + 1 < passes ? ddp.no_sync() : Attachment();
        backward(net, part_of(mine, passes, pass));
      }
      ddp.finish();
      if (world.rank() == 0) (accumulate ? accumulated : at_once) = gradients_of(net);
    });
  }
  EXPECT_LT(largest_difference(accumulated, at_once), 10 * parity);
}

/// After `steps` steps at rank 1 on the same model: the sum of what was applied, the sum of the true gradients, and what is still owed.
struct Account {
  std::vector<at::Tensor> applied, owed;
};

Account account_of(int ranks, int steps, bool forget_errors) {
  Account account;
  run_ranks(ranks, [&](World& world) {
    Net net;
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 0});
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = hook});
    std::vector<at::Tensor> applied;
    for (int step = 0; step < steps; ++step) {
      run_step(net, ddp, part_of(whole_batch(samples), ranks, world.rank()));
      const auto now = gradients_of(net);
      if (applied.empty()) {
        applied = now;
      } else {
        for (size_t i = 0; i < now.size(); ++i) applied[i].add_(now[i]);
      }
      if (!forget_errors) continue;
      for (const HookTensor& held : hook->state()) {
        if (held.across != HookTensor::Across::Equal) held.tensor.zero_();
      }
    }
    const auto owed = total_errors(net, *hook, world.group());
    if (world.rank() == 0) account = {applied, owed};
  });
  return account;
}

/// What is owed is in the unit of the scale, which stays. A step whose gradients overflow leaves it as it was.
TEST_P(PowerSgdWorlds, AFixedLossScaleChangesNoBit) {
  const int ranks = GetParam();
  const auto train = [&](float scale, int overflows_at) {
    std::vector<at::Tensor> seen;
    run_ranks(ranks, [&](World& world) {
      Net net;
      const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 1});
      DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = hook});
      for (int step = 0; step < 6; ++step) {
        const bool overflows = step == overflows_at;
        if (step == 3 && overflows_at != 3) continue;  // the run without that step
        const Batch mine = part_of(whole_batch(samples, step), ranks, world.rank());
        ddp.begin_step();
        (loss_of(net.forward(mine.x), mine.y, samples) * (overflows ? std::numeric_limits<float>::infinity() : scale)).backward();
        ddp.finish();
        if (overflows) continue;
        const at::NoGradGuard no_grad;
        for (const at::Tensor& parameter : net.parameters()) parameter.mutable_grad().div_(scale);
        if (world.rank() == 0) {
          for (const at::Tensor& gradient : gradients_of(net)) seen.push_back(gradient);
        }
        sgd(net, 0.05);
      }
    });
    return seen;
  };
  const auto plain = train(1, -1);
  EXPECT_TRUE(same_bits(train(1024, -1), plain));
  EXPECT_TRUE(same_bits(train(1024, 3), plain)) << "with a step that is skipped";
}

TEST_P(PowerSgdWorlds, WhatIsAppliedAndWhatIsOwedAddUpToTheTrueGradients) {
  const int ranks = GetParam();
  constexpr int steps = 12;
  Account account = account_of(ranks, steps, /*forget_errors=*/false);
  auto expected = one_process(1)[0];
  for (size_t i = 0; i < expected.size(); ++i) {
    const double gradient = expected[i].norm().item<double>();
    if (ranks > 1) EXPECT_LT(account.owed[i].norm().item<double>(), 6 * gradient) << "a residual that grows, tensor " << i;
    account.applied[i].add_(account.owed[i]);
    expected[i].mul_(steps);
  }
  EXPECT_LT(largest_difference(account.applied, expected), parity);
}

TEST(PowerSgd, AHookOfAnotherWrapperIsRefusedByName) {
  run_ranks(2, [](World& world) {
    Net net;
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .min_compression = 0});
    {
      DistributedDataParallel ddp(net, world.group(), {.hook = hook});
    }
    EXPECT_THAT(refusal([&] { DistributedDataParallel again(net, world.group(), {.hook = hook}); }),
                ::testing::AllOf(HasSubstr("'last.weight'"), HasSubstr("make one for each")));
  });
}

TEST(PowerSgd, TheAccountSeesErrorsThatAreForgotten) {
  constexpr int steps = 12;
  Account account = account_of(3, steps, /*forget_errors=*/true);
  auto expected = one_process(1)[0];
  for (at::Tensor& gradient : expected) gradient.mul_(steps);
  for (size_t i = 0; i < expected.size(); ++i) account.applied[i].add_(account.owed[i]);
  EXPECT_GT(largest_difference(account.applied, expected), 0.1);
}

TEST(PowerSgd, TrafficIsRankTimesRowsAndColumns) {
  constexpr int64_t rank = 2, rows = 40, columns = 24;
  run_ranks(2, [&](World& world) {
    torch::nn::Linear model(columns, rows);
    fill_parameters(*model);
    DistributedDataParallel ddp(*model, world.group(), {.hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = rank, .start = 1})});
    const auto step = [&] {
      ddp.begin_step();
      model(random_tensor({4, columns}, "x")).square().sum().backward();
      ddp.finish();
      return ddp.statistics();
    };
    EXPECT_EQ(step().bytes, 4 * (rows * columns + rows)) << "before the start everything crosses whole";
    const auto statistics = step();
    EXPECT_EQ(statistics.bytes, 4 * (rank * (rows + columns) + rows));
    EXPECT_EQ(statistics.num_collectives, 2);
    EXPECT_EQ(statistics.num_early, 1);
  });
}

TEST(PowerSgd, BeforeTheStartTheBitsAreThePlainOnesAndAResumedRunGoesOnCounting) {
  std::vector<at::Tensor> plain, waiting, resumed;
  const auto gradients = [](std::shared_ptr<CommunicationHook> hook, World& world) {
    Net net;
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = std::move(hook)});
    run_step(net, ddp, part_of(whole_batch(samples), 3, world.rank()));
    return gradients_of(net);
  };
  run_ranks(3, [&](World& world) {
    const auto a = gradients(nullptr, world);
    const auto b = gradients(std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 10, .steps_done = 9}), world);
    const auto c = gradients(std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 10, .steps_done = 10}), world);
    if (world.rank() == 0) plain = a, waiting = b, resumed = c;
  });
  EXPECT_TRUE(same_bits(plain, waiting));
  EXPECT_FALSE(same_bits(plain, resumed));
}

TEST(PowerSgd, TheFirstQDependsOnSeedAndNameAlone) {
  std::vector<at::Tensor> drawn(4);
  run_ranks(3, [&](World& world) {
    Net net;
    PowerSgd hook({.rank = 1, .start = 0, .seed = 5});
    hook.prepare(nn::unique_parameters(net), std::vector<at::ScalarType>(7, at::kFloat), world.group());
    drawn[world.rank()] = carried(hook, "q", "middle.weight").clone();
  });
  PowerSgd other({.rank = 1, .start = 0, .seed = 6});
  Net net;
  other.prepare(nn::unique_parameters(net), std::vector<at::ScalarType>(7, at::kFloat), comm::Group::self());
  EXPECT_TRUE(at::equal(drawn[0], drawn[1]));
  EXPECT_TRUE(at::equal(drawn[0], drawn[2]));
  EXPECT_FALSE(at::equal(drawn[0], carried(other, "q", "middle.weight")));
  EXPECT_FALSE(at::equal(carried(other, "q", "middle.weight"), carried(other, "q", "last.weight")));
}

TEST(PowerSgd, AStepWithoutGradientsDoesNotEndCompression) {
  run_ranks(2, [&](World& world) {
    torch::nn::Linear model(torch::nn::LinearOptions(9, 8).bias(false));
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 0});
    DistributedDataParallel ddp(*model, world.group(), {.replicas = ReplicaStart::Broadcast, .hook = hook});
    for (const double scale : {0.0, 1.0}) {
      ddp.begin_step();
      (model(random_tensor({1, 9}, "x")).sum() * scale).backward();  // of rank 1: one step brings all of it
      ddp.finish();
      EXPECT_GT(carried(*hook, "q", "weight").norm().item<double>(), 0);
    }
    const at::Tensor expected = 2 * random_tensor({1, 9}, "x").expand({8, 9});
    EXPECT_LT(largest_difference({model->weight.grad()}, {expected}), parity);
  });
}

TEST(PowerSgd, AParameterNobodyUsesKeepsItsGradientUndefinedAndWhatIsOwed) {
  run_ranks(2, [&](World& world) {
    Net net;
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 0});
    DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .find_unused_parameters = true, .hook = hook});
    run_step(net, ddp, part_of(whole_batch(samples), 2, world.rank()));
    const at::Tensor owed = carried(*hook, "error", "first.weight").clone();
    EXPECT_GT(owed.norm().item<double>(), 0);
    ddp.begin_step();
    net.last->forward(random_tensor({3, 7}, "hidden")).square().sum().backward();
    ddp.finish();
    EXPECT_FALSE(net.first->weight.grad().defined());
    EXPECT_TRUE(at::equal(carried(*hook, "error", "first.weight"), owed));
    EXPECT_TRUE(net.last->weight.grad().defined());
    const at::Tensor before = carried(*hook, "error", "first.weight").clone();
    run_step(net, ddp, part_of(whole_batch(samples), 2, world.rank()));
    EXPECT_FALSE(at::equal(carried(*hook, "error", "first.weight"), before));
  });
}

TEST_P(PowerSgdWorlds, AStepThatIsNotFiniteOnOneRankLeavesWhatIsOwed) {
  const int ranks = GetParam();
  std::vector<std::vector<at::Tensor>> after(2);
  for (const bool overflows : {false, true}) {
    run_ranks(ranks, [&](World& world) {
      Net net;
      const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start = 0, .min_compression = 0});
      DistributedDataParallel ddp(net, world.group(), {.sizes = small_buckets, .hook = hook});
      const auto step = [&](int index, double factor) {
        ddp.begin_step();
        const Batch mine = part_of(whole_batch(samples, index), ranks, world.rank());
        (loss_of(net.forward(mine.x), mine.y, samples) * factor).backward();
        ddp.finish();
      };
      step(0, 1);
      for (const double factor : {std::numeric_limits<double>::infinity(), std::numeric_limits<double>::quiet_NaN()}) {
        if (!overflows) continue;
        std::vector<at::Tensor> before, now;
        for (const HookTensor& held : hook->state()) before.push_back(held.tensor.clone());
        step(1, world.rank() == ranks - 1 ? factor : 1);
        for (const HookTensor& held : hook->state()) now.push_back(held.tensor);
        EXPECT_TRUE(same_bits(now, before));
        for (const at::Tensor& gradient : gradients_of(net)) {
          if (gradient.defined() && gradient.dim() > 1) EXPECT_FALSE(gradient.isfinite().all().item<bool>()) << "no rank applies it";
        }
      }
      step(2, 1);
      if (world.rank() == 0) after[overflows] = gradients_of(net);
    });
  }
  EXPECT_TRUE(same_bits(after[1], after[0]));
}

TEST(PowerSgd, AParameterStoredTheOtherWayRoundIsCompressedAsItLies) {
  run_ranks(2, [&](World& world) {
    torch::nn::Module model;
    at::Tensor weight = model.register_parameter("weight", random_tensor({9, 16}, "w").t());  // [16, 9], column by column
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 0});
    DistributedDataParallel ddp(model, world.group(), {.hook = hook});
    EXPECT_EQ(carried(*hook, "q", "weight").sizes(), at::IntArrayRef({1, 16}));
    EXPECT_EQ(carried(*hook, "error", "weight").sizes(), weight.sizes());
    const at::Tensor left = random_tensor({16, 1}, "left"), right = random_tensor({1, 9}, "right");
    ddp.begin_step();
    (weight * left.matmul(right)).sum().backward();
    ddp.finish();
    EXPECT_LT(largest_difference({weight.grad()}, {2 * left.matmul(right)}), parity);
  });
}

TEST(PowerSgd, SmallTensorsAndShapesOfOneOrNoElementCrossWhole) {
  run_ranks(3, [&](World& world) {
    torch::nn::Module model;
    std::vector<at::Tensor> parameters;
    for (const auto& [name, shape] : std::vector<std::pair<std::string, std::vector<int64_t>>>{{"matrix", {11, 13}},
                                                                                               {"scalar", {}},
                                                                                               {"empty", {0, 4}},
                                                                                               {"one", {1, 1}},
                                                                                               {"row", {1, 20}},
                                                                                               {"cube", {6, 5, 7}},
                                                                                               {"bias", {3}},
                                                                                               {"page", {1, 8, 9}}}) {
      parameters.push_back(model.register_parameter(name, random_tensor(shape, name)));
    }
    parameters.push_back(model.register_parameter("pages", random_tensor({1, 8, 9}, "pages").permute({1, 0, 2})));  // [8, 1, 9], the one outermost in memory
    const auto hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 0});
    DistributedDataParallel ddp(model, world.group(), {.hook = hook});
    EXPECT_EQ(hook->state().size(), 8);  // errors and Q of "matrix", "cube", and of what has a dimension of one: "page" and "pages"
    ddp.begin_step();
    at::Tensor loss = at::zeros({});
    for (const at::Tensor& parameter : parameters) loss = loss + parameter.sum() * static_cast<double>(world.rank() + 1);
    loss.backward();
    ddp.finish();
    for (const at::Tensor& parameter : parameters) {
      if (parameter.numel() > 0) EXPECT_LT((parameter.grad() - 6).abs().max().item<double>(), 1e-4);
    }
    EXPECT_EQ(ddp.statistics().bytes, 4 * (11 + 13 + 6 + 35 + 2 * (8 + 9) + 1 + 1 + 20 + 3));
  });
}

TEST(PowerSgd, CarriesOneErrorAndTwoQInCommMemory) {
  run_ranks(2, [&](World& world) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    torch::nn::Linear model(torch::nn::LinearOptions(24, 40).bias(false));
    DistributedDataParallel ddp(*model, world.group(),
                                {.replicas = ReplicaStart::Broadcast, .hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2, .start = 0})});
    EXPECT_EQ(tracker.current(MemoryCategory::Comm), 4 * (24 * 40 + 2 * 2 * 24));
  });
}

TEST(PowerSgd, ADryRunMakesTheSameCalls) {
  const auto steps = [](Net& net, const comm::Group& group, at::Device device) {
    DistributedDataParallel ddp(net, group, {.sizes = small_buckets, .hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 1, .start = 1})});
    for (int step = 0; step < 3; ++step) run_step(net, ddp, {whole_batch(samples).x.to(device), whole_batch(samples).y.to(device)});
  };
  std::vector<CollectiveEvent> real;
  run_ranks(3, [&](World& world) {
    const auto recorder = std::make_shared<comm::Recorder>();
    comm::GroupInfo info{.name = "world", .rank = world.rank(), .size = 3, .ranks = {}};
    const comm::Group group(info, comm::make_record_engine(recorder, info, world.group().engine()));
    Net net;
    steps(net, group, at::kCPU);
    if (world.rank() == 1) real = recorder->records();
  });
  const auto recorder = std::make_shared<comm::Recorder>();
  World world = World::dry(3, 1, recorder);
  const auto net = on_meta([] { return std::make_shared<Net>(); });
  steps(*net, world.group(), at::kMeta);
  const auto planned = recorder->records();
  ASSERT_EQ(planned.size(), real.size());
  for (size_t i = 0; i < real.size(); ++i) {
    EXPECT_EQ(planned[i].op, real[i].op) << i;
    EXPECT_EQ(planned[i].shape, real[i].shape) << i;
    EXPECT_EQ(planned[i].site, real[i].site) << i;
  }
}

TEST(PowerSgd, RefusesByName) {
  EXPECT_THAT(refusal([] { PowerSgd({.rank = 0}); }), HasSubstr("comm.powersgd_rank = 0"));
  EXPECT_THAT(refusal([] { PowerSgd({.start = -1}); }), HasSubstr("comm.powersgd_start = -1"));
  EXPECT_THAT(refusal([] { PowerSgd({.min_compression = -1}); }), HasSubstr("min_compression = -1"));
  run_ranks(2, [&](World& world) {
    torch::nn::Linear model(24, 40);
    fill_parameters(*model);
    model->to(at::kBFloat16);
    const auto make = [&](std::optional<at::ScalarType> dtype) {
      (void)DistributedDataParallel(*model, world.group(), {.reduce_dtype = dtype, .hook = std::make_shared<PowerSgd>(PowerSgdOptions{.rank = 2})});
    };
    EXPECT_THAT(refusal([&] { make(std::nullopt); }), ::testing::AllOf(HasSubstr("'weight'"), HasSubstr("reduce_dtype")));
    make(at::kFloat);
  });
}

TEST(OrthonormalizeRows, MakesRowsOrthonormalAlsoWhereTheyNearlyDepend) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    for (const int64_t n : {1, 2, 7, 33, 1000}) {
      for (const int64_t r : {int64_t{1}, std::min<int64_t>(n, 2), std::min<int64_t>(n, 6)}) {
        at::Tensor p = random_tensor({r, n}, "p").to(dtype);
        if (r > 1) p[1].copy_(p[0] + 1e-5 * p[1]);
        orthonormalize_rows(p);
        const double off = (p.matmul(p.t()) - at::eye(r, p.options())).abs().max().item<double>();
        EXPECT_LT(off, dtype == at::kFloat ? 2e-6 : 1e-14) << r << " of " << n;
      }
    }
  }
}

/// Of a table of which few entries are used: more rows than there are directions.
TEST(OrthonormalizeRows, MoreRowsThanColumnsInUseBecomeZeros) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (int64_t used = 1; used < 6; ++used) {
      for (uint64_t seed = 0; seed < 20; ++seed) {
        at::Tensor p = at::zeros({6, 40}, dtype);
        at::Tensor some = at::empty({6, used}, at::kFloat);
        CounterRng(seed, "p").fill_normal(some.data_ptr<float>(), 0, some.numel(), 0, 1e-3);
        p.narrow(1, 7, used).copy_(some);
        orthonormalize_rows(p);
        const at::Tensor products = at::mm(p, p.t());
        at::Tensor want = at::zeros_like(products);
        want.diagonal().narrow(0, 0, used).fill_(1);
        EXPECT_LT((products - want).abs().max().item<double>(), 1e-6) << used << " of " << dtype << ", seed " << seed;
      }
    }
  }
}

TEST(OrthonormalizeRows, TakesRowsWhoseLengthHasNoReciprocal) {
  const at::Tensor p = at::tensor({3e-41f, 4e-41f, 0.F, 1e-41f}).view({2, 2}).contiguous();
  orthonormalize_rows(p);
  EXPECT_LT((at::mm(p, p.t()) - at::eye(2)).abs().max().item<double>(), 1e-6) << p;
}

TEST(OrthonormalizeRows, LeavesRowsOfZerosAndNothingAlone) {
  at::Tensor p = at::zeros({3, 5});
  p[1].fill_(2);
  orthonormalize_rows(p);
  EXPECT_TRUE(at::equal(p[0], at::zeros({5})));
  EXPECT_NEAR(p[1].norm().item<double>(), 1, 1e-6);
  EXPECT_TRUE(at::equal(p[2], at::zeros({5})));
  at::Tensor empty = at::zeros({0, 5});
  orthonormalize_rows(empty);
}

TEST(OrthonormalizeRows, TheNumberOfThreadsDoesNotShow) {
  at::Tensor one = random_tensor({4, 100000}, "p"), two = one.clone();
  orthonormalize_rows(one);
  const int before = at::get_num_threads();
  at::set_num_threads(2);
  orthonormalize_rows(two);
  at::set_num_threads(before);
  EXPECT_TRUE(at::equal(one, two));
}

}  // namespace
}  // namespace tessera
