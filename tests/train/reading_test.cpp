#include "tessera/train/reading.h"

#include <gmock/gmock.h>

#include "tests/refusal.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class FoundModels : public testing_support::TrainFixture {
 protected:
  /// As find_model gives it: trained with the tokenizer of that fingerprint, whose file was `saved`.
  FoundModel found(const std::string& fingerprint, const std::string& saved = "byte") const {
    Config trained = config("llama");
    trained.data.tokenizer = saved;
    FoundCheckpoint checkpoint{.folder = "/ckpt/step-00000002", .manifest = {}, .config = config("llama")};
    checkpoint.manifest.step = 2;
    checkpoint.manifest.run.run = "abc";
    checkpoint.manifest.progress = {{"config", to_toml(trained)}};
    checkpoint.manifest.agreement = {{"data.files", {{"tokenizer", fingerprint}}}};
    checkpoint.remarks = {"passing over another"};
    return {.config = config("llama"), .checkpoint = checkpoint};
  }
  const std::string byte_ = data::Tokenizer::load("byte")->fingerprint();
};

TEST_F(FoundModels, TakesTheTokenizerThatTheModelWasTrainedWith) {
  EXPECT_THAT(find_tokenizer(found(byte_), "").remarks, IsEmpty());
  EXPECT_THAT(find_tokenizer(found(byte_, "/moved.model"), "byte").remarks, IsEmpty()) << "what it holds counts, not where it lies";
  EXPECT_THAT(testing_support::refusal([&] { find_tokenizer(found("other"), ""); }),
              testing::AllOf(HasSubstr("data.tokenizer = byte: is not the tokenizer that /ckpt/step-00000002"), HasSubstr("--tokenizer")));
  const auto said = ElementsAre(HasSubstr("is not the tokenizer that /ckpt/step-00000002 was trained with (/t.model"));
  EXPECT_THAT(find_tokenizer(found("other", "/t.model"), "byte").remarks, said) << "named by the flag";
  EXPECT_THAT(find_tokenizer(found("other", "/t.model"), "").remarks, said) << "named by --set";
  EXPECT_THAT(find_tokenizer({.config = config("llama"), .checkpoint = {}}, "").remarks, IsEmpty()) << "of a Hugging Face model none is known";
}

TEST_F(FoundModels, SaysWhatWasPassedOverAndWhatHasNoEffect) {
  EXPECT_THAT(reading_remarks(found(byte_), {"run.threads=1"}), ElementsAre("passing over another"));
  EXPECT_THAT(reading_remarks(found(byte_), {"optim.lr=0.01"}), ElementsAre("passing over another", HasSubstr("optim.lr = 0.01: has no effect")));
  FoundModel wrong = found(byte_);
  wrong.config.optim.lr = -1;
  EXPECT_THAT(testing_support::refusal([&] { reading_remarks(wrong, {"optim.lr=-1"}); }), HasSubstr("optim.lr = -1"));
  FoundModel mixture = found(byte_);
  mixture.config = config("mixtral", {"moe.capacity_factor=0.01"});
  EXPECT_THAT(reading_remarks(mixture, {"moe.capacity_factor=0.01"}), testing::Contains(HasSubstr("has no effect"))) << "a batch in training is not read";
  mixture.config.moe.capacity_factor = -1;
  EXPECT_THAT(testing_support::refusal([&] { reading_remarks(mixture, {"moe.capacity_factor=-1"}); }), HasSubstr("moe.capacity_factor = -1"));
}

TEST_F(FoundModels, TellsCheckpointsApart) {
  const auto tokenizer = data::Tokenizer::load("byte");
  EXPECT_THAT(reading_settings(found(byte_), *tokenizer), testing::Contains(std::pair<std::string, std::string>("--checkpoint", "step 2 of run abc")));
}

}  // namespace
}  // namespace tessera
