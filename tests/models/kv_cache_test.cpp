#include "tessera/models/kv_cache.h"

#include <gtest/gtest.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/models/blocks.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/embedding.h"
#include "tests/models/tiny.h"
#include "tests/refusal.h"

namespace tessera {
namespace {

class Caching : public ::testing::TestWithParam<std::string> {
 protected:
  Caching() { enlarge(*model); }

  /// Logits of the last of `tokens`, which follow `begin` others at a place.
  at::Tensor read(KvCache& cache, const at::Tensor& tokens, int64_t begin, int place = 0) {
    const KvCache::Reading reading(cache, place, begin, tokens.size(1));
    const std::optional<at::Tensor> none;
    return nn::call(*model, tokens, none, reading.positions(tokens.device()), none, true).select(1, 0);
  }

  std::shared_ptr<LanguageModel> model = tiny_model(tiny_config(GetParam()));
};
INSTANTIATE_TEST_SUITE_P(Models, Caching, ::testing::Values("llama", "gpt2", "mixtral", "mlp"), [](const auto& info) { return info.param; });

TEST_P(Caching, LogitsEqualTheFullForward) {
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(37, {2, 11});
  const at::Tensor full = model->logits(tokens);
  KvCache cache(*model);
  for (int64_t at = 0; const int64_t columns : {4, 1, 3, 1, 2}) {  // one token and several, at the start and later
    const at::Tensor logits = read(cache, tokens.narrow(1, at, columns), at);
    at += columns;
    EXPECT_TRUE(at::allclose(logits, full.select(1, at - 1), 1e-4, 1e-4)) << "after " << at;
  }
  EXPECT_TRUE(at::equal(model->logits(tokens), full)) << "other calls pass by the cache";
  EXPECT_TRUE(at::allclose(read(cache, tokens.narrow(1, 0, 3), 0), full.select(1, 2), 1e-4, 1e-4)) << "what was there is forgotten";
}

/// A place of twice the window at most: columns that are let go of, a read that is longer than that, a read that goes back a little.
TEST_P(Caching, WithAWindowKeepsWhatItReaches) {
  if (GetParam() == "mlp") return;
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(37, {2, 16});
  for (const int64_t window : {1, 3, 5}) {
    ModelConfig windowed = tiny_config(GetParam());
    windowed.sliding_window = window;
    model = tiny_model(windowed);
    enlarge(*model);
    const at::Tensor full = model->logits(tokens);
    KvCache cache(*model);
    for (const std::vector<int64_t>& reads : {std::vector<int64_t>{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, {13, 1, 1, 1}, {4, 3, 1, 8}, {2, 12, 1}}) {
      for (int64_t at = 0; const int64_t columns : reads) {
        const at::Tensor logits = read(cache, tokens.narrow(1, at, columns), at);
        at += columns;
        EXPECT_TRUE(at::allclose(logits, full.select(1, at - 1), 1e-4, 1e-4)) << "after " << at << ", window " << window;
      }
    }
    read(cache, tokens.narrow(1, 0, 14), 0);
    if (window == 5) {
      EXPECT_THROW(read(cache, tokens.narrow(1, 6, 1), 6), ConfigError) << "its window begins before what is there";
      EXPECT_TRUE(at::allclose(read(cache, tokens.narrow(1, 14, 2), 14), full.select(1, 15), 1e-4, 1e-4));
      EXPECT_TRUE(at::allclose(read(cache, tokens.narrow(1, 14, 1), 14), full.select(1, 14), 1e-4, 1e-4)) << "once more";
    }
  }
}

TEST_P(Caching, PlacesKeepSequencesApart) {
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(37, {3, 6});
  const at::Tensor full = model->logits(tokens);
  KvCache cache(*model, 2);
  read(cache, tokens.narrow(0, 0, 1).narrow(1, 0, 4), 0, 0);
  read(cache, tokens.narrow(0, 1, 2).narrow(1, 0, 5), 0, 1);  // of another length, and of more rows
  EXPECT_TRUE(at::allclose(read(cache, tokens.narrow(0, 0, 1).narrow(1, 4, 2), 4, 0), full.narrow(0, 0, 1).select(1, 5), 1e-4, 1e-4));
  EXPECT_TRUE(at::allclose(read(cache, tokens.narrow(0, 1, 2).narrow(1, 5, 1), 5, 1), full.narrow(0, 1, 2).select(1, 5), 1e-4, 1e-4));
  EXPECT_TRUE(at::allclose(read(cache, tokens.narrow(1, 0, 2), 0, 0), full.select(1, 1), 1e-4, 1e-4)) << "a place takes other rows where it begins";
}

TEST_P(Caching, RefusesWhatDoesNotFit) {
  KvCache cache(*model, 1, 4);
  EXPECT_THROW(read(cache, at::zeros({1, 5}, at::kLong), 0), ConfigError);
  EXPECT_THROW(read(cache, at::zeros({1, 2}, at::kLong), 3), ConfigError);
  EXPECT_THROW(read(cache, at::zeros({1, 0}, at::kLong), 0), ConfigError);
  EXPECT_THROW(read(cache, at::zeros({1, 1}, at::kLong), 0, 1), InternalError);
  EXPECT_THROW(KvCache(*model, 1, 17), ConfigError);
}

TEST_P(Caching, WhatWasSkippedIsRefused) {
  if (GetParam() == "mlp") return;
  const at::NoGradGuard no_grad;
  const at::Tensor tokens = at::randint(37, {1, 6});
  KvCache cache(*model);
  read(cache, tokens.narrow(1, 0, 2), 0);
  EXPECT_THROW(read(cache, tokens.narrow(1, 4, 1), 4), ConfigError) << "two between were never read";
}

/// A model of a program's own, whose attention is called with queries, keys and values alone.
class ThreeValuesImpl : public LanguageModel {
 public:
  explicit ThreeValuesImpl(const ModelConfig& config) : LanguageModel(config), embed_tokens_(config.vocab_size, config.dim) {
    register_module("embed_tokens", embed_tokens_);
    register_module("core", core_);
    register_head(embed_tokens_->weight);
    nn::assign_paths(*this);
  }
  at::Tensor embed(const at::Tensor& tokens, const TokenPlaces&) override { return embed_tokens_(tokens); }
  int64_t num_blocks() const override { return 1; }
  at::Tensor run_blocks(at::Tensor stream, int64_t begin, int64_t end, int64_t, const TokenPlaces&) override {
    if (begin == end) return stream;
    const at::Tensor heads = stream.unflatten(-1, {config().heads, -1});
    return add_to_stream(stream, core_(heads, heads, heads).flatten(-2));
  }
  at::Tensor normed(const at::Tensor& stream) override { return stream; }
  std::string attention_pattern() const override { return "core"; }

 private:
  nn::Embedding embed_tokens_;
  nn::AttentionCore core_;
};

TEST(CachingOfOwnModels, AttentionMayBeCalledWithoutPositions) {
  const at::NoGradGuard no_grad;
  const auto model = std::make_shared<ThreeValuesImpl>(tiny_config("gpt2"));
  const at::Tensor tokens = at::randint(37, {2, 9});
  const at::Tensor full = model->logits(tokens);
  KvCache cache(*model);
  const auto read = [&](int64_t begin, int64_t columns, KvCache::Read what) {
    const KvCache::Reading reading(cache, 0, begin, columns, what);
    return model->logits(tokens.narrow(1, begin, columns)).select(1, -1);
  };
  for (int64_t at = 0; const int64_t columns : {4, 1, 3, 1}) {
    const at::Tensor logits = read(at, columns, KvCache::Read::Whole);
    at += columns;
    EXPECT_TRUE(at::allclose(logits, full.select(1, at - 1), 1e-4, 1e-4)) << "after " << at;
  }
  const std::string refused = testing_support::refusal([&] { read(0, 4, KvCache::Read::Part); });
  EXPECT_NE(refused.find("attention 'core' is called without positions"), std::string::npos) << refused;
}

/// Ranks that share a text's columns go back as one does.
TEST(CachingOverRanks, WhatLiesBehindTheBeginningIsForgotten) {
  for (const int ranks : {2, 3}) {
    comm::run_ranks(ranks, [&](comm::World& world) {
      const at::NoGradGuard no_grad;
      const at::Tensor tokens = at::arange(6, at::kLong).unsqueeze(0);
      const auto model = tiny_model(tiny_config("llama"));
      int index = 0;
      for (at::Tensor parameter : model->parameters())
        parameter.copy_(at::sin(at::arange(parameter.numel(), parameter.options()).view(parameter.sizes()) * 0.7 + ++index) * 0.5);
      KvCache cache(*model, 1, 0, world.group());
      const auto read = [&](int64_t at, int64_t token) {
        const KvCache::Reading reading(cache, 0, at, 1);
        const std::optional<at::Tensor> none;
        return nn::call(*model, tokens.narrow(1, token, 1), none, reading.positions(tokens.device()), none, true).select(1, 0);
      };
      for (int64_t at = 0; at < 4; ++at) read(at, at);
      const at::Tensor got = read(2, 5);  // another third token
      const at::Tensor want = model->logits(at::cat({tokens.narrow(1, 0, 2), tokens.narrow(1, 5, 1)}, 1)).select(1, 2);
      EXPECT_TRUE(at::allclose(got, want, 1e-4, 1e-4)) << ranks;
    });
  }
}

}  // namespace
}  // namespace tessera
