#include "tessera/context_parallel/ring_plan.h"

#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>

#include "tessera/layout/sequence_cut.h"

/// The ring's steps as a value, carried out by hand: messages are entries of a map, and no process is there.
namespace tessera::context {
namespace {

std::vector<nn::AttentionColumns> columns_of(const SequenceCut& cut) {
  std::vector<nn::AttentionColumns> columns;
  for (int rank = 0; rank < cut.ranks(); ++rank) {
    const at::Tensor positions = cut.positions(rank, at::kCPU);
    columns.push_back(nn::AttentionColumns::of({positions.const_data_ptr<int64_t>(), static_cast<size_t>(positions.numel())}));
  }
  return columns;
}

class RingPlan : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(ContextParallel, RingPlan, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(RingPlan, BringsEachBlockToEachPlaceByItsNeighbours) {
  const int n = GetParam();
  const auto columns = columns_of(SequenceCut::head_tail(4 * n + 1, n));
  std::vector<std::vector<RingStep>> plans;
  for (int place = 0; place < n; ++place) plans.push_back(ring_plan(columns, place, {}));
  std::vector<int> here(static_cast<size_t>(n));
  for (int place = 0; place < n; ++place) here[static_cast<size_t>(place)] = place;
  int hops = 0;
  for (size_t step = 0; step < static_cast<size_t>(n); ++step) {
    std::vector<int> coming(here.size(), -1);
    for (int place = 0; place < n; ++place) {
      const RingStep& now = plans[static_cast<size_t>(place)][step];
      EXPECT_EQ(now.block, here[static_cast<size_t>(place)]);
      if (!now.keys_go_on) continue;
      coming[static_cast<size_t>((place + 1) % n)] = now.block;
      ++hops;
    }
    if (step + 1 < static_cast<size_t>(n)) here = coming;
  }
  EXPECT_EQ(hops, n * (n - 1));
}

/// Carries out what plans say of a block's gradients: returns how many messages there were.
int meet_shares(const std::vector<nn::AttentionColumns>& columns, const nn::AttentionReach& reach) {
  const int n = static_cast<int>(columns.size());
  std::vector<std::vector<RingStep>> plans;
  for (int place = 0; place < n; ++place) plans.push_back(ring_plan(columns, place, reach));
  const size_t steps = plans.front().size();
  std::map<std::pair<int, int>, std::multiset<int>> on_the_way;  // (to place, block): whose shares are in
  std::vector<std::multiset<int>> own(static_cast<size_t>(n));
  int hops = 0;
  for (size_t step = 0; step < steps; ++step) {
    std::map<std::pair<int, int>, std::multiset<int>> sent;
    for (int place = 0; place < n; ++place) {
      EXPECT_EQ(plans[static_cast<size_t>(place)].size(), steps) << "all go round together";
      const RingStep now = plans[static_cast<size_t>(place)][step];
      std::multiset<int> shares{place};
      EXPECT_EQ(now.sum_comes, on_the_way.contains({place, now.block})) << "place " << place << ", step " << step;
      if (now.sum_comes) shares.merge(on_the_way.extract({place, now.block}).mapped());
      if (now.sum_goes_on) {
        EXPECT_NE(now.block, place) << "an owner's share stays";
        sent[{now.sum_to, now.block}] = shares;
        ++hops;
      } else {
        own[static_cast<size_t>(now.block)].merge(shares);
      }
    }
    EXPECT_TRUE(on_the_way.empty()) << "a sum that nobody took";
    on_the_way = sent;
  }
  for (int place = 0; place < n; ++place) {
    const int from = plans[static_cast<size_t>(place)].back().own_comes_from;
    if (steps == 1) EXPECT_EQ(from, -1);
    if (from >= 0) EXPECT_EQ(plans[static_cast<size_t>(from)].back().block, place) << "who sends it has had it last";
  }
  for (auto& [to, shares] : on_the_way) {
    EXPECT_EQ(to.first, to.second) << "what comes last is the own";
    own[static_cast<size_t>(to.second)].merge(shares);
  }
  for (int place = 0; place < n; ++place) {
    std::multiset<int> met;  // by those after it, as far as the ring goes
    for (size_t step = 0; step < steps; ++step) met.insert((place + static_cast<int>(step)) % n);
    EXPECT_EQ(own[static_cast<size_t>(place)], met);
  }
  return hops;
}

TEST_P(RingPlan, SumsOfGradientsMeetEveryShareAndEndWithTheOwner) {
  const int n = GetParam();
  EXPECT_EQ(meet_shares(columns_of(SequenceCut::head_tail(4 * n + 1, n)), {}), n * (n - 1));
}

/// One part of the sequence each, of 10 columns: so many windows of them are within reach, and the ring is as long.
TEST_P(RingPlan, EndsWhereNothingIsWithinAWindow) {
  const int n = GetParam();
  const auto parts = columns_of(SequenceCut::contiguous(10 * n, n));
  for (const auto& [window, hops] : {std::pair{1, 0}, {2, 1}, {11, 1}, {12, 2}, {10 * n, n - 1}, {100 * n, n - 1}}) {
    const int expected = std::min(hops, n - 1);
    EXPECT_EQ(ring_plan(parts, 0, {.window = window}).size(), static_cast<size_t>(expected + 1)) << window;
    EXPECT_EQ(meet_shares(parts, {.window = window}), n * expected) << window;
    int64_t pairs = 0;
    for (int place = 0; place < n; ++place) {
      for (const RingStep& step : ring_plan(parts, place, {.window = window})) pairs += step.pairs();
    }
    const int64_t seen = std::min(window, 10 * n);
    EXPECT_EQ(pairs, 10 * n * seen - seen * (seen - 1) / 2) << window;
  }
  EXPECT_EQ(ring_plan(columns_of(SequenceCut::head_tail(10 * n, n)), 0, {.window = 3}).size(), static_cast<size_t>(n)) << "a tail's neighbour is a round away";
}

TEST_P(RingPlan, ComputesEveryPairOnceAndHeadAndTailDealThemEvenly) {
  const int n = GetParam();
  const int64_t length = 1003;
  for (const SequenceCut& cut : {SequenceCut::contiguous(length, n), SequenceCut::head_tail(length, n)}) {
    const auto columns = columns_of(cut);
    int64_t all = 0, most = 0, least = length * length;
    for (int place = 0; place < n; ++place) {
      int64_t own = 0;
      for (const RingStep& step : ring_plan(columns, place, {})) own += step.pairs();
      all += own;
      most = std::max(most, own);
      least = std::min(least, own);
    }
    EXPECT_EQ(all, length * (length + 1) / 2);
    if (cut == SequenceCut::head_tail(length, n)) {
      EXPECT_LE(static_cast<double>(most - least), 0.02 * static_cast<double>(most));
    } else if (n > 1) {
      EXPECT_GT(static_cast<double>(most), 2.5 * static_cast<double>(least))
          << "what it is for: the last rank of a contiguous cut has 2n - 1 times the work of the first";
    }
  }
}

TEST_P(RingPlan, EveryStepOfHeadAndTailHasAsMuchWorkEverywhere) {
  const int n = GetParam();
  const auto columns = columns_of(SequenceCut::head_tail(64 * n, n));
  for (int step = 0; step < n; ++step) {
    std::set<int64_t> work;
    for (int place = 0; place < n; ++place) work.insert(ring_plan(columns, place, {})[static_cast<size_t>(step)].pairs());
    EXPECT_EQ(work.size(), 1u) << "in step " << step << " some wait for others";
  }
}

}  // namespace
}  // namespace tessera::context
