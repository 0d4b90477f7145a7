#include "tessera/nn/bucket_layout.h"

#include <numeric>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "tessera/core/error.h"
#include "tests/refusal.h"

namespace tessera {
namespace {

using namespace testing_support;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::vector<std::string>> names_of(const BucketLayout& plan) {
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : plan.buckets) {
    auto& row = names.emplace_back();
    for (const auto& slot : bucket.slots) row.push_back(slot.name);
  }
  return names;
}

const std::vector<GradientSpec> four{{"a", 10}, {"b", 20}, {"c", 5}, {"d", 6}};

TEST(BucketLayout, FillsInReverseOrderOfRegistrationFirstBucketSmall) {
  const BucketLayout plan = make_bucket_layout(four, {.bucket_bytes = 120, .first_bucket_bytes = 24});
  EXPECT_THAT(names_of(plan), ElementsAre(ElementsAre("d"), ElementsAre("c", "b"), ElementsAre("a")));
  EXPECT_EQ(plan.buckets[1].numel(), 25);
  EXPECT_EQ(plan.buckets[1].bytes(), 100);
  EXPECT_EQ(plan.buckets[1].slots[1].offset, 5);
  EXPECT_EQ(plan.bytes(), 41 * 4);
  EXPECT_FALSE(plan.observed);
}

TEST(BucketLayout, FillsInTheOrderObserved) {
  const std::vector<int64_t> order{1, 3, 0, 2};
  const BucketLayout plan = make_bucket_layout(four, order, {.bucket_bytes = 64, .first_bucket_bytes = 1000}, /*observed=*/true);
  EXPECT_THAT(names_of(plan), ElementsAre(ElementsAre("b"), ElementsAre("d", "a"), ElementsAre("c")));
  EXPECT_TRUE(plan.observed);
}

TEST(BucketLayout, AGradientLargerThanABucketHasItsOwn) {
  const std::vector<GradientSpec> gradients{{"small", 1}, {"huge", 1000}, {"tiny", 1}};
  EXPECT_THAT(names_of(make_bucket_layout(gradients, {.bucket_bytes = 16, .first_bucket_bytes = 16})),
              ElementsAre(ElementsAre("tiny"), ElementsAre("huge"), ElementsAre("small")));
}

TEST(BucketLayout, DtypesDoNotMixAndBucketsComeInTheOrderInWhichTheyAreComplete) {
  const std::vector<GradientSpec> gradients{{"f0", 1}, {"h0", 1, at::kBFloat16}, {"f1", 1}, {"h1", 1, at::kBFloat16}};
  const BucketLayout plan = make_bucket_layout(gradients);
  EXPECT_THAT(names_of(plan), ElementsAre(ElementsAre("h1", "h0"), ElementsAre("f1", "f0")));
  EXPECT_EQ(plan.buckets[0].bytes(), 4);
  EXPECT_EQ(plan.buckets[1].dtype, at::kFloat);
}

TEST(BucketLayout, GradientsOfDifferentKeysDoNotMix) {
  const std::vector<GradientSpec> gradients{{"own0", 1}, {"alike0", 1, at::kFloat, "tp"}, {"own1", 1}, {"alike1", 1, at::kFloat, "tp"}};
  EXPECT_THAT(names_of(make_bucket_layout(gradients)), ElementsAre(ElementsAre("alike1", "alike0"), ElementsAre("own1", "own0")));
  const std::vector<GradientSpec> mixed{{"own0", 1}, {"alike0", 1}, {"own1", 1}, {"alike1", 1}};
  EXPECT_THAT(refusal([&] { check_bucket_layout(make_bucket_layout(mixed), gradients, "checkpoint"); }),
              HasSubstr("'own1' and 'alike1' are held by other ranks"));
}

TEST(BucketLayout, EmptyAndSingle) {
  EXPECT_TRUE(make_bucket_layout({}).empty());
  EXPECT_EQ(make_bucket_layout({}).bytes(), 0);
  const std::vector<GradientSpec> one{{"w", 0}};
  EXPECT_EQ(make_bucket_layout(one).buckets.size(), 1u);
  EXPECT_EQ(make_bucket_layout(one).bytes(), 0);
}

TEST(BucketLayout, EveryGradientOnceWithinTheLimitsForRandomShapes) {
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<GradientSpec> gradients;
    const int count = random() % 40;
    for (int i = 0; i < count; ++i)
      gradients.push_back({"p" + std::to_string(i), static_cast<int64_t>(random() % 300), random() % 3 ? at::kFloat : at::kBFloat16});
    std::vector<int64_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    const BucketSizes sizes{.bucket_bytes = 1 + static_cast<int64_t>(random() % 2000), .first_bucket_bytes = 1 + static_cast<int64_t>(random() % 500)};
    const BucketLayout plan = make_bucket_layout(gradients, order, sizes);
    EXPECT_NO_THROW(check_bucket_layout(plan, gradients, "test"));
    for (const auto& bucket : plan.buckets) {
      ASSERT_FALSE(bucket.slots.empty());
      EXPECT_TRUE(bucket.slots.size() == 1 || bucket.bytes() <= sizes.bucket_bytes);
    }
    EXPECT_EQ(bucket_layout_from_json(nlohmann::json::parse(to_json(plan).dump())), plan);
  }
}

TEST(BucketLayout, APlanOfComplexGradientsIsReadBack) {
  for (const at::ScalarType dtype : {at::kComplexFloat, at::kComplexDouble}) {
    const std::vector<GradientSpec> gradients{{"a", 3, dtype}, {"b", 5, at::kDouble}};
    const BucketLayout plan = make_bucket_layout(gradients);
    EXPECT_EQ(bucket_layout_from_json(nlohmann::json::parse(to_json(plan).dump())), plan);
  }
}

TEST(BucketLayout, RefusesSizesBelowOne) {
  EXPECT_THAT(refusal([] { make_bucket_layout(four, {.bucket_bytes = 0}); }), HasSubstr("zero.bucket_bytes = 0"));
  EXPECT_THAT(refusal([] { make_bucket_layout(four, {.bucket_bytes = 1, .first_bucket_bytes = -1}); }), HasSubstr("first_bucket_bytes = -1"));
}

TEST(BucketLayout, RefusesAnOrderThatIsNoPermutation) {
  for (const std::vector<int64_t>& order : std::vector<std::vector<int64_t>>{{0, 1, 2}, {0, 1, 2, 2}, {0, 1, 2, 4}, {-1, 1, 2, 3}}) {
    EXPECT_THROW(make_bucket_layout(four, order), InternalError);
  }
}

TEST(BucketLayout, APlanOfAnotherModelIsRefusedByName) {
  const BucketLayout plan = make_bucket_layout(four);
  const auto check = [&](std::vector<GradientSpec> gradients) { return refusal([&] { check_bucket_layout(plan, gradients, "checkpoint"); }); };
  EXPECT_NO_THROW(check_bucket_layout(plan, four, "checkpoint"));
  EXPECT_THAT(check({{"a", 10}, {"b", 20}, {"c", 5}}), HasSubstr("'d' is no trainable parameter"));
  EXPECT_THAT(check({{"a", 10}, {"b", 20}, {"c", 5}, {"d", 7}}), HasSubstr("'d' has 6 elements of fp32, the model's gradient 7 of fp32"));
  EXPECT_THAT(check({{"a", 10}, {"b", 20}, {"c", 5}, {"d", 6, at::kBFloat16}}), HasSubstr("6 of bf16"));
  EXPECT_THAT(check({{"a", 10}, {"b", 20}, {"c", 5}, {"d", 6}, {"e", 1}}), HasSubstr("in no bucket, among them 'e'"));
  BucketLayout gap = plan;
  gap.buckets[0].slots[1].offset += 1;
  EXPECT_THAT(refusal([&] { check_bucket_layout(gap, four, "checkpoint"); }), HasSubstr("starts at element"));
  BucketLayout twice = plan;
  twice.buckets.push_back(plan.buckets[0]);
  EXPECT_THAT(refusal([&] { check_bucket_layout(twice, four, "checkpoint"); }), HasSubstr("listed twice"));
}

TEST(BucketLayout, JsonNamesTheBadField) {
  nlohmann::json json = to_json(make_bucket_layout(four));
  json.erase("observed");
  EXPECT_THAT(refusal([&] { bucket_layout_from_json(json); }), HasSubstr("\"observed\""));
  json = to_json(make_bucket_layout(four));
  json["buckets"][0]["dtype"] = "fp7";
  EXPECT_THAT(refusal([&] { bucket_layout_from_json(json); }), HasSubstr("\"fp7\""));
  EXPECT_THAT(refusal([&] { bucket_layout_from_json(nlohmann::json::array()); }), HasSubstr("\"bucket_bytes\""));
}

TEST(BucketLayout, Prints) {
  const std::string text = to_string(make_bucket_layout(four, {.bucket_bytes = 120, .first_bucket_bytes = 24}));
  EXPECT_THAT(text, HasSubstr("3 buckets, 164 B, in reverse registration order\n"));
  EXPECT_THAT(text, HasSubstr("c .. b"));
}

}  // namespace
}  // namespace tessera
