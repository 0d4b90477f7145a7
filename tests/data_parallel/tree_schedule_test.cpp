#include "tessera/data_parallel/tree_schedule.h"

#include <deque>
#include <map>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

/// The definition: left half plus right half, where halves are cut at powers of two.
float tree_sum(const std::vector<float>& leaves, int level, int64_t index) {
  if (level == 0) return leaves[index];
  const float left = tree_sum(leaves, level - 1, 2 * index);
  const int64_t right_begin = (2 * index + 1) << (level - 1);
  if (right_begin >= static_cast<int64_t>(leaves.size())) return left;
  return left + tree_sum(leaves, level - 1, 2 * index + 1);
}

std::vector<float> random_leaves(int64_t count) {
  std::mt19937 random(static_cast<unsigned>(count));
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> leaves(count);
  for (float& leaf : leaves) leaf = normal(random) * std::exp2(static_cast<float>(random() % 12));
  return leaves;
}

/// Runs the schedule as an executor would: each rank sums its own run with a TreeStack, then the merges go on in order.
float execute(const TreeSchedule& schedule, const std::vector<float>& leaves) {
  std::vector<std::map<TreeNode, float>> held(schedule.runs.size());
  for (size_t rank = 0; rank < schedule.runs.size(); ++rank) {
    TreeStack stack(schedule.num_micro_batches);
    std::vector<float> sums;
    const auto [begin, size] = schedule.runs[rank];
    for (int64_t i = begin; i < begin + size; ++i) {
      sums.push_back(leaves[i]);
      for (int merges = stack.push(i); merges > 0; --merges) {
        const float right = sums.back();
        sums.pop_back();
        sums.back() = sums.back() + right;
      }
    }
    EXPECT_EQ(stack.nodes(), schedule.kept[rank]);
    for (size_t i = 0; i < sums.size(); ++i) held[rank].emplace(schedule.kept[rank][i], sums[i]);
  }
  for (const TreeMerge& merge : schedule.merges) {
    auto right = held[merge.right_owner].extract(merge.right);
    auto left = held[merge.owner].extract(merge.left);
    EXPECT_FALSE(right.empty() || left.empty());
    held[merge.owner].emplace(merge.sum, left.mapped() + right.mapped());
  }
  for (size_t rank = 0; rank < held.size(); ++rank) EXPECT_EQ(held[rank].size(), static_cast<int>(rank) == schedule.root_owner ? 1u : 0u);
  EXPECT_EQ(held[schedule.root_owner].begin()->first, schedule.root());
  return held[schedule.root_owner].begin()->second;
}

/// Blocking messages without buffers: each rank takes its part of the merges in order, and a message passes when both its ends have come to it.
bool ends_without_buffers(const TreeSchedule& schedule) {
  const int ranks = static_cast<int>(schedule.runs.size());
  std::vector<std::deque<size_t>> todo(ranks);
  for (size_t i = 0; i < schedule.merges.size(); ++i) {
    const TreeMerge& merge = schedule.merges[i];
    todo[merge.owner].push_back(i);
    if (merge.right_owner != merge.owner) todo[merge.right_owner].push_back(i);
  }
  for (bool progress = true; progress;) {
    progress = false;
    for (int rank = 0; rank < ranks; ++rank) {
      if (todo[rank].empty()) continue;
      const size_t next = todo[rank].front();
      const TreeMerge& merge = schedule.merges[next];
      const int peer = merge.owner == rank ? merge.right_owner : merge.owner;
      if (todo[peer].front() != next) continue;
      todo[rank].pop_front();
      if (peer != rank) todo[peer].pop_front();
      progress = true;
    }
  }
  return std::ranges::all_of(todo, [](const auto& rest) { return rest.empty(); });
}

TEST(TreeSchedule, EqualsTheSingleTreeBitForBitForAnyDealing) {
  for (int64_t count = 1; count <= 40; ++count) {
    const std::vector<float> leaves = random_leaves(count);
    const float expected = tree_sum(leaves, tree_root_level(count), 0);
    for (int ranks = 1; ranks <= 8; ++ranks) {
      const TreeSchedule schedule = make_tree_schedule(count, ranks);
      EXPECT_EQ(execute(schedule, leaves), expected) << count << " micro-batches on " << ranks << " ranks\n" << to_string(schedule);
    }
  }
}

TEST(TreeSchedule, TheTestSeesAnotherOrder) {
  const std::vector<float> leaves = random_leaves(37);
  float running = 0;
  for (const float leaf : leaves) running += leaf;
  EXPECT_NE(running, tree_sum(leaves, tree_root_level(37), 0));
}

TEST(TreeSchedule, BlockingMessagesNeverWaitInACircle) {
  for (int64_t count = 1; count <= 40; ++count) {
    for (int ranks = 1; ranks <= 8; ++ranks) EXPECT_TRUE(ends_without_buffers(make_tree_schedule(count, ranks))) << count << " on " << ranks;
  }
}

TEST(TreeSchedule, RanksKeepFewSums) {
  for (int64_t count = 1; count <= 200; ++count) {
    for (int ranks = 1; ranks <= 8; ++ranks) {
      const TreeSchedule schedule = make_tree_schedule(count, ranks);
      for (const auto& kept : schedule.kept) EXPECT_LE(static_cast<int>(kept.size()), std::max(1, 2 * tree_root_level(count)));
    }
  }
}

TEST(TreeSchedule, OneRankSendsNothing) {
  for (int64_t count = 1; count <= 40; ++count) {
    const TreeSchedule schedule = make_tree_schedule(count, 1);
    EXPECT_TRUE(schedule.merges.empty());
    EXPECT_THAT(schedule.kept[0], ElementsAre(schedule.root()));
  }
}

TEST(TreeSchedule, FiveOnTwo) {
  const TreeSchedule schedule = make_tree_schedule(5, 2);
  EXPECT_THAT(schedule.kept[0], ElementsAre(TreeNode{1, 0}, TreeNode{0, 2}));
  EXPECT_THAT(schedule.kept[1], ElementsAre(TreeNode{0, 3}, TreeNode{2, 1}));
  EXPECT_THAT(schedule.merges,
              ElementsAre(TreeMerge{{0, 2}, {0, 3}, {1, 1}, 0, 1}, TreeMerge{{1, 0}, {1, 1}, {2, 0}, 0, 0}, TreeMerge{{2, 0}, {2, 1}, {3, 0}, 0, 1}));
  EXPECT_EQ(to_string(schedule),
            "rank 0: micro-batches 0 .. 3 keep 1/0 0/2\n"
            "rank 1: micro-batches 3 .. 5 keep 0/3 2/1\n"
            "0/2 + 0/3 on rank 0, from rank 1\n"
            "1/0 + 1/1 on rank 0\n"
            "2/0 + 2/1 on rank 0, from rank 1\n"
            "root 3/0 on rank 0, broadcast\n");
}

TEST(TreeSchedule, RanksWithoutMicroBatchesKeepNothing) {
  const TreeSchedule schedule = make_tree_schedule(2, 4);
  EXPECT_TRUE(schedule.kept[2].empty());
  EXPECT_TRUE(schedule.kept[3].empty());
  EXPECT_EQ(schedule.merges.size(), 1u);
}

TEST(TreeSchedule, RefusesNothingToDeal) {
  EXPECT_THROW(make_tree_schedule(0, 1), InternalError);
  EXPECT_THROW(make_tree_schedule(1, 0), InternalError);
  EXPECT_THROW(TreeStack(4).push(4), InternalError);
}

}  // namespace
}  // namespace tessera
