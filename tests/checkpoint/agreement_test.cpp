#include "tessera/checkpoint/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/config/defaults.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

Config example_config() {
  Config config;
  config.model.family = "llama";
  config.model.dim = 32;
  config.model.kv_heads = 2;
  config.data.seed = 1;
  config.batch.global_size = 8;
  return config;
}

void expect_disagreement(const std::function<void(Config&)>& change, const std::string& key) {
  Config changed = example_config();
  change(changed);
  EXPECT_THAT([&] { check_agreement(agreement_of(example_config(), "h"), agreement_of(changed, "h"), "ckpt/step-1"); },
              ThrowsMessage<ConfigError>(AllOf(testing::StartsWith(key + " = "), HasSubstr("ckpt/step-1"))));
}

TEST(Agreement, HoldsWhereOnlyLayoutAndPlacesChange) {
  Config other = example_config();
  other.mesh.tp = 2;
  other.zero.stage = 3;
  other.comm.backend = "shm";
  other.recompute.mode = "full";
  other.log.dir = "/other";
  other.batch.micro_size = 4;
  other.run.steps = 99;
  other.run.threads = 3;
  other.data.files = {"/moved/text"};
  other.data.cache_dir = "/moved";
  other.model.from_hf = "/model";
  other.batch.global_size = 16;  // data::carried judges these two
  other.data.seq_len = 9;
  other.data.bos = false;  // the identity of the data judges it
  other.optim.lr = 3e-4;
  other.optim.max_grad_norm = 1;
  other.optim.betas = {0.9, 0.95};
  other.optim.schedule = "cosine";
  other.optim.weight_decay = 0.1;
  other.loss.z_loss = 1e-4;
  EXPECT_NO_THROW(check_agreement(agreement_of(example_config(), "h"), agreement_of(other, "h"), "ckpt"));
}

TEST(Agreement, NamesTheFirstKeyThatDiffersWithBothValues) {
  expect_disagreement([](Config& config) { config.model.dim = 64; }, "model.dim");
  expect_disagreement([](Config& config) { config.model.kv_heads = 1; }, "model.kv_heads");
  expect_disagreement([](Config& config) { config.data.seed = 2; }, "data.seed");
  expect_disagreement([](Config& config) { config.data.shuffle = false; }, "data.shuffle");
  expect_disagreement([](Config& config) { config.run.seed = 5; }, "run.seed");
  expect_disagreement([](Config& config) { config.optim.name = "sgd"; }, "optim.name");
  EXPECT_THAT([] { check_agreement(agreement_of(example_config(), "h"), agreement_of(example_config(), "i"), "ckpt"); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("data.files = \"i\""), HasSubstr("\"h\""))));
}

/// Beside nothing that reads it a key may be anything; who begins to read it is told of that.
TEST(Agreement, WhatNothingReadsNeedNotAgree) {
  const auto changed = [](const std::function<void(Config&)>& change) {
    Config config = example_config();
    change(config);
    return agreement_of(config, "h");
  };
  const auto rank = [](Config& config) { config.lora.rank = 3, config.lora.alpha = 5; };
  EXPECT_NO_THROW(check_agreement(changed([](Config&) {}), changed(rank), "ckpt"));
  EXPECT_NO_THROW(check_agreement(changed(rank), changed([](Config&) {}), "ckpt"));
  const auto in_order = [](int64_t seed) { return [seed](Config& config) { config.data.shuffle = false, config.data.seed = seed; }; };
  EXPECT_NO_THROW(check_agreement(changed(in_order(1)), changed(in_order(2)), "ckpt"));
  const auto adapted = [](int64_t rank) { return [rank](Config& config) { config.lora.modules = "layers.*", config.lora.rank = rank; }; };
  EXPECT_THAT([&] { check_agreement(changed(rank), changed(adapted(3)), "ckpt"); }, ThrowsMessage<ConfigError>(HasSubstr("lora.modules = \"layers.*\"")));
  EXPECT_THAT([&] { check_agreement(changed(adapted(4)), changed(adapted(3)), "ckpt"); }, ThrowsMessage<ConfigError>(HasSubstr("lora.rank = 3: ckpt was")));
  EXPECT_THAT([&] { check_agreement(changed(in_order(1)), changed([](Config&) {}), "ckpt"); }, ThrowsMessage<ConfigError>(HasSubstr("data.shuffle = true")));
}

TEST(Agreement, SaysThatTheTextHasChangedInWords) {
  const auto told = [](const nlohmann::json& now) -> std::string {
    try {
      check_agreement(agreement_of(example_config(), {{"content", "a1"}, {"tokenizer", "b2"}}), agreement_of(example_config(), now), "ckpt/step-1");
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "agrees";
  };
  const std::string rest = "that ckpt/step-1 was written with; resume with the same, as it was then, or start anew with checkpoint.resume = \"\"";
  EXPECT_EQ(
      told({{"content", "c3"}, {"tokenizer", "b2"}}),
      "data.files: the files do not hold, byte for byte, what ckpt/step-1 was written with: another text, or the same one compressed otherwise, or unpacked; "
      "resume with the files as they were then, or with what was packed of them (*-a1.bin in data.cache_dir then) as data.files, or start anew with "
      "checkpoint.resume = \"\"");
  EXPECT_EQ(told({{"content", "c3"}, {"tokenizer", "d4"}}), "data.tokenizer: the tokenizer is not the one " + rest);
  EXPECT_EQ(told({{"content", "a1"}, {"tokenizer", "b2"}}), "agrees");
  EXPECT_EQ(told({{"content", "c3"}, {"tokenizer", "b2"}, {"bos", true}}),
            "data.bos = true: ckpt/step-1 was written with false; resume with the same value, or start anew with checkpoint.resume = \"\"");
}

TEST(Agreement, BlamesTheKeyThatADefaultFollows) {
  const auto of = [](int64_t seed, int64_t seq_len) {
    Config config = example_config();
    config.data.seed.reset();
    config.run.seed = seed;
    config.data.seq_len = seq_len;
    resolve(config);
    return config;
  };
  const auto told = [&](const Config& now) {
    try {
      check_agreement(agreement_of(of(1, 32), "h"), agreement_of(now, "h"), "ckpt", followed_defaults(now));
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("(accepted)");
  };
  EXPECT_EQ(told(of(1, 32)), "(accepted)");
  EXPECT_THAT(told(of(2, 32)), testing::StartsWith("run.seed = 2: ckpt was written with 1; resume with the same value"));
  EXPECT_THAT(told(of(1, 16)), testing::StartsWith("data.seq_len = 16: model.max_seq_len is not set and follows it, and ckpt was written with "
                                                   "model.max_seq_len = 32; set model.max_seq_len = 32, or"));
  Config given = of(1, 16);
  given.model.max_seq_len = 32;
  EXPECT_EQ(told(given), "(accepted)");
  given.data.seed = 3;
  EXPECT_THAT(told(given), testing::StartsWith("data.seed = 3"));
}

TEST(Agreement, AnOlderCheckpointWithoutAKeyWasWrittenWithItsDefault) {
  auto saved = agreement_of(example_config(), "h");
  saved.erase("model.dropout");
  saved["loss.z_loss"] = 0.5;  // and one that held more than has to agree now
  EXPECT_NO_THROW(check_agreement(saved, agreement_of(example_config(), "h"), "ckpt"));
  Config dropping = example_config();
  dropping.model.dropout = 0.1;
  EXPECT_THAT([&] { check_agreement(saved, agreement_of(dropping, "h"), "ckpt"); },
              ThrowsMessage<ConfigError>(HasSubstr("model.dropout = 0.1: ckpt was written with 0.0")));
  saved.erase("model.dim");
  EXPECT_THAT([&] { check_agreement(saved, agreement_of(example_config(), "h"), "ckpt"); },
              ThrowsMessage<ConfigError>(HasSubstr("model.dim = 32: ckpt was written with 0")));
  EXPECT_THROW(check_agreement(nlohmann::json(), agreement_of(example_config(), "h"), "ckpt"), ConfigError);
}

/// Whose other settings only a run with such weights writes down.
TEST(Agreement, AFormatOfQuantizedWeightsMeetsACheckpointThatHasNone) {
  Config quantized = example_config();
  quantized.quantize.modules = "layers.*";
  const auto with = agreement_of(quantized, "h"), without = agreement_of(example_config(), "h");
  EXPECT_THAT([&] { check_agreement(without, with, "ckpt"); },
              ThrowsMessage<ConfigError>(HasSubstr("quantize.modules = \"layers.*\": ckpt was written with \"\"")));
  EXPECT_THAT([&] { check_agreement(with, without, "ckpt"); }, ThrowsMessage<ConfigError>(HasSubstr("quantize.modules = \"\": ckpt was written with")));
}

TEST(ChangedSettings, AreNamedWithBothValues) {
  Config other = example_config();
  EXPECT_THAT(changed_settings(example_config(), other), testing::IsEmpty());
  other.checkpoint.every = 3;
  other.log.dir = "/other";
  other.run.steps = 9;
  other.data.files = {"/moved"};
  EXPECT_THAT(changed_settings(example_config(), other), testing::IsEmpty());
  other.optim.lr = 0.25;
  other.optim.schedule = "cosine";
  other.run.threads = 2;
  EXPECT_THAT(changed_settings(example_config(), other),
              testing::ElementsAre("optim.lr = 0.25 (was 0.0)", "optim.schedule = cosine (was constant)", "run.threads = 2 (was unset)"));
}

TEST(ChangedSettings, WhatARunSettlesOnIsNoneWhereTheSameWasAskedFor) {
  Config saved = example_config(), now = saved;
  saved.precision.compute = "auto";  // as it is read back
  now.precision.compute = "bf16";
  now.asked["precision.compute"] = "auto";
  EXPECT_THAT(changed_settings(saved, now), testing::IsEmpty());
  now.asked["precision.compute"] = "bf16";
  EXPECT_THAT(changed_settings(saved, now), testing::ElementsAre("precision.compute = bf16 (was auto)"));
}

}  // namespace
}  // namespace tessera::checkpoint
