#include "tessera/layout/feature_cut.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

std::string refusal(const FeatureCut& cut, int64_t features, int ranks) {
  try {
    cut.shares(features, ranks);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(FeatureCut, FeaturesAreDealtByLayoutsRule) {
  const auto shares = FeatureCut{}.shares(11, 3);
  EXPECT_EQ(shares, (std::vector<FeatureShare>{{0, 4, 0}, {4, 4, 1}, {8, 3, 2}}));
  EXPECT_EQ(FeatureCut{}.shares(5, 1), (std::vector<FeatureShare>{{0, 5, 0}}));
  EXPECT_THAT(refusal({}, 2, 3), HasSubstr("2 features cannot be cut over more ranks"));
}

/// For every number of heads, key-value heads and ranks: queries are dealt once, in order; each rank has the keys of its queries and no others, and as many
/// queries for each.
TEST(FeatureCut, HeadsFindTheirKeysOnTheirOwnRank) {
  constexpr int64_t width = 3;
  for (int64_t kv_heads = 1; kv_heads <= 6; ++kv_heads) {
    for (int64_t group = 1; group <= 5; ++group) {
      const int64_t heads = kv_heads * group;
      for (int ranks = 1; ranks <= heads; ++ranks) {
        const auto queries = FeatureCut::query_heads(heads, kv_heads).shares(heads * width, ranks);
        const auto keys = FeatureCut::key_value_heads(heads, kv_heads).shares(kv_heads * width, ranks);
        SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(kv_heads) + " key-value heads, " + std::to_string(ranks) + " ranks");
        int64_t next = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const FeatureShare &q = queries[rank], &k = keys[rank];
          EXPECT_EQ(q.begin, next);
          next += q.size;
          ASSERT_GT(q.size, 0);
          ASSERT_GT(k.size, 0);
          EXPECT_EQ(q.begin % width + q.size % width + k.begin % width + k.size % width, 0);
          ASSERT_EQ(q.size % k.size, 0);
          const int64_t each = q.size / k.size;  // queries of one key, one after the other
          for (int64_t head = 0; head < q.size / width; ++head) {
            EXPECT_EQ((q.begin / width + head) / group, k.begin / width + head / each);
          }
          EXPECT_EQ(keys[k.first_holder].begin, k.begin);
          EXPECT_LE(k.first_holder, rank);
          EXPECT_LT(rank, k.first_holder + k.holders);
          EXPECT_TRUE(k.first_holder == 0 || keys[k.first_holder - 1].begin < k.begin);
        }
        EXPECT_EQ(next, heads * width);
      }
    }
  }
}

TEST(FeatureCut, Refusals) {
  EXPECT_THAT(refusal(FeatureCut::query_heads(4, 2), 8, 5), HasSubstr("model.heads = 4 cannot be cut over more ranks"));
  EXPECT_THAT(refusal(FeatureCut::query_heads(4, 3), 8, 2), HasSubstr("must be a multiple of model.kv_heads = 3"));
  EXPECT_THAT(refusal(FeatureCut::query_heads(4, 2), 10, 2), HasSubstr("10 features are no multiple of 4 heads"));
  EXPECT_THAT(refusal(FeatureCut::key_value_heads(4, 2), 9, 2), HasSubstr("9 features are no multiple of 2 key-value heads"));
}

}  // namespace
}  // namespace tessera
