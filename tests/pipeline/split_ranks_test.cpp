#include <list>
#include <map>
#include <mutex>

#include <gmock/gmock.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/pipeline/split/shared_gradients.h"
#include "tests/pipeline/split_models.h"
#include "tests/pipeline/split_support.h"
#include "tests/test_device.h"

/// Each rank builds the whole model on meta, gives memory to its own stage alone, and runs it by a schedule: against one process.
namespace tessera {
namespace {

using namespace testing_support;
using enum pipeline::SplitPoint;
using ::testing::HasSubstr;

constexpr uint64_t kSeed = 5;
constexpr int kMicroBatches = 5;

using Inputs = std::vector<std::vector<at::Tensor>>;  // of each micro-batch
using Generator = schedules::Schedule (*)(int ranks, int micro_batches);

struct Trained {
  std::vector<at::Tensor> outputs;  ///< by micro-batch
  Named gradients, buffers;
};

template <class Build>
Trained in_one_process(Build build, const Inputs& inputs) {
  auto model = build();
  materialize(*model, kSeed, testing_support::test_device());
  Trained trained;
  for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
    const auto outputs = forward_of(model)(inputs[i]);
    loss_of(outputs, i).backward();
    trained.outputs.push_back(outputs[0].detach());
  }
  trained.gradients = copies(model->named_parameters(), true);
  trained.buffers = copies(model->named_buffers(), false);
  return trained;
}

template <class Build>
Trained on_ranks(int ranks, Build build, const pipeline::SplitSpec& splits, const Inputs& inputs, Generator schedule) {
  Trained trained;
  std::mutex mutex;
  comm::run_ranks(ranks, [&](comm::World& world) {
    auto model = on_meta(build);
    const auto split = pipeline::split(model, inputs[0], splits);
    for (int i = 0; i < static_cast<int>(inputs.size()); ++i) split.expect(inputs[i], i);
    split.check_agreement(world.group());
    const schedules::Schedule plan = schedule(ranks, static_cast<int>(inputs.size()));
    std::vector<at::Tensor> outputs(inputs.size());
    std::list<pipeline::TracedStage> stages;
    std::map<int, pipeline::Stage*> by_number;
    Named held;
    for (const int number : plan.stages_of(world.rank())) {
      const auto own = split.module(number);
      materialize(*own, kSeed, testing_support::test_device());
      for (const auto& item : own->named_parameters()) held[item.key()] = item.value();
      stages.emplace_back(
          split, number, [&](int micro_batch) { return inputs[micro_batch]; },
          [&](int micro_batch, const std::vector<at::Tensor>& made) {
            outputs[micro_batch] = made[0].detach();
            return loss_of(made, micro_batch);
          });
      by_number[number] = &stages.back();
    }
    for (const auto& item : model->named_parameters()) EXPECT_EQ(item.value().is_meta(), !held.contains(item.key())) << item.key();
    pipeline::Executor(plan, split.crossings(), by_number, {.ranks = world.group(), .device = testing_support::test_device()}).run();
    pipeline::sum_shared_gradients(split, plan, world.group());

    const std::lock_guard lock(mutex);
    for (const auto& [name, parameter] : held) {
      const at::Tensor& gradient = parameter.grad();
      if (trained.gradients.contains(name)) EXPECT_TRUE(at::equal(trained.gradients[name], gradient)) << name << " on several ranks";
      trained.gradients[name] = gradient;
    }
    for (const auto& item : model->named_buffers()) {
      if (!item.value().is_meta()) trained.buffers[item.key()] = item.value();
    }
    if (by_number.contains(plan.stages() - 1)) trained.outputs = outputs;
  });
  return trained;
}

template <class Build>
void expect_ranks_equal_one(Build build, const pipeline::SplitSpec& splits, const Inputs& inputs, double tolerance = 0,
                            std::vector<Generator> schedules = {&schedules::gpipe, &schedules::one_f_one_b, &schedules::zb_h1}, int chunks = 1) {
  const Trained expected = in_one_process(build, inputs);
  for (const Generator schedule : schedules) {
    const Trained actual = on_ranks((static_cast<int>(splits.size()) + 1) / chunks, build, splits, inputs, schedule);
    for (size_t i = 0; i < inputs.size(); ++i) EXPECT_TRUE(at::equal(actual.outputs[i], expected.outputs[i])) << "micro-batch " << i;
    expect_same(actual.buffers, expected.buffers, "buffer");
    if (tolerance == 0) {
      expect_same(actual.gradients, expected.gradients, "gradient");
      continue;
    }
    ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
    for (const auto& [name, gradient] : expected.gradients) {
      EXPECT_LE((actual.gradients.at(name) - gradient).abs().max().item<double>(), tolerance * gradient.abs().max().item<double>()) << name;
    }
  }
}

Inputs tokens(int64_t vocabulary, std::vector<int64_t> sizes) {
  Inputs inputs;
  for (int i = 0; i < kMicroBatches; ++i) {
    inputs.push_back({at::randint(vocabulary, sizes, at::detail::createCPUGenerator(30 + static_cast<uint64_t>(i)), at::kLong)});
  }
  return inputs;
}

TEST(SplitRanks, ClassicExampleOnTwoThreeAndFour) {
  const auto build = [] { return Classic(); };
  expect_ranks_equal_one(build, {{"layers.1", Beginning}}, tokens(10, {4}));
  expect_ranks_equal_one(build, {{"layers.1", Beginning}, {"layers.0", Beginning}}, tokens(10, {4}));
  expect_ranks_equal_one(build, {{"layers.0", Beginning}, {"layers.1", Beginning}, {"layers.1", End}}, tokens(10, {4}));
}

TEST(SplitRanks, EncoderOnFour) {
  Inputs inputs = tokens(50, {6, 3});
  for (auto& input : inputs) input.push_back(torch::full({6, 6}, -INFINITY).triu(1));
  expect_ranks_equal_one([] { return Encoder(16, 4, 0.0); }, {{"enc.layers.1", Beginning}, {"enc.layers.2", Beginning}, {"enc.layers.2", End}}, inputs);
}

TEST(SplitRanks, LongSkipOnThree) {
  Inputs inputs;
  for (int i = 0; i < kMicroBatches; ++i) inputs.push_back({at::randn({2, 3, 8, 8}, at::detail::createCPUGenerator(40 + static_cast<uint64_t>(i)))});
  expect_ranks_equal_one([] { return LongSkip(); }, {{"blocks.1", Beginning}, {"blocks.3", Beginning}}, inputs);
}

/// The stem's output is used twice in stage 1 and once in the last: the terms of its gradient are added up in another order.
TEST(SplitRanks, LongSkipOnFiveAndEight) {
  Inputs inputs;
  for (int i = 0; i < kMicroBatches; ++i) inputs.push_back({at::randn({2, 3, 4, 4}, at::detail::createCPUGenerator(40 + static_cast<uint64_t>(i)))});
  const auto build = [] { return LongSkip(); };
  pipeline::SplitSpec splits{{"blocks.0", Beginning}, {"blocks.1", Beginning}, {"blocks.2", Beginning}, {"blocks.3", Beginning}};
  expect_ranks_equal_one(build, splits, inputs, /*tolerance=*/1e-5, {&schedules::one_f_one_b});
  splits.insert(splits.end(), {{"blocks.1.b", Beginning}, {"blocks.3.b", Beginning}, {"head", Beginning}});
  expect_ranks_equal_one(build, splits, inputs, /*tolerance=*/1e-5, {&schedules::one_f_one_b});
}

/// The first and the last stage on one rank: the tied weight is one tensor there.
TEST(SplitRanks, TwoStagesARank) {
  const pipeline::SplitSpec splits{{"layers.0", Beginning}, {"layers.1", Beginning}, {"layers.2", End}};
  const Generator looped = [](int ranks, int micro_batches) { return schedules::breadth_first(ranks, micro_batches, 2); };
  expect_ranks_equal_one([] { return Tied(); }, splits, tokens(20, {2, 5}), 1e-5, {looped, &schedules::zb_v, &schedules::v_half}, /*chunks=*/2);
}

/// Shifts by one row each, before and behind a layer whose weight gradients may come later: of a micro-batch of one row autograd makes these leaves' first
/// gradients of the memory of the layer's input's and output's.
struct ShiftedImpl : torch::nn::Module {
  ShiftedImpl() {
    register_module("fc", fc);
    before = register_parameter("before", torch::zeros({3, 4}));
    behind = register_parameter("behind", torch::zeros({3, 4}));
    for (const at::Tensor& shift : {before, behind}) nn::set_init(shift, nn::InitRule::normal(0, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return at::tanh(fc(x + before.unsqueeze(0)) + behind.unsqueeze(0)); }
  nn::Linear fc{4, 4};
  at::Tensor before, behind;
};
TORCH_MODULE(Shifted);

struct ShiftsImpl : torch::nn::Module {
  ShiftsImpl() {
    for (int i = 0; i < 6; ++i) blocks->push_back(Shifted());
    register_module("blocks", blocks);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Shifted>()->forward(x);
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Shifts);

TEST(SplitRanks, GradientsThatALeafHasTakenOverStayAsTheyWereForOthers) {
  const auto build = [] { return Shifts(); };
  Inputs inputs;
  for (int i = 0; i < 6; ++i) inputs.push_back({(at::arange(12, at::kFloat).view({1, 3, 4}) + i).sin()});
  const auto at_blocks = [](std::vector<int> blocks) {
    pipeline::SplitSpec splits;
    for (const int block : blocks) splits.push_back({detail::concat("blocks.", block), Beginning});
    return splits;
  };
  const std::vector<Generator> whole{&schedules::gpipe, &schedules::one_f_one_b, &schedules::zb_h1, &schedules::zb_h2};
  expect_ranks_equal_one(build, at_blocks({3}), inputs, 0, whole);
  expect_ranks_equal_one(build, at_blocks({1, 4}), inputs, 0, whole);
  const Generator loop = [](int ranks, int micro_batches) { return schedules::breadth_first(ranks, micro_batches, 2); };
  const Generator naive = [](int ranks, int micro_batches) { return schedules::naive(ranks, micro_batches, 2); };
  const Generator interleaved = [](int ranks, int micro_batches) { return schedules::interleaved(ranks, micro_batches, 2); };
  const std::vector<Generator> in_chunks{naive, loop, interleaved, &schedules::zb_v, &schedules::v_half, &schedules::dualpipev};
  expect_ranks_equal_one(build, at_blocks({3}), inputs, 0, in_chunks, 2);
  expect_ranks_equal_one(build, at_blocks({1, 3, 4}), inputs, 0, in_chunks, 2);
  expect_ranks_equal_one(build, at_blocks({1, 2, 3, 4, 5}), inputs, 0, in_chunks, 2);
}

TEST(SplitRanks, TiedEmbeddingSumsTheGradientsOfBothEnds) {
  expect_ranks_equal_one([] { return Tied(); }, {{"layers.1", Beginning}, {"layers.2", End}}, tokens(20, {2, 5}), /*tolerance=*/1e-5);
}

TEST(SplitRanks, MicroBatchesOfOtherShapes) {
  Inputs inputs;
  for (int64_t i = 0; i < kMicroBatches; ++i) inputs.push_back(tokens(10, {2 + i % 3})[0]);
  expect_ranks_equal_one([] { return Classic(); }, {{"layers.1", Beginning}}, inputs);
}

/// Nothing is sent back to a first stage of which it is said that it never trains, under whole backwards and halves; what stands behind it has the same bits.
TEST(SplitRanks, StagesThatAreNeverTrainedRunNoBackward) {
  const auto frozen = [] {
    Classic model;
    for (const auto& item : model->named_parameters()) item.value().set_requires_grad(!item.key().starts_with("emb") && !item.key().starts_with("layers.0"));
    return model;
  };
  const Inputs inputs = tokens(10, {4});
  auto whole = frozen();
  materialize(*whole, kSeed, testing_support::test_device());
  for (int i = 0; i < kMicroBatches; ++i) loss_of(forward_of(whole)(inputs[static_cast<size_t>(i)]), i).backward();
  const auto expected = whole->named_parameters();
  for (const Generator schedule : {&schedules::one_f_one_b, &schedules::zb_h1}) {
    comm::run_ranks(3, [&](comm::World& world) {
      auto model = on_meta(frozen);
      const auto split = pipeline::split(model, inputs[0], {{"layers.1", Beginning}, {"lm", Beginning}});
      EXPECT_TRUE(split.crossings()[0].takes_gradient) << "anything may be unfrozen";
      split.train_from(1);
      EXPECT_FALSE(split.crossings()[0].takes_gradient);
      EXPECT_TRUE(split.crossings()[1].takes_gradient);
      split.check_agreement(world.group());
      const auto own = split.module(world.rank());
      materialize(*own, kSeed, testing_support::test_device());
      pipeline::TracedStage stage(
          split, world.rank(), [&](int i) { return inputs[static_cast<size_t>(i)]; },
          [](int i, const std::vector<at::Tensor>& made) { return loss_of(made, i); });
      pipeline::Executor executor(schedule(3, kMicroBatches), split.crossings(), {{world.rank(), &stage}},
                                  {.ranks = world.group(), .device = testing_support::test_device()});
      executor.run();
      for (const auto& item : own->named_parameters()) {
        const at::Tensor& gradient = expected[item.key()].grad();
        ASSERT_EQ(item.value().grad().defined(), gradient.defined()) << item.key();
        if (gradient.defined()) EXPECT_TRUE(at::equal(item.value().grad(), gradient)) << item.key();
      }
      if (world.rank() > 0) return;
      own->parameters().front().set_requires_grad(true);
      EXPECT_THAT(refusal([&] { stage.forward(0, {}); }), HasSubstr("of stage 0 requires a gradient, and train_from(1) has said"));
    });
  }
}

/// Linear -> dropout, of the root's own -> Linear, and dropout by the root's own mode.
struct Dropping : torch::nn::Module {
  Dropping() {
    register_module("first", first);
    register_module("drop", drop);
    register_module("second", second);
  }
  at::Tensor forward(const at::Tensor& x) { return at::dropout(second(drop(first(x))), 0.5, is_training()); }
  torch::nn::Linear first{6, 6}, second{6, 6};
  torch::nn::Dropout drop{0.5};
};

/// What no stage owns, for it has no parameters, is in the mode of the stages that it is called in.
TEST(SplitRanks, AStageInEvaluationDropsNothing) {
  const at::Tensor x = at::randn({4, 6});
  const auto model = std::make_shared<Dropping>();
  const auto split = pipeline::split(model, {x}, {{"second", Beginning}});
  for (int number = 0; number < split.stages(); ++number) split.module(number)->eval();
  EXPECT_FALSE(model->drop->is_training());
  EXPECT_FALSE(model->is_training());
  for (int number = 0; number < split.stages(); ++number) split.module(number)->train();
  EXPECT_TRUE(model->drop->is_training());
  EXPECT_TRUE(model->is_training());
}

/// Every rank records the whole pass: where a rank holds one stage, the modules of the others go along; a stage that has its own module here has its own mode.
TEST(SplitRanks, TheModeOfAStageIsItsOwnWhereItsModuleIsHeld) {
  struct Net : torch::nn::Module {
    Net() {
      register_module("layers", layers);
      for (int i = 0; i < 2; ++i) layers->push_back(torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Dropout(0.5)));
    }
    at::Tensor forward(const at::Tensor& x) { return layers[1]->as<torch::nn::Sequential>()->forward(layers[0]->as<torch::nn::Sequential>()->forward(x)); }
    torch::nn::ModuleList layers;
  };
  const auto modes = [](const Net& model) {
    std::vector<bool> modes;
    for (size_t i = 0; i < 2; ++i) {
      for (const auto& module : model.layers->children()[i]->modules()) modes.push_back(module->is_training());
    }
    return modes;
  };
  const auto model = std::make_shared<Net>();
  const auto split = pipeline::split(model, {torch::ones({2, 4})}, {{"layers.1", Beginning}});
  const auto first = split.module(0);
  first->eval();
  EXPECT_EQ(modes(*model), std::vector<bool>(6, false));
  first->train();
  const auto second = split.module(1);
  first->eval();
  EXPECT_EQ(modes(*model), (std::vector<bool>{false, false, false, true, true, true}));
  EXPECT_FALSE(model->is_training());
  first->train();
  second->eval();
  EXPECT_EQ(modes(*model), (std::vector<bool>{true, true, true, false, false, false}));
  split.module({0, 1})->train();
  EXPECT_EQ(modes(*model), std::vector<bool>(6, true));
}

TEST(SplitRanks, DifferentGraphsAreRefusedOnEveryRank) {
  const auto run = [] {
    comm::run_ranks(2, [](comm::World& world) {
      const auto split = pipeline::split(on_meta([&] { return Encoder(16, 2 + world.rank(), 0.0); }), {torch::zeros({6, 3}, at::kLong), torch::zeros({6, 6})},
                                         {{"enc.layers.1", Beginning}});
      split.check_agreement(world.group());
    });
  };
  EXPECT_THAT(refusal(run), HasSubstr("ranks 0 and 1 of group 'world' have recorded different graphs of "));
}

}  // namespace
}  // namespace tessera
