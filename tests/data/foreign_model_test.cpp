// Models that others trained, with other settings than ours: the ids are those of SentencePiece on the whole text.
#ifdef TESSERA_WITH_SENTENCEPIECE

#include <unordered_map>

#include <gmock/gmock.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include "tessera/data/tokenizer.h"
#include "tests/data/files.h"

namespace tessera::data {
namespace {

using Settings = std::unordered_map<std::string, std::string>;

struct Foreign {
  const char* name;
  Settings settings;
  bool lossless;
};
void PrintTo(const Foreign& foreign, std::ostream* out) { *out << foreign.name; }

class ForeignModel : public testing::TestWithParam<Foreign> {
 protected:
  void SetUp() override {
    Settings settings = GetParam().settings;
    settings.insert({{"input", folder_.write("text.txt", words(600) + "caf\u00e9 caf\u00e9 na\u00efve\n").string()},
                     {"model_prefix", (folder_ / "foreign").string()},
                     {"vocab_size", settings.contains("byte_fallback") ? "400" : "150"},
                     {"minloglevel", "2"}});
    ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train(settings).ok());
    ASSERT_TRUE(reference_.Load((folder_ / "foreign.model").string()).ok());
    tokenizer_ = Tokenizer::load((folder_ / "foreign.model").string());
  }

  Folder folder_;
  sentencepiece::SentencePieceProcessor reference_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_P(ForeignModel, GivesSentencePiecesOwnIds) {
  const std::vector<std::string> texts = {"",
                                          "the",
                                          " the",
                                          "the ",
                                          "the\nthe",
                                          "the\n the",
                                          "the\n\n\nthe \n ring",
                                          "\n",
                                          "\n\nthe",
                                          "  the  ring  ",
                                          "caf\u00e9 ring\ncaf\u00e9",
                                          "\tthe\tring\n\t",
                                          "caf\u00e9 \u4e2d\n\u4e2d",
                                          "The Ring, THE ring\nThe",
                                          "cafe\u0301 na\u0308ive \uff76\uff9e",
                                          words(20),
                                          "\n " + words(10, 3) + "\n\n"};
  for (const std::string& text : texts) {
    std::vector<int> expected;
    ASSERT_TRUE(reference_.Encode(text, &expected).ok());
    EXPECT_EQ(tokenizer_->encode(text), std::vector<int32_t>(expected.begin(), expected.end())) << '"' << text << '"';
    if (GetParam().lossless) {
      EXPECT_EQ(tokenizer_->decode(tokenizer_->encode(text)), text);
    } else {
      EXPECT_EQ(tokenizer_->decode(tokenizer_->encode(text)), reference_.DecodeIds(expected)) << '"' << text << '"';
    }
  }
  // Shown as it comes.
  const auto shown = [&](const std::vector<int32_t>& ids) {
    StreamDecoder decoder(*tokenizer_);
    std::string text;
    for (const int32_t id : ids) text += decoder.add(id);
    return text + decoder.finish();
  };
  const std::string line = "the ring the  ring";
  EXPECT_EQ(shown(tokenizer_->encode(line)), tokenizer_->decode(tokenizer_->encode(line)));
  if (GetParam().settings.contains("byte_fallback")) {
    std::vector<std::vector<int32_t>> spelled{tokenizer_->encode("\u4e2d the \U0001F600\U0001F600ring caf\u00e9 \u4e2d")};
    const auto bytes = [&](std::initializer_list<const char*> names) {
      std::vector<int32_t> ids;
      for (const char* name : names) ids.push_back(reference_.PieceToId(name));
      return ids;
    };
    spelled.push_back(bytes({"<0xF0>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0xE4>"}));
    spelled.push_back(bytes({"<0xF0>", "<0xF0>", "<0xF0>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0xC3>", "<0xC3>", "<0xA9>"}));
    for (const auto& ids : spelled) EXPECT_EQ(shown(ids), tokenizer_->decode(ids));
  }
  // Long enough to be dealt over threads.
  const std::string text = words(12000);
  std::vector<int32_t> ids, whole = tokenizer_->encode(text);
  ParallelEncoder(*tokenizer_, 2).append(text, true, ids);
  EXPECT_EQ(ids, whole);

  const std::string malformed = "ring the\n caf\xe9 ring\n";
  if (GetParam().lossless) {
    EXPECT_EQ(tokenizer_->decode(tokenizer_->encode(malformed)), malformed);
  } else {
    EXPECT_THAT(refusal([&] { tokenizer_->encode(malformed); }), testing::HasSubstr("not valid UTF-8 at byte 13"));
    // In a part that is not the first, of a text that began before.
    EXPECT_THAT(refusal([&] { ParallelEncoder(*tokenizer_, 2).append(text + malformed, true, ids, 1000); }),
                testing::HasSubstr("not valid UTF-8 at byte " + std::to_string(1000 + text.size() + 13)));
  }
}

/// The settings of train_tokenizer.
Settings ours(const char* type) {
  return {{"model_type", type},
          {"byte_fallback", "true"},
          {"normalization_rule_name", "identity"},
          {"add_dummy_prefix", "false"},
          {"remove_extra_whitespaces", "false"},
          {"allow_whitespace_only_pieces", "true"}};
}

// LLaMA's settings; T5's and the library's defaults; a model that maps newlines to nothing special and keeps them unknown; pieces that reach across words.
INSTANTIATE_TEST_SUITE_P(
    Settings, ForeignModel,
    testing::Values(Foreign{"llama",
                            {{"model_type", "bpe"}, {"byte_fallback", "true"}, {"normalization_rule_name", "identity"}, {"remove_extra_whitespaces", "false"}},
                            true},
                    Foreign{"defaults", {{"model_type", "unigram"}}, false}, Foreign{"defaults_bpe", {{"model_type", "bpe"}}, false},
                    Foreign{"identity", {{"model_type", "bpe"}, {"normalization_rule_name", "identity"}}, false}, Foreign{"ours_bpe", ours("bpe"), true},
                    Foreign{"ours_unigram", ours("unigram"), true},
                    Foreign{"newline_symbols",
                            {{"model_type", "bpe"},
                             {"byte_fallback", "true"},
                             {"normalization_rule_name", "identity"},
                             {"remove_extra_whitespaces", "false"},
                             {"user_defined_symbols", "\n,\n\n,\t"}},
                            true},
                    Foreign{"across_words",
                            {{"model_type", "bpe"},
                             {"byte_fallback", "true"},
                             {"normalization_rule_name", "identity"},
                             {"remove_extra_whitespaces", "false"},
                             {"add_dummy_prefix", "false"},
                             {"split_by_whitespace", "false"}},
                            true},
                    Foreign{"across_newlines",
                            {{"model_type", "bpe"},
                             {"byte_fallback", "true"},
                             {"normalization_rule_name", "identity"},
                             {"remove_extra_whitespaces", "false"},
                             {"add_dummy_prefix", "false"},
                             {"user_defined_symbols", "e\n,\nthe,\n r"}},
                            true},
                    Foreign{"identity_without_prefix",
                            {{"model_type", "bpe"}, {"byte_fallback", "true"}, {"normalization_rule_name", "identity"}, {"add_dummy_prefix", "false"}},
                            false},
                    // Rules that the characters of no probe meet: capitals, marks behind their letters, half-width kana.
                    Foreign{"folded",
                            {{"model_type", "bpe"}, {"byte_fallback", "true"}, {"normalization_rule_name", "nfkc_cf"}, {"remove_extra_whitespaces", "false"}},
                            false},
                    Foreign{"composed",
                            {{"model_type", "bpe"},
                             {"byte_fallback", "true"},
                             {"normalization_rule_name", "nfkc"},
                             {"remove_extra_whitespaces", "false"},
                             {"add_dummy_prefix", "false"}},
                            false},
                    Foreign{"across_newlines_that_are_spaces", {{"model_type", "bpe"}, {"split_by_whitespace", "false"}}, false}),
    [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace tessera::data

#endif
