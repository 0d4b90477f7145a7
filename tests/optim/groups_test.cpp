#include "tessera/optim/groups.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tessera/optim/several.h"
#include "tests/optim/parameters.h"
#include "tests/refusal.h"

// Groups beside optimizers that were made apart, one for each.

namespace tessera::optim {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

std::vector<nn::NamedParameter> named_parameters() {
  auto parameters = make_parameters({{11, 6}, {6, 5}, {5}, {6, 7}, {7}, {3, 11}});
  const std::vector<std::string> names{"embed.weight",       "layers.0.wq.weight",   "layers.0.norm.weight",
                                       "layers.1.wq.weight", "layers.1.norm.weight", "head.weight"};
  for (size_t i = 0; i < names.size(); ++i) parameters[i].name = names[i];
  return parameters;
}

OptimConfig grouped_config() {
  OptimConfig config;
  config.lr = 0.02;
  config.weight_decay = 0.1;
  config.groups = {"layers.*.norm: weight_decay = 0, lr_factor = 0.5", "embed: name = lion, lr = 0.004, betas = [0.9, 0.99]", "layers.1: eps = 1e-3"};
  return config;
}

/// Each parameter's settings, written out.
struct Alone {
  std::string name = "adamw";
  double lr = 0.02, weight_decay = 0.1, eps = 1e-8;
  Betas betas{0.9, 0.999};
};
const std::vector<Alone> kAlone{
    {.name = "lion", .lr = 0.004, .betas = {0.9, 0.99}}, {}, {.lr = 0.01, .weight_decay = 0}, {.eps = 1e-3}, {.lr = 0.01, .weight_decay = 0}, {}};

TEST(Groups, AreOptimizersOfTheirOwn) {
  const auto together = named_parameters(), apart = named_parameters();
  const auto optimizer = make_optimizer(grouped_config(), together);
  EXPECT_EQ(optimizer->kind(), "adamw");
  std::vector<std::unique_ptr<Optimizer>> alone;
  for (size_t i = 0; i < apart.size(); ++i) {
    OptimConfig config;
    std::tie(config.name, config.weight_decay, config.eps, config.betas) = std::tie(kAlone[i].name, kAlone[i].weight_decay, kAlone[i].eps, kAlone[i].betas);
    alone.push_back(make_optimizer(config, {apart[i]}));
  }
  for (int step = 1; step <= 5; ++step) {
    draw_gradients(together, step);
    draw_gradients(apart, step);
    if (step == 3) at::Tensor(together[3].tensor).mutable_grad().reset();
    const double schedule = 1.0 / step;
    optimizer->step(0.02 * schedule);
    for (size_t i = 0; i < apart.size(); ++i) {
      if (step != 3 || i != 3) alone[i]->step(kAlone[i].lr * schedule);
    }
  }
  for (size_t i = 0; i < apart.size(); ++i) EXPECT_TRUE(at::allclose(together[i].tensor, apart[i].tensor, 1e-6, 1e-7)) << apart[i].name;
  EXPECT_EQ(optimizer->update_counts().at("layers.1.wq.weight"), 4);
  EXPECT_EQ(optimizer->update_counts().at("embed.weight"), 5);
  EXPECT_EQ(optimizer->update_counts().size(), apart.size());
}

TEST(Groups, GoOnFromTheirStateAndTakeAStepBack) {
  const auto first = named_parameters(), second = named_parameters();
  const auto before = make_optimizer(grouped_config(), first), after = make_optimizer(grouped_config(), second);
  for (int step = 1; step <= 2; ++step) {
    draw_gradients(first, step);
    before->step(0.02);
  }
  after->hold_state(before->update_counts());
  after->set_update_counts(before->update_counts());
  const auto saved = before->state();
  for (size_t i = 0; i < saved.size(); ++i) {
    const auto target = after->state()[i];
    EXPECT_EQ(target.parameter + target.state, saved[i].parameter + saved[i].state);
    at::Tensor(target.tensor).copy_(saved[i].tensor);
  }
  for (size_t i = 0; i < first.size(); ++i) second[i].tensor.detach().copy_(first[i].tensor.detach());
  const auto counts = after->update_counts();
  after->step(0.02, at::ones({1}));  // skipped
  after->take_back_count();
  EXPECT_EQ(after->update_counts(), counts);
  draw_gradients(first, 3);
  draw_gradients(second, 3);
  before->step(0.02);
  after->step(0.02);
  for (size_t i = 0; i < first.size(); ++i) EXPECT_TRUE(at::equal(first[i].tensor, second[i].tensor)) << first[i].name;
  EXPECT_THAT(testing_support::refusal([&] { after->set_update_counts({{"embed.weight", 1}}); }), HasSubstr("missing head.weight"));
}

TEST(Groups, ShareAnOptimizerWhereOnlyRatesAndDecayDiffer) {
  OptimConfig config = grouped_config();
  config.groups.erase(config.groups.begin() + 1, config.groups.end());
  const auto parameters = named_parameters();
  const auto shares = deal_groups(config, parameters, {});
  ASSERT_EQ(shares.size(), 1);
  ASSERT_EQ(shares[0].groups.size(), 2);
  EXPECT_EQ(shares[0].groups[1].lr_factor, 0.5);
  EXPECT_EQ(shares[0].groups[1].parameters.size(), 2);
}

TEST(Groups, AreDealtAlikeOnARankThatHasNoneOfTheirs) {
  const auto parameters = named_parameters();
  WholeModel model;
  for (const auto& parameter : parameters) model.parameters.push_back(Slice::whole(parameter.name, parameter.tensor.sizes().vec()));
  const auto shares = deal_groups(grouped_config(), {parameters[5]}, model);
  ASSERT_EQ(shares.size(), 3);
  EXPECT_EQ(shares[0].settings.name, "lion");
  EXPECT_TRUE(shares[0].groups.empty());
  EXPECT_EQ(shares[0].model.parameters.size(), 1);
  EXPECT_EQ(shares[1].groups.size(), 1);
  EXPECT_EQ(shares[1].model.parameters.size(), 4);
}

TEST(Groups, TheFirstThatMatchesCountsAndDecayOfVectorsIsTheSections) {
  OptimConfig config = grouped_config();
  config.decay_on = "matrices";
  config.groups = {"**.wq: lr_factor = 2", "layers: lr_factor = 3", "layers.1.norm: weight_decay = 0.3", "head: weight_decay = 0.2"};
  const auto groups = optim_groups(config);
  EXPECT_EQ(settings_of(config, groups, "layers.0.wq.weight", 2).lr_factor, 2);
  EXPECT_EQ(settings_of(config, groups, "layers.0.norm.weight", 1).lr_factor, 3);
  EXPECT_EQ(settings_of(config, groups, "layers.0.norm.weight", 1).settings.weight_decay, 0) << "decay_on = matrices, and its group says nothing";
  EXPECT_EQ(settings_of(config, groups, "head.bias", 1).settings.weight_decay, 0.2) << "its group says so";
  EXPECT_EQ(settings_of(config, groups, "embed.weight", 2).lr_factor, 1);
}

TEST(Groups, ThatAreOfNothingAreRefused) {
  OptimConfig config = grouped_config();
  const auto parameters = named_parameters();
  EXPECT_NO_THROW(check_groups(config, parameters));
  config.groups = {"layer.*.norm: weight_decay = 0"};
  EXPECT_THAT(testing_support::refusal([&] { check_groups(config, parameters); }),
              AllOf(HasSubstr("'layer.*.norm' matches no module and no parameter"), HasSubstr("'layers.0.norm'")));
  config.groups = {"layers: lr_factor = 2", "**.norm: weight_decay = 0"};
  EXPECT_THAT(testing_support::refusal([&] { check_groups(config, parameters); }), AllOf(HasSubstr("'**.norm'"), HasSubstr("groups before it")));
}

/// In a program nobody has looked before.
TEST(Groups, ThatAreOfNothingAreRefusedWhereAnOptimizerIsMade) {
  OptimConfig config = grouped_config();
  auto parameters = named_parameters();
  parameters[0].aliases = {"tied.weight"};
  const auto refusal = [&](const std::vector<nn::NamedParameter>& given, const WholeModel& model) {
    return testing_support::refusal([&] { make_optimizer(config, given, model); });
  };
  WholeModel whole;
  for (const auto& parameter : parameters) whole.parameters.push_back(Slice::whole(parameter.name, parameter.tensor.sizes().vec()));
  config.groups = {"layer.*.norm: weight_decay = 0"};
  for (const WholeModel& model : {WholeModel(), whole}) {
    EXPECT_THAT(refusal(parameters, model), AllOf(HasSubstr("'layer.*.norm' matches no module and no parameter"), HasSubstr("of_more")));
  }
  config.groups = {"tied: lr_factor = 2"};
  for (const WholeModel& model : {WholeModel(), whole}) {
    EXPECT_THAT(refusal(parameters, model), AllOf(HasSubstr("'tied' matches 'tied.weight' alone, which is tied to 'embed.weight'"), HasSubstr("name that")));
  }
  config.groups = {"**.norm: weight_decay = 0"};
  const std::vector<nn::NamedParameter> stage{parameters[0]};
  EXPECT_THAT(refusal(stage, {}), HasSubstr("'**.norm' matches no"));
  EXPECT_NO_THROW(make_optimizer(config, stage, whole)) << "on a rank that has none of them";
  EXPECT_NO_THROW(make_optimizer(config, stage, {.of_more = true}));
}

TEST(Groups, NumbersOutOfRangeAreRefusedWhereAnOptimizerIsMade) {
  const auto refusal = [](const auto& change) {
    OptimConfig config = grouped_config();
    change(config);
    return testing_support::refusal([&] { make_optimizer(config, named_parameters()); });
  };
  EXPECT_THAT(refusal([](OptimConfig& c) { c.betas[1] = 1; }), HasSubstr("optim.betas = [0.9, 1"));
  EXPECT_THAT(refusal([](OptimConfig& c) { c.weight_decay = -0.1; }), HasSubstr("optim.weight_decay = -0.1"));
  EXPECT_THAT(refusal([](OptimConfig& c) { c.groups = {"head: eps = 0"}; }), AllOf(HasSubstr("\"head: eps = 0\""), HasSubstr("optim.eps = 0")));
}

TEST(Groups, OfWhatIsFrozenAreNamed) {
  OptimConfig config = grouped_config();
  const auto parameters = named_parameters();
  EXPECT_THAT(groups_without_effect(config, parameters), ::testing::IsEmpty());
  for (const size_t i : {0, 3, 4}) at::Tensor(parameters[i].tensor).requires_grad_(false);
  EXPECT_THAT(groups_without_effect(config, parameters),
              ::testing::ElementsAre(AllOf(HasSubstr("\"embed: name = lion"), HasSubstr("has no effect")), HasSubstr("\"layers.1: eps = 1e-3\"")))
      << "norms have one that learns";
  config.groups = {"layers.1: lr_factor = 2", "**.norm: weight_decay = 0"};
  EXPECT_THAT(groups_without_effect(config, parameters), ::testing::ElementsAre(HasSubstr("\"layers.1: lr_factor = 2\"")));
}

TEST(Groups, AMomentumThatIsNotGivenIsTheOptimizersOwn) {
  OptimConfig config = grouped_config();
  config.groups = {"layers.1: name = muon"};
  const auto shares = deal_groups(config, named_parameters(), {});
  ASSERT_EQ(shares.size(), 2) << "what Muon leaves to AdamW goes with the rest";
  EXPECT_EQ(shares[1].settings.momentum, 0.95);
}

/// A number that a device has decides nothing for what the host updates, and what that makes lies beside the device.
TEST(Several, KnowsWhichOfThemUpdateOnTheHost) {
  OptimConfig config;
  for (const bool on_host : {false, true}) {
    auto here = make_parameters({{4, 3}}), there = make_parameters({{5, 3}}, at::kCPU);
    here[0].name = "here", there[0].name = "there";
    at::Tensor(there[0].tensor).set_requires_grad(false);  // so that its state is made when it is asked for
    std::vector<Several::Part> parts;
    parts.push_back({.optimizer = make_optimizer(config, here)});
    parts.push_back({.optimizer = make_optimizer(config, there), .on_host = on_host});
    Several several("adamw", std::move(parts));
    EXPECT_EQ(several.skips_on_device(), !on_host);
    MemoryTracker memory;
    memory.compute_on(testing_support::test_device());
    const TrackMemory track(memory);
    several.hold_state({{"there", 1}});
    if (on_host) EXPECT_GT(memory.host_by_category()[static_cast<size_t>(MemoryCategory::Optimizer)], 0);
    EXPECT_EQ(several.state_to_save().size(), several.state().size());
    EXPECT_EQ(several.state_at_hand().size(), several.state().size());
    std::map<std::string, int64_t> counts;
    for (int step = 1; step < 3; ++step) {
      counts = several.update_counts();
      draw_gradients(here, step), draw_gradients(there, step);
      several.step(1e-2);
    }
    several.take_back_count();
    EXPECT_EQ(several.update_counts(), counts);
  }
}

}  // namespace
}  // namespace tessera::optim
