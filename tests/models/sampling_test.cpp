#include "tessera/models/sampling.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

TEST(SampleToken, KeepsToItsOptions) {
  const at::Tensor logits = at::tensor({0.0, 3.0, 1.0, 2.0, 3.0});
  EXPECT_EQ(sample_token(logits, {.temperature = 0}, 0), 1);  // the lower of two equals
  for (uint64_t index = 0; index < 200; ++index) {
    EXPECT_EQ(sample_token(logits, {.top_k = 1}, index), 1);
    const int64_t of_three = sample_token(logits, {.top_k = 3}, index);
    EXPECT_TRUE(of_three == 1 || of_three == 4 || of_three == 3);
    const int64_t of_half = sample_token(logits, {.top_p = 0.5}, index);
    EXPECT_TRUE(of_half == 1 || of_half == 4);
    EXPECT_EQ(sample_token(logits, {.top_p = 0.3}, index), 1);
  }
  EXPECT_THROW(sample_token(logits, {.temperature = -1}, 0), ConfigError);
  EXPECT_THROW(sample_token(logits, {.top_k = -1}, 0), ConfigError);
  EXPECT_THROW(sample_token(logits, {.top_p = 0}, 0), ConfigError);
  EXPECT_THROW(sample_token(logits / 0, {}, 0), ConfigError);
}

TEST(SampleToken, FollowsTheProbabilities) {
  const at::Tensor logits = at::log(at::tensor({0.5, 0.3, 0.2}));
  std::vector<int> counts(3);
  constexpr int draws = 20000;
  for (uint64_t index = 0; index < draws; ++index) ++counts[sample_token(logits, {.seed = 9}, index)];
  EXPECT_NEAR(counts[0] / double(draws), 0.5, 0.015);
  EXPECT_NEAR(counts[1] / double(draws), 0.3, 0.015);
  // Of what top_p leaves, each as likely beside the others as before.
  std::vector<int> kept(3);
  for (uint64_t index = 0; index < draws; ++index) ++kept[sample_token(logits, {.top_p = 0.7, .seed = 9}, index)];
  EXPECT_NEAR(kept[0] / double(draws), 0.625, 0.015);
  EXPECT_EQ(kept[2], 0);
  const at::Tensor hot = logits * 2;  // temperature 2 undoes it
  EXPECT_EQ(sample_token(hot, {.temperature = 2, .seed = 9}, 5), sample_token(logits, {.seed = 9}, 5));
}

}  // namespace
}  // namespace tessera
