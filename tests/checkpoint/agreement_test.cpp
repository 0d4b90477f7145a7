#include "tessera/checkpoint/agreement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

Config example() {
  Config config;
  config.model.family = "llama";
  config.model.dim = 32;
  config.model.kv_heads = 2;
  config.data.seed = 1;
  config.batch.global_size = 8;
  return config;
}

void expect_disagreement(const std::function<void(Config&)>& change, const std::string& key) {
  Config changed = example();
  change(changed);
  EXPECT_THAT([&] { check_agreement(agreement_of(example(), "h"), agreement_of(changed, "h"), "ckpt/step-1"); },
              ThrowsMessage<ConfigError>(AllOf(testing::StartsWith(key + " = "), HasSubstr("ckpt/step-1"))));
}

TEST(Agreement, HoldsWhereOnlyLayoutAndPlacesChange) {
  Config other = example();
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
  EXPECT_NO_THROW(check_agreement(agreement_of(example(), "h"), agreement_of(other, "h"), "ckpt"));
}

TEST(Agreement, NamesTheFirstKeyThatDiffersWithBothValues) {
  expect_disagreement([](Config& config) { config.model.dim = 64; }, "model.dim");
  expect_disagreement([](Config& config) { config.model.kv_heads = 1; }, "model.kv_heads");
  expect_disagreement([](Config& config) { config.data.seq_len = 9; }, "data.seq_len");
  expect_disagreement([](Config& config) { config.data.seed = 2; }, "data.seed");
  expect_disagreement([](Config& config) { config.data.shuffle = false; }, "data.shuffle");
  expect_disagreement([](Config& config) { config.batch.global_size = 4; }, "batch.global_size");
  expect_disagreement([](Config& config) { config.run.seed = 5; }, "run.seed");
  expect_disagreement([](Config& config) { config.loss.z_loss = 1e-4; }, "loss.z_loss");
  expect_disagreement([](Config& config) { config.optim.name = "sgd"; }, "optim.name");
  expect_disagreement([](Config& config) { config.optim.betas = {0.9, 0.95}; }, "optim.betas");
  EXPECT_THAT([] { check_agreement(agreement_of(example(), "h"), agreement_of(example(), "i"), "ckpt"); },
              ThrowsMessage<ConfigError>(AllOf(HasSubstr("data.files = \"i\""), HasSubstr("\"h\""))));
}

TEST(Agreement, AnOlderCheckpointWithoutAKeyWasWrittenWithItsDefault) {
  auto saved = agreement_of(example(), "h");
  saved.erase("loss.label_smoothing");
  EXPECT_NO_THROW(check_agreement(saved, agreement_of(example(), "h"), "ckpt"));
  Config smoothed = example();
  smoothed.loss.label_smoothing = 0.1;
  EXPECT_THAT([&] { check_agreement(saved, agreement_of(smoothed, "h"), "ckpt"); },
              ThrowsMessage<ConfigError>(HasSubstr("loss.label_smoothing = 0.1: ckpt was written with 0.0")));
  saved.erase("model.dim");
  EXPECT_THAT([&] { check_agreement(saved, agreement_of(example(), "h"), "ckpt"); },
              ThrowsMessage<ConfigError>(HasSubstr("model.dim = 32: ckpt was written with 0")));
  EXPECT_THROW(check_agreement(nlohmann::json(), agreement_of(example(), "h"), "ckpt"), ConfigError);
}

}  // namespace
}  // namespace tessera::checkpoint
