#include "tessera/models/generate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/models/kv_cache.h"
#include "tests/models/tiny.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

class Generation : public ::testing::TestWithParam<std::string> {
 protected:
  Generation() { enlarge(*model); }
  std::shared_ptr<LanguageModel> model = tiny_model(tiny_config(GetParam()));
};
INSTANTIATE_TEST_SUITE_P(Models, Generation, ::testing::Values("llama", "gpt2", "mlp"), [](const auto& info) { return info.param; });

TEST_P(Generation, CachedLogitsEqualTheFullForward) {
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(37, {2, 11});
  const at::Tensor full = model->logits(tokens);
  KvCache cache(*model, 2);
  for (int64_t at = 0; const int64_t columns : {4, 1, 3, 1, 2}) {  // one token and several, at the start and later
    const at::Tensor logits = cache.step(tokens.narrow(1, at, columns));
    at += columns;
    EXPECT_EQ(cache.length(), at);
    EXPECT_TRUE(at::allclose(logits, full.select(1, at - 1), 1e-4, 1e-4)) << "after " << at;
  }
  EXPECT_TRUE(at::equal(model->logits(tokens), full));  // other calls pass by the cache
  EXPECT_EQ(cache.length(), 11);
  cache.clear();
  EXPECT_TRUE(at::allclose(cache.step(tokens.narrow(1, 0, 3)), full.select(1, 2), 1e-4, 1e-4));
}

TEST_P(Generation, CacheRefusesWhatDoesNotFit) {
  KvCache cache(*model, 2, 4);
  EXPECT_THROW(cache.step(at::zeros({1, 2}, at::kLong)), ConfigError);
  EXPECT_THROW(cache.step(at::zeros({2, 5}, at::kLong)), ConfigError);
  EXPECT_THROW(cache.step(at::zeros({2, 0}, at::kLong)), ConfigError);
  EXPECT_THROW(KvCache(*model, 1, 17), ConfigError);
}

TEST_P(Generation, GreedyTextIsWhatFullForwardsChoose) {
  const std::vector<int64_t> prompt{3, 1, 4};
  const auto made = generate(*model, prompt, 6, {.temperature = 0});
  std::vector<int64_t> seen = prompt;
  for (const int64_t token : made) {
    const at::Tensor logits = model->logits(at::tensor(seen, at::kLong).unsqueeze(0))[0][-1];
    EXPECT_EQ(token, logits.argmax().item<int64_t>());
    seen.push_back(token);
  }
  EXPECT_EQ(made.size(), 6u);
  EXPECT_TRUE(model->is_training());
}

TEST_P(Generation, GoesOnBeyondTheContextAndStopsWhereTold) {
  std::vector<int64_t> long_prompt(40, 5);
  EXPECT_EQ(generate(*model, long_prompt, 50, {.seed = 2}).size(), 50u);
  EXPECT_EQ(generate(*model, {1}, 50, {.seed = 2}), generate(*model, {1}, 50, {.seed = 2}));
  EXPECT_NE(generate(*model, {1}, 50, {.seed = 2}), generate(*model, {1}, 50, {.seed = 3}));
  int64_t count = 0;
  EXPECT_EQ(generate(*model, {1}, 50, {}, std::nullopt, [&](int64_t) { return ++count < 3; }).size(), 3u);
  const auto greedy = generate(*model, {1}, 4, {.temperature = 0});
  EXPECT_EQ(generate(*model, {1}, 50, {.temperature = 0}, greedy[0]).size(), 1u);
  EXPECT_TRUE(generate(*model, {1}, 0, {}).empty());
  EXPECT_THROW(generate(*model, {}, 1, {}), ConfigError);
}

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
