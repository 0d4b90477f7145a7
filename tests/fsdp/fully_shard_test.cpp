#include "tessera/fsdp/fully_shard.h"

#include <gmock/gmock.h>

#include "support.h"
#include "tessera/comm/collectives.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

using comm::run_ranks;
using comm::World;
using ::testing::HasSubstr;
using namespace testing_support;

constexpr double loss_parity = 5e-6;

/// What one process does with the whole batch.
struct Reference {
  std::vector<Gradients> gradients;
  std::vector<double> losses;
  Gradients weights;
};

Reference reference(int steps, bool skip = false) {
  Reference seen;
  DeepNet net;
  if (skip) net->skipped = &net->blocks[1];
  for (int step = 0; step < steps; ++step) {
    net->zero_grad();
    const Batch batch = whole_batch(samples, step);
    const at::Tensor loss = loss_of(net(batch.x), batch.y, samples);
    loss.backward();
    seen.losses.push_back(loss.item<double>());
    seen.gradients.push_back(named_gradients(*net));
    sgd(*net, 0.05);
  }
  seen.weights = named_values(*net);
  return seen;
}

/// The sum over ranks of a number.
double total(const World& world, double value) {
  const at::Tensor sum = at::full({1}, value, at::kDouble);
  comm::all_reduce(world.group(), sum);
  return sum.item<double>();
}

class WorldSizes : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(FullyShard, WorldSizes, ::testing::Values(1, 2, 3, 5, 8));

void expect_parity(World& world, FullyShardOptions options, int steps, const Reference& expected) {
  DeepNet net;
  auto sharded = fully_shard(net, world.group(), std::move(options));
  for (int step = 0; step < steps; ++step) {
    const Batch mine = part_of(whole_batch(samples, step), world.size(), world.rank());
    sharded->begin_step();
    const at::Tensor loss = loss_of(net(mine.x), mine.y, samples);
    loss.backward();
    sharded->finish();
    EXPECT_NEAR(total(world, loss.item<double>()), expected.losses[step], loss_parity * expected.losses[step]) << "step " << step;
    // Adding up in another order moves the weights, and the gradients of later steps with them.
    EXPECT_LT(slice_difference(*net, expected.gradients[step]), step == 0 ? parity : 100 * parity) << "step " << step;
    sgd(*net, 0.05);
  }
  EXPECT_LT(slice_difference(*net, expected.weights, /*values=*/true), parity);
}

TEST_P(WorldSizes, TwentyStepsEqualOneProcess) {
  const Reference expected = reference(20);
  run_ranks(GetParam(), [&](World& world) { expect_parity(world, {.wrap = "block*"}, 20, expected); });
}

TEST_P(WorldSizes, AnyUnitsAndAnyPrefetch) {
  const Reference expected = reference(3);
  run_ranks(GetParam(), [&](World& world) {
    expect_parity(world, {}, 3, expected);
    expect_parity(world, {.wrap = "**", .prefetch = {.units = 0}}, 3, expected);
    expect_parity(world, {.policy = wrap_by_type<BlockImpl>(), .prefetch = {.units = 3, .bytes = 700}}, 3, expected);
    expect_parity(world, {.policy = wrap_by_size(40), .reshard_after_forward = false}, 3, expected);
    expect_parity(world, {.wrap = "block*", .trigger = ShardTrigger::Operators}, 3, expected);
  });
}

TEST_P(WorldSizes, AccumulationEqualsOneBackward) {
  const int ranks = GetParam();
  const Reference expected = reference(1);
  for (const std::string wrap : {"block*", ""}) {  // alone, a unit's reduction is still under way when its next gradients come
    for (const bool each : {true, false}) {
      run_ranks(ranks, [&](World& world) {
        DeepNet net;
        auto sharded = fully_shard(net, world.group(), {.wrap = wrap, .reduce_each_micro_batch = each});
        const Batch mine = part_of(whole_batch(samples), ranks, world.rank());
        sharded->begin_step();
        for (int pass = 0; pass < 3; ++pass) {
          sharded->before_micro_batch({.last = pass == 2});
          backward_of(net, part_of(mine, 3, pass));
          sharded->after_micro_batch({});
        }
        sharded->finish();
        EXPECT_LT(slice_difference(*net, expected.gradients[0]), parity);
      });
    }
  }
}

TEST_P(WorldSizes, EvaluationSeesWholeParametersAndLeavesSlices) {
  const Batch batch = whole_batch(samples);
  DeepNet plain;
  const at::Tensor expected = plain(batch.x).detach();
  run_ranks(GetParam(), [&](World& world) {
    for (const auto trigger : {ShardTrigger::Calls, ShardTrigger::Operators}) {
      DeepNet net;
      auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .trigger = trigger});
      const Gradients before = named_values(*net);
      for (int pass = 0; pass < 2; ++pass) {
        const at::NoGradGuard no_grad;
        EXPECT_TRUE(at::equal(net(batch.x), expected));
      }
      for (const auto& [name, value] : named_values(*net)) EXPECT_TRUE(at::equal(value, before.at(name))) << name;
    }
  });
}

TEST(FullyShard, SlicesAreDrawnAsOneProcessDrawsTheWhole) {
  auto whole = on_meta([] { return DeepNet(); });
  materialize(whole, 5, testing_support::test_device());
  const Gradients expected = named_values(*whole);
  run_ranks(3, [&](World& world) {
    auto net = on_meta([] { return DeepNet(); });
    MemoryTracker memory;
    const TrackMemory track(memory);
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .device = testing_support::test_device()});
    materialize(net, 5, testing_support::test_device());
    EXPECT_EQ(slice_difference(*net, expected, /*values=*/true), 0);
    int64_t bytes = 0;
    for (const ShardUnit& unit : sharded->units()) bytes += unit.local_bytes;
    EXPECT_EQ(memory.current(MemoryCategory::Parameters), bytes);
  });
}

TEST(FullyShard, AUsersInitWritesWholeParametersOneUnitAtATime) {
  DeepNet plain;
  const Gradients expected = named_values(*plain);
  run_ranks(5, [&](World& world) {
    auto net = on_meta([] { return DeepNet(); });
    std::vector<std::string> called;
    const auto init = [&](torch::nn::Module& module, const std::string& path) {
      called.push_back(path);
      const at::NoGradGuard no_grad;
      for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
        const std::string name = path + "." + parameter.key();
        if (expected.contains(name)) parameter.value().copy_(expected.at(name));
      }
    };
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .init = init, .device = testing_support::test_device()});
    EXPECT_EQ(slice_difference(*net, expected, /*values=*/true), 0);
    EXPECT_EQ(called, (std::vector<std::string>{"first", "block0", "block0.w1", "block0.w2", "block1", "block1.w1", "block1.w2", "block2", "block2.w1",
                                                "block2.w2", "norm", "last"}));
  });
}

TEST(FullyShard, HybridSumsTheSlicesOverTheReplicas) {
  const Reference expected = reference(2);
  run_ranks(6, [&](World& world) {
    // Two copies of a model that three ranks share.
    const int first = world.rank() / 3 * 3;
    const comm::Group shard = world.subgroup({first, first + 1, first + 2}, "dp_shard" + std::to_string(first));
    const comm::Group replicate = world.subgroup({world.rank() % 3, world.rank() % 3 + 3}, "dp_replicate" + std::to_string(world.rank() % 3));
    for (const bool each : {true, false}) {
      DeepNet net;
      auto sharded = fully_shard(net, shard, {.wrap = "block*", .reduce_each_micro_batch = each, .replicate = replicate});
      for (int step = 0; step < 2; ++step) {
        const Batch mine = part_of(whole_batch(samples, step), 6, world.rank());
        sharded->begin_step();
        for (int pass = 0; pass < 2; ++pass) {
          sharded->before_micro_batch({.last = pass == 1});
          backward_of(net, part_of(mine, 2, pass));
          sharded->after_micro_batch({});
        }
        sharded->finish();
        EXPECT_LT(slice_difference(*net, expected.gradients[step]), 10 * parity);
        sgd(*net, 0.05);
      }
    }
  });
}

TEST(FullyShard, PureReplicationIsAGroupOfOneWithReplicas) {
  const Reference expected = reference(1);
  run_ranks(3, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, comm::Group::self(), {.wrap = "block*", .replicate = world.group()});
    sharded->begin_step();
    backward_of(net, part_of(whole_batch(samples), 3, world.rank()));
    sharded->finish();
    EXPECT_LT(slice_difference(*net, expected.gradients[0]), parity);
  });
}

TEST(FullyShard, AStepThatDidNotEndLeavesNothing) {
  const Reference expected = reference(1);
  run_ranks(3, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
    for (int attempt = 0; attempt < 2; ++attempt) {
      sharded->begin_step();
      sharded->before_micro_batch({.last = attempt == 1});
      backward_of(net, part_of(whole_batch(samples), 3, world.rank()));  // the last unit is still on its way
    }
    sharded->after_micro_batch({});
    sharded->finish();
    EXPECT_LT(slice_difference(*net, expected.gradients[0]), parity);
  });
}

TEST(FullyShard, AverageDividesByAllRanks) {
  const Reference expected = reference(1);
  run_ranks(4, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.average = true});
    sharded->begin_step();
    backward_of(net, whole_batch(samples));
    sharded->finish();
    EXPECT_LT(slice_difference(*net, expected.gradients[0]), parity);
  });
}

TEST(FullyShard, ParitySeesARankThatIsDropped) {
  const Reference expected = reference(1);
  run_ranks(3, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*"});
    sharded->begin_step();
    backward_of(net, part_of(whole_batch(samples), 3, world.rank()), world.rank() == 1 ? 0.0 : 1.0);
    sharded->finish();
    const double largest = slice_difference(*net, expected.gradients[0]);
    EXPECT_GT(total(world, largest), 100 * parity);
  });
}

TEST(FullyShard, UnusedParameters) {
  const Reference expected = reference(1, /*skip=*/true);
  run_ranks(3, [&](World& world) {
    DeepNet net;
    net->skipped = &net->blocks[1];
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .find_unused_parameters = true});
    for (int step = 0; step < 2; ++step) {
      sharded->begin_step();
      backward_of(net, part_of(whole_batch(samples), 3, world.rank()));
      sharded->finish();
      EXPECT_LT(slice_difference(*net, expected.gradients[0]), parity);
    }
    DeepNet other;
    other->skipped = &other->blocks[1];
    auto strict = fully_shard(other, world.group(), {.wrap = "block*"});
    strict->begin_step();
    backward_of(other, part_of(whole_batch(samples), 3, world.rank()));
    EXPECT_THAT(refusal([&] { strict->finish(); }), HasSubstr("'block1.w1.weight'"));
  });
}

TEST(FullyShard, AParameterThatOneRankAloneUses) {
  run_ranks(3, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .find_unused_parameters = true});
    sharded->begin_step();
    // Ranks call the same modules, but on ranks 0 and 2 the output of a block does not reach the loss.
    const Batch mine = part_of(whole_batch(samples), 3, world.rank());
    const at::Tensor h = net->first(mine.x), side = net->blocks[0](h);
    const at::Tensor joined = net->last(net->out(net->norm(world.rank() == 1 ? side : h)));
    loss_of(joined, mine.y, samples).backward();
    sharded->finish();
    for (const auto& parameter : nn::unique_parameters(*net)) {
      const bool used =
          parameter.name.find("block1") == std::string::npos && parameter.name.find("block2") == std::string::npos && parameter.tensor.requires_grad();
      EXPECT_EQ(parameter.tensor.grad().defined(), used) << parameter.name;
    }
  });
}

TEST(FullyShard, GathersInAnotherDtypeAndReducesInAThird) {
  const Reference expected = reference(1);
  run_ranks(3, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .param_dtype = at::kDouble, .reduce_dtype = at::kDouble});
    sharded->begin_step();
    EXPECT_EQ(net->first->weight.scalar_type(), at::kDouble);
    const Batch mine = part_of(whole_batch(samples), 3, world.rank());
    backward_of(net, {mine.x.to(at::kDouble), mine.y.to(at::kDouble)});
    sharded->finish();
    EXPECT_EQ(net->first->weight.scalar_type(), at::kFloat);
    EXPECT_LT(slice_difference(*net, expected.gradients[0]), parity);
  });
}

/// The types that several ranks compute and add up in are those of one.
TEST(FullyShard, OneRankHasTheTypesOfSeveral) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](World& world) {
      torch::nn::Linear layer(4, 3);
      layer->to(at::kHalf);
      torch::nn::init::constant_(layer->weight, 0.5);
      torch::nn::init::zeros_(layer->bias);
      const auto sharded = fully_shard(layer, world.group(), {.reduce_dtype = at::kFloat, .gradient_dtype = at::kFloat});
      for (int pass = 0; pass < 2; ++pass) {
        const Attachment held = pass == 0 ? sharded->no_sync() : Attachment();
        (layer->forward(at::ones({1, 4}, at::kHalf)).to(at::kFloat).sum() * (40000.0 / ranks)).backward();
      }
      for (const auto& updated : sharded->updated()) {
        ASSERT_EQ(updated.tensor.grad().scalar_type(), at::kFloat);
        if (updated.tensor.grad().numel() > 0) EXPECT_EQ(updated.tensor.grad().min().item<float>(), 80000) << "which fp16 has not, on " << ranks;
      }
      DeepNet net;
      const auto narrow = fully_shard(net, world.group(), {.wrap = "block*", .param_dtype = at::kBFloat16});
      EXPECT_EQ(net(whole_batch(samples).x).scalar_type(), at::kBFloat16) << ranks;
    });
  }
}

TEST(FullyShard, AMeanInFp16DoesNotOverflow) {
  for (const std::optional<at::ScalarType> kept : {std::optional<at::ScalarType>(), std::optional(at::kFloat)}) {
    for (const int ranks : {2, 3}) {
      run_ranks(ranks, [&](World& world) {
        torch::nn::Linear layer(4, 3);
        layer->to(at::kHalf);
        torch::nn::init::constant_(layer->weight, 0.5);
        torch::nn::init::zeros_(layer->bias);
        const auto sharded = fully_shard(layer, world.group(), {.average = true, .gradient_dtype = kept});
        (layer->forward(at::ones({1, 4}, at::kHalf)).to(at::kFloat).sum() * 40000.0).backward();
        for (const auto& updated : sharded->updated()) {
          const at::Tensor gradient = updated.tensor.grad().to(at::kFloat);
          EXPECT_TRUE(at::allclose(gradient, at::full_like(gradient, 40000), 0x1p-10)) << gradient;
        }
      });
    }
  }
}

/// `turns` times the same layer, and one more that is used once.
struct TurnsImpl : nn::Module {
  explicit TurnsImpl(int turns) : turns(turns), first(5, 7), again(7, 7), last(7, 3) {
    register_module("first", first);
    register_module("again", again);
    register_module("last", last);
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = first(x);
    for (int i = 0; i < turns; ++i) h = h + at::tanh(again(h)).to(at::kFloat);
    return last(h);
  }
  void compute_in(at::ScalarType dtype) {
    for (nn::Linear* layer : {&first, &again, &last}) (*layer)->set_compute_dtype(dtype);
  }
  int turns;
  nn::Linear first, again, last;
};
TESSERA_MODULE(Turns);

/// The sum over ranks' batches of what one process has, whose weights are fp32.
Gradients of_turns(int turns, int ranks, at::ScalarType compute, bool rounded) {
  Turns net(turns);
  net->compute_in(compute);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : net->parameters()) {
    if (rounded) parameter.copy_(parameter.to(at::kBFloat16));
  }
  const at::AutoGradMode grad(true);
  for (int rank = 0; rank < ranks; ++rank) backward_of(net, part_of(whole_batch(samples), ranks, rank));
  return named_gradients(*net);
}

/// Autograd's leaf is the gathered tensor, of 16 bits: uses of a layer are not added up in them.
TEST(FullyShard, SeveralUsesOfALayerAreAddedUpAsTheyAreKept) {
  for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf}) {
    for (const int ranks : {1, 2}) {
      for (const auto trigger : kBoth) {
        for (const int turns : {1, 3, 20}) {
          const Gradients expected = of_turns(turns, ranks, narrow, /*rounded=*/false);
          run_ranks(ranks, [&](World& world) {
            Turns net(turns);
            net->compute_in(narrow);
            // Casts at the gather, and leaves inputs alone.
            const auto sharded = fully_shard(net, world.group(),
                                             {.wrap = "*", .param_dtype = narrow, .cast = [](const nn::NamedParameter&) { return true; }, .trigger = trigger});
            for (int step = 0; step < 2; ++step) {
              net->zero_grad();
              backward_of(net, part_of(whole_batch(samples), ranks, world.rank()));
              EXPECT_LT(slice_difference(*net, expected), parity) << narrow << ", " << ranks << " ranks, " << turns << " uses";
            }
          });
        }
      }
    }
  }
}

/// A plain module that uses one weight several times, and whose backward has no operator that is given it. What a gather in 16 bits gives, it can cast to.
struct Reused : torch::nn::Module {
  explicit Reused(bool casts) : casts(casts) {}
  virtual at::Tensor forward(const Batch& batch) = 0;
  at::Tensor used(const at::Tensor& parameter) const { return casts ? parameter.to(at::kBFloat16) : parameter; }
  bool casts;
};

/// Scores by products of rows of one table, of the word, one beside it and one that is not.
struct SkipGram : Reused {
  explicit SkipGram(bool casts) : Reused(casts) {
    table = register_module("table", torch::nn::Embedding(4, 7));
    fill_parameters(*this);
  }
  at::Tensor forward(const Batch& batch) override {
    const at::Tensor ids = batch.x.narrow(1, 0, 3).mul(100).to(at::kLong).remainder(4);
    const auto row = [&](int64_t which) { return at::embedding(used(table->weight), ids.select(1, which)); };
    const at::Tensor word = row(0);
    return at::stack({(word * row(1)).to(at::kFloat).sum(1), (word * row(2)).to(at::kFloat).sum(1), word.to(at::kFloat).sum(1)}, 1);
  }
  torch::nn::Embedding table{nullptr};
};

/// One layer at 20 places of a sequence that needs no gradient.
struct Siamese : Reused {
  explicit Siamese(bool casts) : Reused(casts) {
    layer = register_module("layer", torch::nn::Linear(5, 3));
    fill_parameters(*this);
  }
  at::Tensor forward(const Batch& batch) override {
    at::Tensor h = at::zeros_like(batch.y);
    for (int place = 0; place < 20; ++place) {
      const at::Tensor x = (batch.x * (1 + 0.1 * place)).to(at::kBFloat16);
      h = h + at::tanh(at::linear(x, used(layer->weight), used(layer->bias))).to(at::kFloat);
    }
    return h;
  }
  torch::nn::Linear layer{nullptr};
};

template <class Model>
void expect_wide_sums() {
  for (const int ranks : {1, 2}) {
    Model whole(/*casts=*/true);
    for (int rank = 0; rank < ranks; ++rank) {
      const Batch part = part_of(whole_batch(samples), ranks, rank);
      loss_of(whole.forward(part), part.y, samples).backward();
    }
    Gradients expected = named_gradients(whole);
    run_ranks(ranks, [&](World& world) {
      Model net(/*casts=*/false);
      const auto sharded = fully_shard(net, world.group(), {.param_dtype = at::kBFloat16, .cast = [](const nn::NamedParameter&) { return true; }});
      const Batch part = part_of(whole_batch(samples), ranks, world.rank());
      Net other;
      const auto pass = [&] {
        const at::Tensor output = net.forward(part), loss = loss_of(output, part.y, samples);
        backward(other, part);                                                                    // of another graph
        (void)torch::autograd::grad({loss}, {output}, /*grad_outputs=*/{}, /*keep_graph=*/true);  // of ours, and for nothing of ours
        loss.backward();
      };
      pass();
      EXPECT_LT(slice_difference(net, expected), parity) << ranks << " ranks";
      {
        const Attachment held = sharded->no_sync();
        pass();
      }
      pass();
      for (const auto& parameter : nn::unique_parameters(net)) parameter.tensor.mutable_grad().div_(3);
      EXPECT_LT(slice_difference(net, expected), parity) << ranks << " ranks, three passes";
      for (const auto& parameter : nn::unique_parameters(net)) EXPECT_EQ(parameter.tensor.grad_dtype(), std::nullopt) << parameter.name;
    });
  }
}

/// Nothing but the leaf itself would tell of such a pass, when autograd has added up what it got.
TEST(FullyShard, SeveralUsesThatNoOperatorOfBackwardShows) {
  expect_wide_sums<SkipGram>();
  expect_wide_sums<Siamese>();
}

/// What was widened for a pass leaves nothing on the weights, which behind unshard() are of a type of their own again.
TEST(FullyShard, SeveralUsesLeaveNothingBehindUnshard) {
  run_ranks(2, [&](World& world) {
    Turns net(3);
    net->compute_in(at::kBFloat16);
    {
      const auto sharded =
          fully_shard(net, world.group(),
                      {.wrap = "*", .param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16, .cast = [](const nn::NamedParameter&) { return true; }});
      backward_of(net, part_of(whole_batch(samples), 2, world.rank()));
      unshard(net);
    }
    for (const at::Tensor& parameter : net->parameters()) {
      EXPECT_EQ(parameter.scalar_type(), at::kFloat);
      EXPECT_EQ(parameter.grad_dtype(), at::kFloat);
    }
  });
}

/// 16-bit weights that are computed with in fp32: no rank rounds a gradient before it is summed.
TEST(FullyShard, GradientsOf16BitWeightsCrossAsTheyWereComputed) {
  for (const int ranks : {1, 2}) {
    for (const int turns : {1, 3}) {
      const Gradients expected = of_turns(turns, ranks, at::kFloat, /*rounded=*/true);
      run_ranks(ranks, [&](World& world) {
        Turns net(turns);
        net->to(at::kBFloat16);
        net->compute_in(at::kFloat);
        const auto sharded = fully_shard(net, world.group(), {.reduce_dtype = at::kFloat, .gradient_dtype = at::kFloat});
        backward_of(net, part_of(whole_batch(samples), ranks, world.rank()));
        EXPECT_LT(slice_difference(*net, expected), parity) << ranks << " ranks, " << turns << " uses";
      });
    }
  }
}

/// Both products with one weight, the last of which backward begins with.
struct TwiceImpl : nn::Module {
  TwiceImpl() {
    weight = register_parameter("weight", at::ones({5, 5}));
    fill_parameters(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    return at::matmul(at::matmul(x.to(at::kBFloat16), weight.to(at::kBFloat16)), weight.to(at::kBFloat16));  // gathered, it is already
  }
  at::Tensor weight;
};
TESSERA_MODULE(Twice);

TEST(FullyShard, AUseInTheLastOperatorCountsAsWell) {
  const at::Tensor x = whole_batch(samples).x, dy = random_tensor({samples, 5}, "dy").to(at::kBFloat16);
  Twice whole;
  whole(x).backward(dy);
  run_ranks(1, [&](World& world) {
    Twice net;
    const auto sharded = fully_shard(net, world.group(), {.param_dtype = at::kBFloat16});
    net(x).backward(dy);
    EXPECT_LT(slice_difference(*net, named_gradients(*whole)), parity);
  });
}

/// What is used once keeps its 16 bits until it is summed, and a leaf is told another type for no longer than a pass.
TEST(FullyShard, OneUseOfALayerIsNotWidened) {
  run_ranks(2, [&](World& world) {
    Turns net(3);
    net->compute_in(at::kBFloat16);
    const auto sharded = fully_shard(net, world.group(), {.param_dtype = at::kBFloat16, .cast = [](const nn::NamedParameter&) { return true; }});
    std::map<std::string, at::ScalarType> came;
    Attachment watched;
    for (const auto& parameter : nn::unique_parameters(*net)) {
      watched.add(nn::GradientDispatcher::of(parameter.tensor).watch_arriving([&came, name = parameter.name](const at::Tensor& leaf) {
        came[name] = leaf.grad_dtype().value_or(leaf.scalar_type());
      }));
    }
    backward_of(net, part_of(whole_batch(samples), 2, world.rank()));
    EXPECT_EQ(came.at("first.weight"), at::kBFloat16);
    EXPECT_EQ(came.at("again.weight"), at::kFloat);
    EXPECT_EQ(net->again->weight.grad_dtype(), std::nullopt);
  });
}

TEST(FullyShard, KeepsGradientsInAWiderTypeThanTheyCrossIn) {
  const Reference expected = reference(1);
  run_ranks(3, [&](World& world) {
    DeepNet net;
    auto sharded = fully_shard(net, world.group(), {.wrap = "block*", .reduce_dtype = at::kBFloat16});
    sharded->begin_step();
    const Batch mine = part_of(whole_batch(samples), 3, world.rank());
    for (int pass = 0; pass < 2; ++pass) {
      const Attachment held = pass == 0 ? sharded->no_sync() : Attachment();
      backward_of(net, part_of(mine, 2, pass));
    }
    sharded->finish();
    for (const auto& parameter : nn::unique_parameters(*net)) {
      if (parameter.tensor.grad().defined()) EXPECT_EQ(parameter.tensor.grad().scalar_type(), at::kFloat) << parameter.name;
    }
    const double off = slice_difference(*net, expected.gradients[0]);
    EXPECT_LT(off, 0.03);  // roundings to 8 bits
    if (world.rank() == 0) EXPECT_GT(off, parity);
    DeepNet copied;
    auto replicas = fully_shard(copied, comm::Group::self(), {.reduce_dtype = at::kBFloat16, .replicate = world.group()});
    replicas->begin_step();
    backward_of(copied, mine);
    replicas->finish();
    EXPECT_EQ(copied->last->weight.grad().scalar_type(), at::kFloat);
    EXPECT_LT(slice_difference(*copied, expected.gradients[0]), 0.03);
  });
}

TEST(FullyShard, APlainModuleGathersByItsOperators) {
  const auto expected = one_process(3);
  for (int ranks : {2, 3, 5}) {
    run_ranks(ranks, [&](World& world) {
      const auto net = std::make_shared<Net>();
      auto sharded = fully_shard(*net, world.group(), {.wrap = "middle"});
      for (int step = 0; step < 3; ++step) {
        sharded->begin_step();
        backward(*net, part_of(whole_batch(samples, step), ranks, world.rank()));
        sharded->finish();
        Gradients whole;
        for (size_t i = 0; const auto& item : net->named_parameters()) whole[item.key()] = expected[step][i++];
        EXPECT_LT(slice_difference(*net, whole), 10 * parity);
        sgd(*net, 0.05);
      }
    });
  }
}

/// Around a layer of libtorch's, as many as a model has.
struct AroundPlainImpl : nn::Module {
  AroundPlainImpl() { register_module("layer", layer); }
  at::Tensor forward(const at::Tensor& x) { return layer(x); }
  torch::nn::Linear layer{5, 5};
};
TESSERA_MODULE(AroundPlain);

struct RootOfPlainImpl : nn::Module {
  RootOfPlainImpl() { register_module("inner", inner); }
  at::Tensor forward(const at::Tensor& x) { return inner(x); }
  AroundPlain inner;
};
TESSERA_MODULE(RootOfPlain);

TEST(FullyShard, WhatIsAskedOfPlainLayersThatStayGatheredCanBeFollowed) {
  run_ranks(2, [&](World& world) {
    RootOfPlain root;
    fill_parameters(*root);
    EXPECT_THAT(refusal([&] { (void)fully_shard(root, world.group(), {.reshard_after_forward = false}); }),
                ::testing::AllOf(HasSubstr("'inner.layer' is watched by its operators"), HasSubstr("let a module that is derived so hold it and be a unit")));
    const auto sharded = fully_shard(root, world.group(), {.wrap = "inner", .reshard_after_forward = false});
    root(whole_batch(samples).x).sum().backward();
    EXPECT_TRUE(root->inner->layer->weight.grad().defined());
  });
}

TEST(FullyShard, Refusals) {
  run_ranks(2, [&](World& world) {
    const auto refused = [&](FullyShardOptions options) {
      auto net = on_meta([] { return DeepNet(); });
      return refusal([&] { (void)fully_shard(net, world.group(), std::move(options)); });
    };
    EXPECT_THAT(refused({.wrap = "blok*"}), HasSubstr("fully_shard: wrap = 'blok*': no module matches 'blok*'"));
    EXPECT_THAT(refused({.wrap = "blok*"}), HasSubstr("nearest path is 'block"));
    EXPECT_THAT(refused({.wrap = "block*", .policy = wrap_by_size(3)}), HasSubstr("leave one of them out"));
    EXPECT_THAT(refused({.wrap = "block*", .unit_bytes_limit = 100}), HasSubstr("fully_shard: unit 'block0' (with 'block0.w1.weight') alone takes 704 bytes"));
    const auto nothing = [](torch::nn::Module&, const std::string&) {};
    const auto reshape = [](torch::nn::Module& module, const std::string&) { module.named_parameters(false).begin()->value().set_data(at::ones({2})); };
    EXPECT_THAT(refused({.wrap = "block*", .init = nothing}), HasSubstr("init left 35 of 35 elements of 'first.weight' untouched"));
    EXPECT_THAT(refused({.wrap = "block*", .init = reshape}), HasSubstr("init changed the shape of 'first.weight' from [7, 5] to [2]"));
    const auto plain = std::make_shared<Net>();
    EXPECT_THAT(refusal([&] { (void)fully_shard(*plain, world.group(), {.trigger = ShardTrigger::Calls}); }), HasSubstr("is a plain torch::nn::Module"));
    // Replicas that differ.
    DeepNet other;
    if (world.rank() == 1) fill_parameters(*other, 2);
    EXPECT_THAT(refusal([&] { (void)fully_shard(other, world.group()); }), HasSubstr("the replicas differ: parameter 'first.weight'"));
    // A second gradient after the unit has gone.
    DeepNet twice;
    auto sharded = fully_shard(twice, world.group());
    sharded->begin_step();
    backward_of(twice, whole_batch(samples));
    EXPECT_THAT(refusal([&] { backward_of(twice, whole_batch(samples)); }), HasSubstr("got another gradient after its unit was reduced"));
  });
}

}  // namespace
}  // namespace tessera
