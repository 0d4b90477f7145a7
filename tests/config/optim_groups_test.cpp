#include "tessera/config/optim_groups.h"

#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/config/rules.h"

namespace tessera {
namespace {

using config_rules::refusal;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Validate, GroupsOfParameters) {
  const auto refused = [](const std::string& group) { return refusal([&](Config& c) { c.optim.groups = {group}; }); };
  EXPECT_EQ(refused("**.*norm: weight_decay = 0"), "(accepted)");
  EXPECT_EQ(refused("embed*: name = sgd, momentum = 0.9, lr = 1e-4"), "(accepted)");
  EXPECT_EQ(refused("embed*: lr = 1e-4, betas = [0.8, 0.9], eps = 1e-6"), "(accepted)");
  EXPECT_THAT(refused("a: momentum = 0.5"), HasSubstr("momentum has no effect with name = adamw; leave it out"));
  EXPECT_THAT(refused("a: eps = 1e-6, name = lion"), HasSubstr("eps has no effect with name = lion"));
  const auto of = [](const std::string& group) { return StartsWith("optim.groups, \"" + group + "\""); };
  EXPECT_THAT(refused("embed*"), AllOf(of("embed*"), HasSubstr("expected 'pattern: key = value, ...'")));
  EXPECT_THAT(refused(" : lr = 1"), HasSubstr("there is no pattern"));
  EXPECT_THAT(refused("a:"), AllOf(of("a:"), HasSubstr("is no 'key = value'")));
  EXPECT_THAT(refused("a: lr = 1,"), HasSubstr("is no 'key = value'"));
  EXPECT_THAT(refused("a: wieght_decay = 0"), AllOf(HasSubstr("no key 'wieght_decay'"), HasSubstr("the nearest is weight_decay")));
  EXPECT_THAT(refused("a: schedule = cosine"), HasSubstr("there are lr, lr_factor, weight_decay, name, betas, eps, momentum"));
  EXPECT_THAT(refused("a: weight_decay = much"),
              AllOf(StartsWith("optim.weight_decay = \"much\" (optim.groups, \"a: weight_decay = much\")"), HasSubstr("a number")));
  EXPECT_THAT(refused("a: betas = 0.9"), HasSubstr("expected a list of two numbers"));
  EXPECT_THAT(refused("a: name = adamv"), HasSubstr("did you mean adamw?"));
  EXPECT_THAT(refused("a: lr = 0"), HasSubstr("expected a positive number"));
  EXPECT_THAT(refused("a: lr = 1, lr = 2"), HasSubstr("lr is set twice"));
  EXPECT_THAT(refused("a: lr = 1e-3, lr_factor = 2"), HasSubstr("set one of them"));
  EXPECT_THAT(refused("a: betas = [0.9, 1.5]"), AllOf(of("a: betas = [0.9, 1.5]"), HasSubstr("two numbers from 0 to below 1")));
  EXPECT_THAT(refused("a: lr = 0.5, weight_decay = 3"), HasSubstr("set a weight_decay of at most 2"));
  EXPECT_THAT(refusal([](Config& c) { c.precision.params = c.precision.compute = c.precision.master = "bf16", c.optim.groups = {"a: name = adafactor"}; }),
              AllOf(StartsWith("precision.master = bf16"), HasSubstr("one of optim.groups")));
}

TEST(Settings, MomentumIsTheOptimizersOwnWhereNobodyGivesOne) {
  const auto resolved = [](const std::vector<std::string>& sets) {
    Config config = parse_config("", "/", sets);
    resolve(config);
    return config;
  };
  EXPECT_EQ(momentum_of(resolved({}).optim), 0);
  EXPECT_EQ(momentum_of(resolved({"optim.name=muon"}).optim), 0.95);
  EXPECT_EQ(momentum_of(resolved({"optim.name=muon", "optim.momentum=0"}).optim), 0) << "given, it is what was given";
  EXPECT_EQ(momentum_of({.name = "muon"}), 0.95);
  EXPECT_THAT(settings_without_effect(resolved({"optim.momentum=0"}), 1), ::testing::IsEmpty()) << "which asks for nothing";

  Config read = parse_config(to_toml(resolved({})), "/", {"optim.name=muon"});
  resolve(read);
  EXPECT_EQ(momentum_of(read.optim), 0.95) << "what AdamW was run with says nothing of Muon's";
}

TEST(Settings, GroupsTakeTheirFactorAlongTheSchedule) {
  OptimConfig config;
  config.lr = 0.02, config.min_lr = 0.01, config.momentum = 0.3;
  config.groups = {"a.*: lr = 0.004", "b: lr_factor = 3, weight_decay = 0", "c: name = \"sgd\"", "d: name = muon", "e: name = sgd, momentum = 0.5"};
  const auto groups = optim_groups(config);
  ASSERT_EQ(groups.size(), 5);
  EXPECT_EQ(groups[0].pattern, "a.*");
  EXPECT_DOUBLE_EQ(groups[0].lr_factor, 0.2);
  EXPECT_EQ(groups[0].settings.lr, 0.004);
  EXPECT_DOUBLE_EQ(groups[0].settings.min_lr, 0.002);
  EXPECT_EQ(groups[0].settings.weight_decay, config.weight_decay);
  EXPECT_EQ(groups[0].settings.momentum, 0.3) << "the section's, as the optimizer is";
  EXPECT_EQ(groups[1].lr_factor, 3);
  EXPECT_DOUBLE_EQ(groups[1].settings.lr, 0.06);
  EXPECT_EQ(groups[1].settings.weight_decay, 0);
  EXPECT_EQ(groups[2].settings.momentum, 0) << "another optimizer's own";
  EXPECT_EQ(groups[3].settings.momentum, 0.95);
  EXPECT_EQ(groups[4].settings.momentum, 0.5);
  EXPECT_EQ(groups[4].given, (std::set<std::string>{"name", "momentum"}));
  EXPECT_TRUE(uses_optimizer(config, {"muon"}));
  EXPECT_FALSE(uses_optimizer(config, {"lion", "adafactor"}));
}

}  // namespace
}  // namespace tessera
