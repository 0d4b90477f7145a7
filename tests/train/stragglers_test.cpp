#include "tessera/train/stragglers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int> ranks_of(const std::vector<Straggler>& found) {
  std::vector<int> ranks;
  for (const auto& straggler : found) ranks.push_back(straggler.rank);
  return ranks;
}

TEST(LowerMedian, IsTheMiddleOrTheSmallerOfTwo) {
  EXPECT_EQ(lower_median({}), 0);
  EXPECT_EQ(lower_median({3}), 3);
  EXPECT_EQ(lower_median({3, 1}), 1);
  EXPECT_EQ(lower_median({9, 1, 5}), 5);
  EXPECT_EQ(lower_median({4, 3, 2, 1}), 2);
}

TEST(FindStragglers, ComparesEachRankWithTheMedianOfAll) {
  EXPECT_THAT(find_stragglers({}, 1.2), IsEmpty());
  EXPECT_THAT(find_stragglers({{5.0}}, 1.2), IsEmpty());
  EXPECT_THAT(ranks_of(find_stragglers({{1.0, 1.3}}, 1.2)), ElementsAre(1));
  EXPECT_THAT(ranks_of(find_stragglers({{1.3, 1.0}}, 1.2)), ElementsAre(0));
  EXPECT_THAT(find_stragglers({{1.0, 1.2}}, 1.2), IsEmpty());
  EXPECT_THAT(ranks_of(find_stragglers({{1, 1.5, 1, 2, 1, 1, 1, 0.1}}, 1.2)), ElementsAre(3, 1)) << "slowest first";
  const auto one = find_stragglers({{0.3, 0.315, 0.33, 0.412}}, 1.2);
  ASSERT_EQ(one.size(), 1);
  EXPECT_EQ(one[0].compute_s, 0.412);
  EXPECT_EQ(one[0].median_s, 0.315);
  EXPECT_NEAR(one[0].ratio(), 1.308, 1e-3);
}

TEST(FindStragglers, LooksAtARanksMedianOverTheSteps) {
  EXPECT_THAT(find_stragglers({{1, 1, 1}, {1, 9, 1}, {1, 1, 1}}, 1.2), IsEmpty()) << "one bad step names nobody";
  EXPECT_THAT(ranks_of(find_stragglers({{1, 2, 1}, {1, 1, 1}, {1, 2, 1}}, 1.2)), ElementsAre(1));
  EXPECT_THAT(find_stragglers({{2, 2, 2}, {9, 9, 9}}, 1.2), IsEmpty()) << "all ranks slow together";
}

TEST(FindStragglers, LeavesOutDifferencesThatCostNothing) {
  EXPECT_THAT(find_stragglers({{0.001, 0.002}}, 1.2, 0.005), IsEmpty());
  EXPECT_THAT(ranks_of(find_stragglers({{0.001, 0.006}}, 1.2, 0.005)), ElementsAre(1));
}

std::vector<RankTimes> times_of(std::vector<double> compute) {
  std::vector<RankTimes> ranks;
  for (size_t rank = 0; rank < compute.size(); ++rank) ranks.push_back({.rank = static_cast<int>(10 * rank), .compute_s = compute[rank], .wait_s = 0});
  return ranks;
}

TEST(StragglerWatch, NamesOncePerEpisode) {
  StragglerWatch watch(1.2);
  for (int i = 1; i < StragglerWatch::kWindow; ++i) EXPECT_THAT(watch.after_step(times_of({1, 2, 1})), IsEmpty()) << "too early to tell";
  EXPECT_THAT(ranks_of(watch.after_step(times_of({1, 2, 1}))), ElementsAre(10)) << "the rank of the world";
  for (int i = 0; i < 20; ++i) EXPECT_THAT(watch.after_step(times_of({1, 2, 1})), IsEmpty());
  // Back below the threshold is not yet caught up: it may swing around it without a line each time.
  for (int i = 0; i < 20; ++i) EXPECT_THAT(watch.after_step(times_of({1, i < 10 ? 1.15 : 1.25, 1})), IsEmpty());
  for (int i = 0; i < 20; ++i) EXPECT_THAT(watch.after_step(times_of({1, 1, 1})), IsEmpty());
  std::vector<int> named;
  for (int i = 0; i < 20; ++i)
    for (const int rank : ranks_of(watch.after_step(times_of({1, 2, 1})))) named.push_back(rank);
  EXPECT_THAT(named, ElementsAre(10)) << "another episode";
}

TEST(StragglerWatch, ForgetsStepsOlderThanItsWindow) {
  StragglerWatch watch(1.2);
  for (int i = 0; i < 100; ++i) watch.after_step(times_of({1, 1}));
  int steps = 1;
  while (watch.after_step(times_of({1, 2})).empty() && steps < 100) ++steps;
  EXPECT_GT(steps, StragglerWatch::kWindow / 2);
  EXPECT_LE(steps, StragglerWatch::kWindow);
}

TEST(StragglerWatch, OffOrAloneNamesNobody) {
  StragglerWatch off(0), alone(1.2);
  for (int i = 0; i < 30; ++i) {
    EXPECT_THAT(off.after_step(times_of({1, 5})), IsEmpty());
    EXPECT_THAT(alone.after_step(times_of({5})), IsEmpty());
  }
}

}  // namespace
}  // namespace tessera
