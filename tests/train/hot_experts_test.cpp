#include "tessera/train/hot_experts.h"

#include <gmock/gmock.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using Named = std::pair<int64_t, int64_t>;

/// Two layers of eight experts; expert 5 of the second has so many times the mean.
std::vector<ExpertLoad> loads(double times) {
  std::vector<ExpertLoad> layers{{.layer = 0, .share = std::vector<double>(8, 1.0 / 8)}, {.layer = 3, .share = std::vector<double>(8, (1 - times / 8) / 7)}};
  layers[1].share[5] = times / 8;
  return layers;
}

std::vector<Named> names(const std::vector<HotExpert>& found) {
  std::vector<Named> named;
  for (const HotExpert& one : found) named.emplace_back(one.layer, one.expert);
  return named;
}

std::vector<Named> after(HotExpertWatch& watch, int steps, double times) {
  std::vector<Named> all;
  for (int i = 0; i < steps; ++i) {
    for (const Named& one : names(watch.after_step(loads(times)))) all.push_back(one);
  }
  return all;
}

TEST(HotExpertWatch, NamesOnceAndAgainWhenItHadCooledDown) {
  HotExpertWatch watch(2, true);
  EXPECT_THAT(after(watch, HotExpertWatch::kWindow - 1, 3), IsEmpty()) << "too early to tell";
  EXPECT_THAT(names(watch.after_step(loads(3))), ElementsAre(Named(3, 5)));
  EXPECT_THAT(after(watch, 20, 3), IsEmpty());
  EXPECT_THAT(after(watch, 20, 1.8), IsEmpty()) << "below the threshold, and not yet cool";
  EXPECT_THAT(after(watch, 20, 2.5), IsEmpty());
  EXPECT_THAT(after(watch, 20, 1), IsEmpty());
  EXPECT_THAT(after(watch, 20, 2.5), ElementsAre(Named(3, 5)));
}

TEST(HotExpertWatch, TakesTheMedianAndNamesTheHottestFirst) {
  HotExpertWatch watch(2, true);
  EXPECT_THAT(after(watch, 20, 1), IsEmpty());
  EXPECT_THAT(after(watch, 4, 4), IsEmpty()) << "a few odd batches";
  EXPECT_THAT(after(watch, 1, 1), IsEmpty());
  HotExpertWatch both(1, true);
  std::vector<HotExpert> found;
  for (int i = 0; i < HotExpertWatch::kWindow; ++i) {
    auto layers = loads(3);
    layers[0].share = {0.5, 0.5, 0, 0, 0, 0, 0, 0};
    found = both.after_step(layers);
  }
  EXPECT_THAT(names(found), ElementsAre(Named(0, 0), Named(0, 1), Named(3, 5)));
  EXPECT_NEAR(found.back().load, 3, 1e-9);
}

TEST(HotExpertWatch, KnowsWhatFewExpertsCanTake) {
  const auto four = [](double times) {
    return std::vector<ExpertLoad>{{.layer = 0, .share = {times / 4, (4 - times) / 12, (4 - times) / 12, (4 - times) / 12}}};
  };
  HotExpertWatch watch(2, true);  // at most twice the mean: every token's choice
  for (int i = 0; i < 20; ++i) EXPECT_THAT(watch.after_step(four(1.45)), IsEmpty());
  std::vector<Named> named;
  for (int i = 0; i < 20; ++i) {
    for (const Named& one : names(watch.after_step(four(1.8)))) named.push_back(one);
  }
  EXPECT_THAT(named, ElementsAre(Named(0, 0)));
}

TEST(HotExpertWatch, IsSilentWhereItIsOffOrThereAreNone) {
  HotExpertWatch off(2, false), none(2, true);
  EXPECT_THAT(after(off, 20, 4), IsEmpty());
  for (int i = 0; i < 20; ++i) EXPECT_THAT(none.after_step({}), IsEmpty());
}

TEST(HotExpertWatch, SaysWhatToDo) {
  Config config;
  config.mesh.ep = 2;
  EXPECT_THAT(line_of({{.layer = 3, .expert = 5, .load = 3.14}}, config),
              AllOf(HasSubstr("layer 3: expert 5 takes 3.1 times the mean load"), HasSubstr("mesh.ep = 2"), HasSubstr("moe.balance_loss")));
  config.model.router = "sigmoid";
  config.mesh.ep = 1;
  EXPECT_THAT(line_of({{}, {}, {}}, config), AllOf(HasSubstr("and 2 more"), HasSubstr("moe.bias_rate"), Not(HasSubstr("mesh.ep"))));
}

}  // namespace
}  // namespace tessera
