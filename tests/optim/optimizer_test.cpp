#include "tessera/optim/optimizer.h"

#include <limits>
#include <optional>

#include <ATen/ops/full.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "tessera/core/error.h"
#include "tessera/kernels/adam8bit.h"
#include "tessera/kernels/lion.h"
#include "tessera/memory/memory.h"
#include "tessera/memory/on_host.h"
#include "tessera/optim/adamw.h"
#include "tessera/optim/clip.h"
#include "tessera/optim/sgd.h"
#include "tests/optim/parameters.h"

namespace tessera::optim {
namespace {

const std::vector<std::vector<int64_t>> kShapes{{5, 3}, {1}, {}, {17}, {2, 3, 4}, {0, 4}, {1, 1}, {64, 65}};

OptimConfig config_of(const std::string& name) {
  OptimConfig config;
  config.name = name;
  config.momentum = 0.9;
  config.weight_decay = 0.1;
  return config;
}

std::vector<at::Tensor> tensors_of(const std::vector<nn::NamedParameter>& parameters) {
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : parameters) tensors.push_back(parameter.tensor);
  return tensors;
}

std::unique_ptr<torch::optim::Optimizer> torch_optimizer(const std::string& name, const std::vector<nn::NamedParameter>& parameters) {
  const OptimConfig config = config_of(name);
  if (name == "adamw") {
    return std::make_unique<torch::optim::AdamW>(tensors_of(parameters), torch::optim::AdamWOptions(0).weight_decay(config.weight_decay));
  }
  return std::make_unique<torch::optim::SGD>(tensors_of(parameters), torch::optim::SGDOptions(0).momentum(*config.momentum).weight_decay(config.weight_decay));
}

void set_lr(torch::optim::Optimizer& optimizer, double lr) {
  for (auto& group : optimizer.param_groups()) group.options().set_lr(lr);
}

void expect_close(const std::vector<nn::NamedParameter>& actual, const std::vector<nn::NamedParameter>& expected) {
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_TRUE(at::allclose(actual[i].tensor, expected[i].tensor, 1e-6, 1e-7)) << actual[i].name << "\n" << actual[i].tensor << expected[i].tensor;
  }
}

class EveryOptimizer : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Kinds, EveryOptimizer, testing::Values("adamw", "sgd", "lion", "adafactor", "adam8bit", "muon"));

/// Those that libtorch has; the others are held against their papers' formulas (references_test.cpp).
class TorchOptimizer : public EveryOptimizer {};
INSTANTIATE_TEST_SUITE_P(Kinds, TorchOptimizer, testing::Values("adamw", "sgd"));

TEST_P(TorchOptimizer, AgreesWithTorch) {
  const auto ours = make_parameters(kShapes), theirs = make_parameters(kShapes);
  const auto optimizer = make_optimizer(config_of(GetParam()), ours, plain_model(ours));
  EXPECT_EQ(optimizer->kind(), GetParam());
  const auto reference = torch_optimizer(GetParam(), theirs);
  for (int step = 1; step <= 10; ++step) {
    draw_gradients(ours, step);
    draw_gradients(theirs, step);
    const double lr = 0.1 / step;
    optimizer->step(lr);
    set_lr(*reference, lr);
    reference->step();
  }
  expect_close(ours, theirs);
}

/// By which autograd refuses a graph that was made before.
TEST_P(EveryOptimizer, AnUpdateShowsInAParametersVersion) {
  const auto parameters = make_parameters(kShapes);
  const auto optimizer = make_optimizer(config_of(GetParam()), parameters, plain_model(parameters));
  const auto versions = [&] {
    std::vector<int64_t> now;
    for (const auto& parameter : parameters) now.push_back(parameter.tensor._version());
    return now;
  };
  draw_gradients(parameters, 1);
  parameters[3].tensor.mutable_grad().reset();
  const auto before = versions();
  optimizer->step(0.1);
  const auto behind = versions();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].tensor.numel() > 0) EXPECT_EQ(behind[i] > before[i], i != 3) << parameters[i].name;
  }
}

// On an accelerator the operators decide by the flag, and the host learns of it later.
TEST_P(EveryOptimizer, AStepIsSkippedByWhatTheNormSays) {
  const auto ours = make_parameters(kShapes), reference = make_parameters(kShapes);
  const auto skipping = make_optimizer(config_of(GetParam()), ours, plain_model(ours)),
             plain = make_optimizer(config_of(GetParam()), reference, plain_model(reference));
  const auto norm = [](double value) { return not_finite(at::full({}, value, at::TensorOptions(testing_support::test_device()).dtype(at::kDouble))); };
  const auto flag = [&](double value) { return norm(value).cpu().item<float>(); };
  EXPECT_EQ(flag(1e300), 0);
  EXPECT_EQ(flag(std::numeric_limits<double>::infinity()), 1);
  EXPECT_EQ(flag(std::numeric_limits<double>::quiet_NaN()), 1);
  for (int step = 1; step <= 4; ++step) {
    draw_gradients(ours, step);
    draw_gradients(reference, step);
    const bool skip = step == 1 || step == 3;
    const auto counts = skipping->update_counts();
    skipping->step(0.1, norm(skip ? std::numeric_limits<double>::quiet_NaN() : 1));
    if (skip) skipping->take_back_count();
    if (skip) EXPECT_EQ(skipping->update_counts(), counts);
    if (!skip) plain->step(0.1);
  }
  EXPECT_EQ(skipping->update_counts(), plain->update_counts());
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i].tensor, reference[i].tensor)) << ours[i].name;
  const auto got = skipping->state(), want = plain->state();
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i].tensor, want[i].tensor)) << got[i].parameter << "." << got[i].state;
}

TEST_P(EveryOptimizer, ScalesGradientsAsClippingBeforeItDoes) {
  const auto ours = make_parameters(kShapes), clipped = make_parameters(kShapes);
  const auto optimizer = make_optimizer(config_of(GetParam()), ours, plain_model(ours)),
             reference = make_optimizer(config_of(GetParam()), clipped, plain_model(clipped));
  for (int step = 1; step <= 3; ++step) {
    draw_gradients(ours, step);
    draw_gradients(clipped, step);
    const at::Tensor before = ours[0].tensor.grad().clone(), factor = clip_factor(global_norm(ours), step == 2 ? 1e9 : 0.7);
    optimizer->step(0.1, not_finite(global_norm(ours)), factor);
    scale_gradients(clipped, factor);
    reference->step(0.1);
    if (optimizer->updates_in_one_pass() && factor.is_cpu()) EXPECT_TRUE(at::equal(ours[0].tensor.grad(), before)) << "gradients are read";
  }
  for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i].tensor, clipped[i].tensor)) << ours[i].name;
  const auto got = optimizer->state(), want = reference->state();
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i].tensor, want[i].tensor)) << got[i].parameter << "." << got[i].state;
}

/// What the pass does not know is multiplied before it.
TEST(AdamW, ScalesGradientsOfEveryType) {
  for (const auto dtype : {at::kDouble, at::kBFloat16}) {
    const auto make = [&] {
      std::vector<nn::NamedParameter> parameters = make_parameters({{5, 3}, {40}});
      for (auto& parameter : parameters) parameter.tensor = parameter.tensor.detach().to(dtype).requires_grad_(true);
      return parameters;
    };
    const auto ours = make(), scaled = make();
    AdamW optimizer(decay_groups(ours, "all", 0.1)), reference(decay_groups(scaled, "all", 0.1));
    draw_gradients(ours, 1);
    draw_gradients(scaled, 1);
    const at::Tensor factor = at::full({}, 0.25, ours[0].tensor.options().dtype(at::kDouble).requires_grad(false));
    optimizer.step(0.1, {}, factor);
    for (const auto& parameter : scaled) at::Tensor(parameter.tensor).mutable_grad().mul_(0.25);
    reference.step(0.1);
    for (size_t i = 0; i < ours.size(); ++i) EXPECT_TRUE(at::equal(ours[i].tensor, scaled[i].tensor)) << dtype;
  }
}

TEST_P(EveryOptimizer, UpdatesAParameterWithGapsAndNothingBesideIt) {
  const at::Tensor table = make_parameters({{6, 8}})[0].tensor.detach(), before = table.clone();
  const std::vector<nn::NamedParameter> ours{{"p0", table.narrow(1, 2, 3).detach().requires_grad_(), {}}};
  const std::vector<nn::NamedParameter> whole{{"p0", before.narrow(1, 2, 3).contiguous().requires_grad_(), {}}};
  const auto optimizer = make_optimizer(config_of(GetParam()), ours, plain_model(ours)),
             reference = make_optimizer(config_of(GetParam()), whole, plain_model(whole));
  for (int step = 1; step <= 3; ++step) {
    draw_gradients(ours, step);
    draw_gradients(whole, step);
    optimizer->step(0.1);
    reference->step(0.1);
  }
  EXPECT_TRUE(at::equal(ours[0].tensor, whole[0].tensor));
  for (const auto& [first, count] : {std::pair{0, 2}, {5, 3}}) EXPECT_TRUE(at::equal(table.narrow(1, first, count), before.narrow(1, first, count)));
}

TEST_P(TorchOptimizer, LeavesParametersWithoutGradientAlone) {
  const auto ours = make_parameters({{3, 2}, {4}}), theirs = make_parameters({{3, 2}, {4}});
  const auto optimizer = make_optimizer(config_of(GetParam()), ours, plain_model(ours));
  const auto reference = torch_optimizer(GetParam(), theirs);
  set_lr(*reference, 0.1);
  for (int step = 1; step <= 6; ++step) {
    draw_gradients(ours, step);
    draw_gradients(theirs, step);
    if (step % 3 == 0) {
      ours[1].tensor.mutable_grad().reset();
      theirs[1].tensor.mutable_grad().reset();
    }
    optimizer->step(0.1);
    reference->step();
  }
  expect_close(ours, theirs);
  EXPECT_EQ(optimizer->update_counts(), (std::map<std::string, int64_t>{{"p0", 6}, {"p1", 4}}));
}

TEST_P(EveryOptimizer, GoesOnBitForBitFromItsState) {
  const auto whole = make_parameters(kShapes), first = make_parameters(kShapes), second = make_parameters(kShapes);
  const auto uninterrupted = make_optimizer(config_of(GetParam()), whole, plain_model(whole));
  const auto before = make_optimizer(config_of(GetParam()), first, plain_model(first));
  const auto after = make_optimizer(config_of(GetParam()), second, plain_model(second));
  const auto run = [](Optimizer& optimizer, const std::vector<nn::NamedParameter>& parameters, int from, int to) {
    for (int step = from; step <= to; ++step) {
      draw_gradients(parameters, step);
      if (step == 2) parameters[0].tensor.mutable_grad().reset();
      optimizer.step(0.05);
    }
  };
  run(*uninterrupted, whole, 1, 8);
  run(*before, first, 1, 4);

  const c10::NoGradGuard no_grad;
  auto saved = before->state(), loaded = after->state();
  ASSERT_EQ(saved.size(), loaded.size());
  for (size_t i = 0; i < saved.size(); ++i) {
    EXPECT_EQ(saved[i].parameter + saved[i].state, loaded[i].parameter + loaded[i].state);
    loaded[i].tensor.copy_(saved[i].tensor);
  }
  for (size_t i = 0; i < first.size(); ++i) at::Tensor(second[i].tensor).copy_(first[i].tensor);
  after->set_update_counts(before->update_counts());
  run(*after, second, 5, 8);
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(whole[i].tensor, second[i].tensor)) << whole[i].name;
}

TEST_P(EveryOptimizer, TakesTheSameMemoryOnMeta) {
  const auto measure = [](at::Device device, std::vector<int64_t>& at_end) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    const auto parameters = make_parameters(kShapes, device);
    const auto optimizer = make_optimizer(config_of(GetParam()), parameters, plain_model(parameters));
    at_end.push_back(tracker.current(MemoryCategory::Optimizer));
    for (int step = 1; step <= 2; ++step) {
      draw_gradients(parameters, step);
      optimizer->step(0.1);
    }
    at_end.push_back(tracker.current());
    at_end.push_back(tracker.peak());
  };
  std::vector<int64_t> real, dry;
  measure(testing_support::test_device(), real);
  std::optional<MetaAsAccelerator> device;
  if (!testing_support::test_device().is_cpu()) device.emplace();
  measure(at::kMeta, dry);
  EXPECT_EQ(real, dry);
  EXPECT_GT(real[0], GetParam() == "adafactor" ? 4 * (64 + 65) : GetParam() == "adam8bit" ? 2 * 64 * 65 : 4 * 64 * 65);
}

/// By operators, which take memory of their own.
TEST(UpdatesByPieces, TakeAsMuchMemoryAtMost) {
  const MetaAsAccelerator device;
  for (const std::string name : {"lion", "adam8bit"}) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    const auto parameters = make_parameters({{10'000, 100'000}}, at::kMeta);
    const auto optimizer = make_optimizer(config_of(name), parameters, plain_model(parameters));
    draw_gradients(parameters, 1);
    tracker.reset_peak();
    const int64_t before = tracker.current();
    optimizer->step(0.1);
    const int64_t scales = name == "adam8bit" ? 2 * 4 * 1'000'000'000LL / kernels::kAdam8bitBlock : 0;
    EXPECT_GT(tracker.peak() - before, 100'000'000) << name;
    EXPECT_LE(tracker.peak() - before, 256'000'000 + scales) << name;
  }
}

TEST(UpdatesByPieces, OfLionMissNoElement) {
  const auto made = [](double value) { return at::full({34'000'000}, value, at::kBFloat16); };
  const at::Tensor parameter = made(1), exp_avg = made(0);
  kernels::lion_(parameter, made(1), exp_avg, {.lr = 0.5, .beta2 = 0.75});
  EXPECT_TRUE(parameter.eq(0.5).all().item<bool>());
  EXPECT_TRUE(exp_avg.eq(0.25).all().item<bool>());
}

/// A state of 8-bit Adam after two updates of `runs`.
struct UpdatedRuns {
  UpdatedRuns(const at::Tensor& values, const at::Tensor& gradient, const std::vector<kernels::QuantizedRun>& runs) : parameter(values.clone()) {
    const auto zeros = [](int64_t size, at::ScalarType dtype) { return at::zeros({size}, dtype); };
    const int64_t held = runs.back().first_scale + runs.back().blocks(), all = runs.back().first_block() + runs.back().blocks();
    state = {.exp_avg = zeros(values.numel(), at::kByte),
             .exp_avg_sq = zeros(values.numel(), at::kByte),
             .exp_avg_scale = zeros(held, at::kFloat),
             .exp_avg_sq_scale = zeros(held, at::kFloat)};
    for (int64_t update = 1; update <= 2; ++update) {
      const kernels::Adam8bitStep step{.lr = 0.1, .weight_decay = 0.01, .step = update};
      const at::Tensor scale = zeros(all, at::kFloat), sq_scale = zeros(all, at::kFloat);
      kernels::adam8bit_scales(gradient, state, runs, step, scale, sq_scale);
      kernels::adam8bit_update_(parameter, gradient, state, runs, step, scale, sq_scale);
    }
  }
  /// Its last `count` elements and what is kept of them.
  std::vector<at::Tensor> end(int64_t count, int64_t blocks) const {
    const auto last = [](const at::Tensor& all, int64_t count) { return all.narrow(0, all.numel() - count, count); };
    return {last(parameter, count), last(state.exp_avg, count), last(state.exp_avg_sq, count), last(state.exp_avg_scale, blocks),
            last(state.exp_avg_sq_scale, blocks)};
  }
  at::Tensor parameter;
  kernels::Adam8bitState state;
};

kernels::QuantizedRun run_of(int64_t offset, int64_t count, int64_t first_index, int64_t first_scale) {
  return {{offset, count, static_cast<uint64_t>(first_index)}, first_scale};
}

/// The end of a tensor is updated as if a rank held it alone, though a piece ends in it, within a block.
TEST(UpdatesByPieces, OfAdam8bitHaveTheBitsOfAPart) {
  constexpr int64_t kAll = (int64_t{1} << 22) + 900, kFirst = 100, kBlock = kernels::kAdam8bitBlock, kPart = 5 * kBlock + (kFirst + kAll) % kBlock;
  at::manual_seed(3);
  const at::Tensor values = at::randn({kAll}), gradient = at::randn({kAll});
  const auto part_of = [&](const at::Tensor& all) { return all.narrow(0, kAll - kPart, kPart).clone(); };
  const UpdatedRuns whole(values, gradient, {run_of(0, kAll, kFirst, 0)});
  const UpdatedRuns part(part_of(values), part_of(gradient), {run_of(0, kPart, kFirst + kAll - kPart, 0)});
  constexpr int64_t kBlocks = (kPart + kBlock - 1) / kBlock;
  for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(at::equal(whole.end(kPart, kBlocks)[i], part.end(kPart, kBlocks)[i])) << i;
}

/// A rank may hold a tensor's first and third part: the third's blocks are as when it is held alone.
TEST(UpdatesByPieces, OfAdam8bitKnowWhereEachRunLies) {
  constexpr int64_t kBlock = kernels::kAdam8bitBlock, kFront = 2 * kBlock + 17, kLater = 7 * kBlock + 5, kPart = kBlock + 90;
  at::manual_seed(5);
  const at::Tensor values = at::randn({kFront + kPart}), gradient = at::randn({kFront + kPart});
  const auto part_of = [&](const at::Tensor& all) { return all.narrow(0, kFront, kPart).clone(); };
  const UpdatedRuns both(values, gradient, {run_of(0, kFront, 0, 0), run_of(kFront, kPart, kLater, 3)});
  const UpdatedRuns alone(part_of(values), part_of(gradient), {run_of(0, kPart, kLater, 0)});
  for (size_t i = 0; i < 5; ++i) EXPECT_TRUE(at::equal(both.end(kPart, 2)[i], alone.end(kPart, 2)[i])) << i;
}

TEST_P(TorchOptimizer, StateIsNamedAndSlicedLikeItsParameter) {
  const auto parameters = make_parameters({{4, 3}});
  nn::set_slice(parameters[0].tensor, Slice::along("w", {10, 3}, 0, 2, 4));
  const auto state = make_optimizer(config_of(GetParam()), parameters, plain_model(parameters))->state();
  std::vector<std::string> names;
  for (const auto& each : state) {
    names.push_back(each.state);
    EXPECT_EQ(each.parameter, "p0");
    EXPECT_EQ(each.slice, Slice::along("w", {10, 3}, 0, 2, 4));
    EXPECT_EQ(each.tensor.sizes(), parameters[0].tensor.sizes());
  }
  EXPECT_EQ(names, (GetParam() == "adamw" ? std::vector<std::string>{"exp_avg", "exp_avg_sq"} : std::vector<std::string>{"momentum_buffer"}));
}

TEST_P(EveryOptimizer, NeedsNoParameters) { make_optimizer(config_of(GetParam()), {})->step(0.1); }

TEST_P(EveryOptimizer, StateOfAFrozenParameterComesWithItsFirstGradient) {
  auto parameters = make_parameters({{5, 3}, {4, 2}});
  parameters[1].tensor.set_requires_grad(false);
  const auto optimizer = make_optimizer(config_of(GetParam()), parameters, plain_model(parameters));
  const size_t states = optimizer->state().size();
  draw_gradients(parameters, 0);
  parameters[1].tensor.mutable_grad() = at::Tensor();
  optimizer->step(0.1);
  EXPECT_EQ(optimizer->state().size(), states);
  draw_gradients(parameters, 1);
  optimizer->step(0.1);
  EXPECT_EQ(optimizer->state().size(), 2 * states);

  auto again = make_parameters({{5, 3}, {4, 2}});
  again[1].tensor.set_requires_grad(false);
  const auto resumed = make_optimizer(config_of(GetParam()), again, plain_model(again));
  resumed->hold_state(optimizer->update_counts());
  EXPECT_EQ(resumed->state().size(), 2 * states);
}

TEST(Optimizer, SgdWithoutMomentumHasNoState) {
  const auto ours = make_parameters({{3}});
  OptimConfig config = config_of("sgd");
  config.momentum = 0;
  config.weight_decay = 0;
  const auto optimizer = make_optimizer(config, ours);
  EXPECT_TRUE(optimizer->state().empty());
  draw_gradients(ours, 1);
  const auto expected = (ours[0].tensor - 0.5 * ours[0].tensor.grad()).detach();
  optimizer->step(0.5);
  EXPECT_TRUE(at::allclose(ours[0].tensor, expected));
}

TEST(Optimizer, DecaysMatricesOnlyWhereAsked) {
  const auto parameters = make_parameters({{4, 3}, {3}, {6}, {}});
  nn::set_slice(parameters[2].tensor, Slice{"flat shard", {4, 3}, {Box{{0, 0}, {2, 3}}}});
  const auto names = [](const ParameterGroup& group) {
    std::vector<std::string> list;
    for (const auto& parameter : group.parameters) list.push_back(parameter.name);
    return list;
  };
  OptimConfig config = config_of("adamw");
  const auto all = make_optimizer(config, parameters)->groups();
  ASSERT_EQ(all.size(), 1);
  EXPECT_THAT(names(all[0]), testing::ElementsAre("p0", "p1", "p2", "p3"));
  config.decay_on = "matrices";
  const auto matrices = make_optimizer(config, parameters)->groups();
  ASSERT_EQ(matrices.size(), 2);
  EXPECT_THAT(names(matrices[0]), testing::ElementsAre("p0", "p2"));
  EXPECT_EQ(matrices[0].weight_decay, 0.1);
  EXPECT_THAT(names(matrices[1]), testing::ElementsAre("p1", "p3"));
  EXPECT_EQ(matrices[1].weight_decay, 0);
  config.decay_on = "none";
  EXPECT_THROW(make_optimizer(config, parameters), ConfigError);
}

TEST(Optimizer, UndecayedParametersDoNotMoveWithoutGradient) {
  const auto parameters = make_parameters({{4, 3}, {3}});
  OptimConfig config = config_of("adamw");
  config.decay_on = "matrices";
  const auto optimizer = make_optimizer(config, parameters);
  for (const auto& parameter : parameters) at::Tensor(parameter.tensor).mutable_grad() = at::zeros_like(parameter.tensor);
  const auto matrix = parameters[0].tensor.detach().clone(), vector = parameters[1].tensor.detach().clone();
  optimizer->step(0.5);
  EXPECT_TRUE(at::allclose(parameters[0].tensor, matrix * (1 - 0.5 * 0.1)));
  EXPECT_TRUE(at::equal(parameters[1].tensor, vector));
}

TEST(Optimizer, TakesGradientsOfOtherStrides) {
  const auto ours = make_parameters({{4, 3}}), theirs = make_parameters({{4, 3}});
  draw_gradients(ours, 1);
  draw_gradients(theirs, 1);
  at::Tensor(ours[0].tensor).mutable_grad() = theirs[0].tensor.grad().t().contiguous().t();
  make_optimizer(config_of("adamw"), ours)->step(0.1);
  make_optimizer(config_of("adamw"), theirs)->step(0.1);
  EXPECT_TRUE(at::equal(ours[0].tensor, theirs[0].tensor));
}

/// Names are those of the parameters, with and without paths; the root may be on the stack.
TEST(WholeModel, KnowsWhatIsLookedUpInPlainModules) {
  struct Plain : torch::nn::Module {
    Plain() {
      register_module("words", words);
      register_module("bags", bags);
      register_module("hidden", hidden);
    }
    torch::nn::Embedding words{5, 3};
    torch::nn::EmbeddingBag bags{4, 3};
    torch::nn::Linear hidden{3, 3};
  } plain;
  const WholeModel whole = whole_model(plain);
  std::vector<std::string> names;
  for (const Slice& parameter : whole.parameters) names.push_back(parameter.name);
  EXPECT_THAT(names, testing::ElementsAre("words.weight", "bags.weight", "hidden.weight", "hidden.bias"));
  EXPECT_THAT(whole.looked_up, testing::ElementsAre("bags.weight", "words.weight"));
  EXPECT_THAT(whole.heads, testing::IsEmpty());
  EXPECT_FALSE(whole.meets());
}

TEST(Optimizer, RefusesWhatItCannotDo) {
  const auto parameters = make_parameters({{2}});
  EXPECT_THAT([&] { make_optimizer(config_of("came"), parameters); }, testing::ThrowsMessage<ConfigError>(testing::HasSubstr("optim.name = came")));
  EXPECT_THROW(make_optimizer(config_of("adamw"), {parameters[0], parameters[0]}), InternalError);
  EXPECT_THAT([&] { make_optimizer(config_of("adamw"), parameters)->set_update_counts({{"other", 1}}); },
              testing::ThrowsMessage<ConfigError>(testing::AllOf(testing::HasSubstr("missing p0"), testing::HasSubstr("unknown other"))));
}

/// State lies as the numbers do that it is of, so that it goes on under whoever has them in rows.
TEST_P(EveryOptimizer, StateOfAParameterOfOtherStridesIsItsOwn) {
  const at::Tensor values = at::randn({4, 6});
  const std::vector<nn::NamedParameter> ours{{"p0", values.t().contiguous().t().requires_grad_(), {}}}, rows{{"p0", values.clone().requires_grad_(), {}}};
  const auto a = make_optimizer(config_of(GetParam()), ours, plain_model(ours)), b = make_optimizer(config_of(GetParam()), rows, plain_model(rows));
  for (int step = 1; step <= 3; ++step) {
    draw_gradients(ours, step);
    rows[0].tensor.mutable_grad() = ours[0].tensor.grad().contiguous();
    a->step(0.1);
    b->step(0.1);
  }
  EXPECT_TRUE(at::allclose(ours[0].tensor, rows[0].tensor, 1e-5, 1e-6));
  const auto mine = a->state(), want = b->state();
  ASSERT_EQ(mine.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) EXPECT_TRUE(at::allclose(mine[i].tensor, want[i].tensor, 1e-5, 1e-7)) << want[i].state;
}

/// torch::load of a file, or set_data, may give a parameter memory of other strides.
TEST_P(EveryOptimizer, FollowsAParameterThatIsGivenOtherStrides) {
  const auto ours = make_parameters({{4, 6}}), plain = make_parameters({{4, 6}});
  const auto optimizer = make_optimizer(config_of(GetParam()), ours, plain_model(ours)),
             reference = make_optimizer(config_of(GetParam()), plain, plain_model(plain));
  for (int step = 0; step < 6; ++step) {
    if (step == 3) {
      at::Tensor tensor = ours[0].tensor;
      tensor.set_data(tensor.detach().t().contiguous().t());
    }
    draw_gradients(ours, step);
    draw_gradients(plain, step);
    optimizer->step(0.05);
    reference->step(0.05);
  }
  EXPECT_TRUE(at::allclose(ours[0].tensor, plain[0].tensor, 1e-5, 1e-6)) << ours[0].tensor << plain[0].tensor;
}

TEST_P(EveryOptimizer, RefusesAParameterThatHasAnotherSizeByNow) {
  for (const std::vector<int64_t>& now : {std::vector<int64_t>{7, 6}, {2, 6}}) {
    const auto parameters = make_parameters({{4, 6}});
    const auto optimizer = make_optimizer(config_of(GetParam()), parameters, plain_model(parameters));
    draw_gradients(parameters, 1);
    optimizer->step(0.1);
    at::Tensor tensor = parameters[0].tensor;
    tensor.mutable_grad() = at::Tensor();
    tensor.set_data(at::ones(now));
    draw_gradients(parameters, 2);
    EXPECT_THAT([&] { optimizer->step(0.1); }, testing::ThrowsMessage<ConfigError>(testing::HasSubstr("'p0' has the shape ")));
  }
}

}  // namespace
}  // namespace tessera::optim
