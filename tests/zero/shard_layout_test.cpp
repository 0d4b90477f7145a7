#include "tessera/zero/shard_layout.h"

#include <set>

#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

const std::vector<GradientSpec> odd_sizes{{"a", 1}, {"b", 0}, {"c", 33}, {"d", 4096}, {"e", 7, at::kBFloat16}, {"f", 1000}, {"g", 31, at::kBFloat16}};

class Ranks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(ShardLayout, Ranks, ::testing::Values(1, 2, 3, 5, 8, 64));

TEST_P(Ranks, OwnEachElementOnce) {
  const auto layout = make_shard_layout(odd_sizes, {.bucket_bytes = 6000, .first_bucket_bytes = 64}, GetParam());
  std::set<size_t> seen;
  for (const auto& bucket : layout.buckets) {
    for (const auto& slot : bucket.slots) {
      EXPECT_TRUE(seen.insert(slot.parameter).second);
      EXPECT_EQ(slot.numel, odd_sizes[slot.parameter].numel);
      EXPECT_EQ(bucket.dtype, odd_sizes[slot.parameter].dtype);
      EXPECT_LE(slot.offset + slot.numel, layout.numel(bucket));
      int64_t next = 0;
      for (int rank = 0; rank < GetParam(); ++rank) {
        const auto run = layout.owned(bucket, slot, rank);
        if (run.size == 0) continue;
        EXPECT_EQ(run.begin, next);
        next += run.size;
      }
      EXPECT_EQ(next, slot.numel);
    }
  }
  EXPECT_EQ(seen.size(), odd_sizes.size());
  EXPECT_THROW(layout.owned(layout.buckets[0], layout.buckets[0].slots[0], GetParam()), InternalError);
}

TEST_P(Ranks, CutsFallBetweenVectorsAndPaddingIsBounded) {
  const auto layout = make_shard_layout(odd_sizes, {}, GetParam());
  for (const auto& bucket : layout.buckets) {
    EXPECT_EQ(bucket.part % ShardLayout::alignment, 0);
    for (const auto& slot : bucket.slots) {
      for (int rank = 0; rank < GetParam(); ++rank) EXPECT_EQ(layout.owned(bucket, slot, rank).begin % ShardLayout::alignment, 0);
    }
  }
  const auto slots = static_cast<int64_t>(odd_sizes.size()), buckets = static_cast<int64_t>(layout.buckets.size());
  EXPECT_LT(layout.padding(), ShardLayout::alignment * (slots + buckets * GetParam()));
}

TEST(ShardLayout, BucketsCloseAsThePlanOfGradientsSays) {
  const BucketSizes sizes{.bucket_bytes = 400, .first_bucket_bytes = 40};
  const auto layout = make_shard_layout(odd_sizes, sizes, 2);
  const auto plan = make_bucket_layout(odd_sizes, sizes);
  ASSERT_EQ(layout.buckets.size(), plan.buckets.size());
  for (size_t i = 0; i < plan.buckets.size(); ++i) {
    ASSERT_EQ(layout.buckets[i].slots.size(), plan.buckets[i].slots.size());
    for (size_t slot = 0; slot < plan.buckets[i].slots.size(); ++slot) {
      EXPECT_EQ(odd_sizes[layout.buckets[i].slots[slot].parameter].name, plan.buckets[i].slots[slot].name);
    }
  }
}

TEST(ShardLayout, IsPrinted) {
  const std::vector<GradientSpec> one{{"weight", 100}};
  EXPECT_EQ(to_string(make_shard_layout(one, {}, 2)),
            "1 buckets for 2 ranks, 28 elements of padding\n   0  Float           100 elements in 1 parameters,         64 a rank\n");
}

}  // namespace
}  // namespace tessera
