// Models that others trained, with other settings than ours: the ids are those of SentencePiece on the whole text.
#ifdef TESSERA_WITH_SENTENCEPIECE

#include <cmath>
#include <unordered_map>

#include <gmock/gmock.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include "tessera/data/sequential_loader.h"
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
    settings.insert({{"input", folder_.write("text.txt", words(600) + "caf\u00e9 caf\u00e9 na\u00efve a a a a a a a a a a a a a a a a\n").string()},
                     {"model_prefix", (folder_ / "foreign").string()},
                     {"vocab_size", settings.contains("byte_fallback") ? "400" : "150"},
                     {"minloglevel", "2"}});
    ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train(settings).ok());
    ASSERT_TRUE(reference_.Load((folder_ / "foreign.model").string()).ok());
    tokenizer_ = Tokenizer::load((folder_ / "foreign.model").string());
  }

  size_t bytes_of(const std::string& text) const {
    size_t bytes = 0;
    const auto ids = tokenizer_->encode(text);
    for (size_t i = 0; i < ids.size(); ++i) bytes += (i == 0 ? tokenizer_->first_token_bytes() : tokenizer_->token_bytes())[ids[i]];
    return bytes;
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
                                          "xyzzy\nqwert\n",
                                          "the \u4e2d \n\n \u6587ring\n\nthe\u4e2d\n",
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
      EXPECT_EQ(bytes_of(text), text.size()) << '"' << text << '"';
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
  std::vector<int32_t> marked;  // by ids that stand for no text, at the beginning and within
  for (const int32_t id : tokenizer_->encode(line)) {
    for (const int mark : {reference_.bos_id(), reference_.eos_id()}) {
      if (mark >= 0) marked.push_back(mark);
    }
    marked.push_back(id);
  }
  EXPECT_EQ(shown(marked), tokenizer_->decode(marked));
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
    for (const std::string& spelled : {malformed, "\xe9 " + malformed, std::string("\u2581 the")}) EXPECT_EQ(bytes_of(spelled), spelled.size());
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
                    Foreign{"across_newlines_that_are_spaces", {{"model_type", "bpe"}, {"split_by_whitespace", "false"}}, false},
                    // Whole words, of which those that are unknown become one, over lines as well; and single characters.
                    Foreign{"words", {{"model_type", "word"}, {"hard_vocab_limit", "false"}}, false},
                    Foreign{"words_in_bytes", {{"model_type", "word"}, {"hard_vocab_limit", "false"}, {"byte_fallback", "true"}}, false},
                    Foreign{"words_with_spaces_behind", {{"model_type", "word"}, {"hard_vocab_limit", "false"}, {"treat_whitespace_as_suffix", "true"}}, false},
                    Foreign{"characters", {{"model_type", "char"}, {"hard_vocab_limit", "false"}}, false},
                    Foreign{"spaces_behind", {{"model_type", "unigram"}, {"treat_whitespace_as_suffix", "true"}}, false}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Lines, AreCutWhereNoUnknownIdReachesOverTheirEnds) {
  const Folder folder;
  const auto text = folder.write("text.txt", words(600) + "a a a a a a a a a a a a a a a a\n");
  for (const char* type : {"unigram", "bpe", "char", "word"}) {
    for (const bool bytes : {false, true}) {
      const std::string model = (folder / (std::string(type) + (bytes ? "_bytes" : ""))).string();
      Settings settings{{"input", text.string()}, {"model_prefix", model}, {"minloglevel", "2"}, {"model_type", type}, {"hard_vocab_limit", "false"}};
      settings.insert({{"vocab_size", bytes ? "400" : "100"}, {"byte_fallback", bytes ? "true" : "false"}});
      ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train(settings).ok());
      const auto tokenizer = Tokenizer::load(model + ".model");
      const bool of_words = type == std::string("word");
      if (of_words) ASSERT_TRUE(tokenizer->id_of("\u2581a")) << "that words which are known come apart says nothing of others";
      EXPECT_EQ(tokenizer->boundary("the ring\nthe", 0), bytes || !of_words ? 8 : 12) << model;
    }
  }
}

TEST(UnknownIds, AreCountedAndSaidWhereTheTokenizerCannotSpellATextInBytes) {
  const Folder folder;
  const auto text = folder.write("text.txt", words(600));
  const auto trained = [&](const std::string& name, Settings settings) {
    settings.insert({{"input", text.string()}, {"model_prefix", (folder / name).string()}, {"minloglevel", "2"}, {"model_type", "bpe"}});
    EXPECT_TRUE(sentencepiece::SentencePieceTrainer::Train(settings).ok());
    return Tokenizer::load((folder / name).string() + ".model");
  };
  const auto without = trained("without", {{"vocab_size", "100"}}), with = trained("with", {{"vocab_size", "400"}, {"byte_fallback", "true"}});
  EXPECT_EQ(without->unknown(), 0);
  EXPECT_EQ(Tokenizer::load("byte")->unknown(), std::nullopt);
  const auto foreign = folder.write("foreign.txt", "the \u4e2d ring \u6587\u4e2d the the ring the \u4e2d");  // an id for each run of them
  const auto corpus = Corpus::build({foreign}, *without, folder / "foreign.bin");
  const auto found = unknown_among_first(*corpus, *without);
  EXPECT_EQ(found.unknown, 3);
  EXPECT_EQ(found.ids, corpus->tokens());
  EXPECT_THAT(unknown_remark(found, "the tokens of data.files"),
              testing::AllOf(testing::StartsWith(std::to_string(std::lround(300.0 / static_cast<double>(corpus->tokens()))) + "% of"),
                             testing::HasSubstr(" the tokens of data.files (3 of ")));
  EXPECT_EQ(unknown_among_first(*corpus, *without, 1).unknown, 0);
  EXPECT_EQ(unknown_among_first(*corpus, *without, 1).ids, 1);
  EXPECT_EQ(unknown_among_targets(*corpus, *without, corpus->tokens() - 2).unknown, 2) << "the last id makes no whole window";
  EXPECT_EQ(targets_left_out(*corpus, corpus->tokens() - 2), 1);
  EXPECT_EQ(targets_left_out(*corpus, corpus->tokens() - 1), 0);
  const auto lines = Corpus::build({folder.write("lines.txt", "the \u4e2d ring\n\u6587\n")}, *without, folder / "lines.bin", 0, "", Documents::Lines);
  EXPECT_EQ(unknown_among_targets(*lines, *without, 64).unknown, 2);
  EXPECT_EQ(targets_left_out(*lines, 64), 0) << "windows of documents are filled up";
  for (const auto& [file, tokenizer] : {std::pair(foreign, with.get()), std::pair(text, without.get())}) {
    const auto spelled = unknown_among_first(*Corpus::build({file}, *tokenizer, folder / "spelled.bin"), *tokenizer);
    EXPECT_EQ(spelled.unknown, 0);
    EXPECT_EQ(unknown_remark(spelled, "the tokens"), "");
  }
}

/// A model with LLaMA's settings and these, whose first piece of a text begins with a space that the text has not.
class SpaceInFront : public testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    Settings settings{{"input", folder_.write("text.txt", words(600)).string()},
                      {"model_prefix", (folder_ / "llama").string()},
                      {"vocab_size", "400"},
                      {"minloglevel", "2"},
                      {"model_type", "bpe"},
                      {"byte_fallback", "true"},
                      {"normalization_rule_name", "identity"},
                      {"remove_extra_whitespaces", "false"}};
    if (!separated()) settings.insert({{"bos_id", "-1"}, {"eos_id", "-1"}});
    ASSERT_TRUE(sentencepiece::SentencePieceTrainer::Train(settings).ok());
    tokenizer_ = Tokenizer::load((folder_ / "llama.model").string());
  }
  bool separated() const { return GetParam(); }  ///< it has ids of beginning and end of text

  /// Bytes that an evaluation of all targets divides by; of a stream, in one window.
  double bytes(Documents documents, bool bos) const {
    const auto corpus = Corpus::open_or_build({folder_ / "a.txt", folder_ / "b.txt"}, *tokenizer_, folder_ / "cache", 2, "data.files", documents, bos);
    EXPECT_EQ(corpus->bytes(0, corpus->tokens()), static_cast<double>(corpus->text_bytes()));
    const int64_t seq_len = documents == Documents::None ? corpus->tokens() - 1 : 64;
    return SequentialLoader(corpus, seq_len, 2).global_bytes();
  }

  Folder folder_;
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_P(SpaceInFront, IsNoByteOfAnyText) {
  const auto first = tokenizer_->encode("the ring");
  ASSERT_EQ(tokenizer_->token_bytes()[first[0]], 4) << "a space and the word";
  EXPECT_EQ(tokenizer_->first_token_bytes()[first[0]], 3);
  // 37 bytes in lines of 9, 7, 6 and of 4, 5, 6. Of these bytes their first pieces have 3; none, where the space stands alone in front of what is spelled in
  // bytes, or of a space of the text's own; 3; and 1 each where bytes come first, in front of which no space is put.
  folder_.write("a.txt", "the ring\n\u4e2d\u6587\n the \n");
  folder_.write("b.txt", "the\n\u2581x\n\xff the\n");
  // What begins a document, or a stream, is no target; with the beginning-of-text id in front it is.
  EXPECT_EQ(bytes(Documents::Lines, false), 37 - (3 + 0 + 0) - (3 + 1 + 1));
  EXPECT_EQ(bytes(Documents::Paragraphs, false), 37 - 3 - 3);
  EXPECT_EQ(bytes(Documents::Files, false), 37 - 3 - 3);
  EXPECT_EQ(bytes(Documents::None, false), 37 - 3) << "the second file's first piece is a target like others";
  for (const Documents documents : {Documents::Lines, Documents::Paragraphs, Documents::Files, Documents::None}) {
    if (separated()) EXPECT_EQ(bytes(documents, true), 37) << to_string(documents);
  }
}

TEST_P(SpaceInFront, IsPutInFrontOfNoPartOfOne) {
  const std::string text = words(15000);  // more than a thread's part
  folder_.write("a.txt", text);
  folder_.write("b.txt", text);
  const int64_t in_front = tokenizer_->first_token_bytes()[tokenizer_->encode(text.substr(0, text.find('\n')))[0]];
  EXPECT_EQ(bytes(Documents::None, false), static_cast<double>(2 * static_cast<int64_t>(text.size()) - in_front));
}

INSTANTIATE_TEST_SUITE_P(Ids, SpaceInFront, testing::Bool(), [](const auto& info) { return info.param ? "separated" : "joined"; });

}  // namespace
}  // namespace tessera::data

#endif
