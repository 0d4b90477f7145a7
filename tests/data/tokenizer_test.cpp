#include "tessera/data/tokenizer.h"

#include <random>

#include <gmock/gmock.h>

#include "tests/data/files.h"

namespace tessera::data {
namespace {

using testing::HasSubstr;

/// Texts that tokenizers stumble over.
std::vector<std::string> hard_texts() {
  std::vector<std::string> texts = {"",
                                    " ",
                                    "  ",
                                    "\n",
                                    "\n\n\n",
                                    "a",
                                    " a",
                                    "a ",
                                    "\ta\t",
                                    "\r\n\r\n",
                                    "a\n b\n  c\n\n   d",
                                    "two  spaces   three",
                                    std::string("zero\0zero", 9),
                                    std::string(3, '\0'),
                                    "caf\u00e9 na\u00efve \u4e2d\u6587 \U0001F600",
                                    "the mark \u2581 itself \u2581\u2581",
                                    "<s> </s> <unk> <0x41> \u2047",
                                    "bad \xff\xfe bytes \x80 caf\xe9\n\xc3",
                                    "cut \xf0\x9f\x98",
                                    std::string(5000, 'x'),
                                    std::string(300, ' ') + "y",
                                    std::string(300, '\n') + " z",
                                    "\u00a0nbsp\u3000wide",
                                    "e\u0301 \ufb01 \u2460",
                                    words(300)};
  std::mt19937 random(5);
  for (int i = 0; i < 60; ++i) {
    std::string text;
    for (unsigned n = random() % 200; n > 0; --n) {
      static constexpr const char* pieces[] = {" ", "\n", "a", "the", "\u00e9", "\u4e2d", "\u2581", "\t", "ing ", "  "};
      if (random() % 4 == 0) {
        text += static_cast<char>(random());
      } else {
        text += pieces[random() % 10];
      }
    }
    texts.push_back(text);
  }
  return texts;
}

void expect_lossless(const Tokenizer& tokenizer) {
  for (const std::string& text : hard_texts()) {
    const auto ids = tokenizer.encode(text);
    EXPECT_EQ(tokenizer.decode(ids), text);
    size_t bytes = 0;
    for (int32_t id : ids) {
      ASSERT_GE(id, 0);
      ASSERT_LT(id, tokenizer.vocab_size());
      bytes += tokenizer.token_bytes()[id];
    }
    EXPECT_EQ(bytes, text.size());
  }
}

/// Any cut at a boundary, any number of threads, and any history of the encoder give the ids of the whole.
void expect_cuts_do_not_matter(const Tokenizer& tokenizer) {
  auto encoder = tokenizer.encoder();
  for (const std::string& text : hard_texts()) {
    const auto whole = tokenizer.encode(text);
    std::vector<int32_t> parts;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = tokenizer.boundary(text, begin);
      ASSERT_GT(end, begin);
      encoder->append(std::string_view(text).substr(begin, end - begin), begin == 0, parts);
      begin = end;
    }
    EXPECT_EQ(parts, whole) << text;
  }
  const std::string text = words(15000);
  ASSERT_GT(text.size(), size_t{2} << 18);
  const auto whole = tokenizer.encode(text);
  for (int threads : {1, 2, 3}) {
    std::vector<int32_t> ids;
    ParallelEncoder(tokenizer, threads).append(text, true, ids);
    EXPECT_EQ(ids, whole) << threads << " threads";
  }
}

TEST(ByteTokenizer, IsTheBytes) {
  const auto tokenizer = Tokenizer::load("byte");
  EXPECT_EQ(tokenizer->vocab_size(), 256);
  EXPECT_EQ(tokenizer->eos(), std::nullopt);
  EXPECT_EQ(tokenizer->bos(), std::nullopt);
  EXPECT_THAT(refusal([&] { require_bos(*tokenizer, "--bos"); }), testing::StartsWith("--bos: the tokenizer (byte) has no beginning-of-text id"));
  EXPECT_EQ(tokenizer->encode(std::string("A\0\xff", 3)), (std::vector<int32_t>{65, 0, 255}));
  expect_lossless(*tokenizer);
  expect_cuts_do_not_matter(*tokenizer);
  EXPECT_THAT(refusal([&] { tokenizer->decode(std::vector<int32_t>{256}); }), HasSubstr("id 256 is outside its vocabulary of 256"));
  EXPECT_THAT(refusal([&] { tokenizer->decode(std::vector<int32_t>{-1}); }), HasSubstr("id -1"));
}

TEST(Tokenizer, IsBlamedUnderTheNameItWasGiven) {
  EXPECT_THAT(refusal([] { Tokenizer::load("nowhere.model"); }), HasSubstr("data.tokenizer = nowhere.model"));
  EXPECT_THAT(refusal([] { Tokenizer::load("nowhere.model", "--tokenizer"); }), testing::StartsWith("--tokenizer = nowhere.model"));
}

TEST(Tokenizer, VocabularyMustFitTheModel) {
  const auto tokenizer = Tokenizer::load("byte");
  check_vocabulary(*tokenizer, 256);
  check_vocabulary(*tokenizer, 300);
  EXPECT_THAT(refusal([&] { check_vocabulary(*tokenizer, 255); }), testing::AllOf(HasSubstr("model.vocab_size = 255"), HasSubstr("256")));
}

#ifdef TESSERA_WITH_SENTENCEPIECE

class SentencePiece : public testing::TestWithParam<std::string> {};

TEST_P(SentencePiece, TrainsAndIsLossless) {
  Folder folder;
  const auto text = folder.write("text.txt", words(1000) + "caf\u00e9 \u4e2d\u6587\n" + words(100, 9));
  EXPECT_THROW(train_tokenizer({text}, 400, folder / "sub/small", {.type = GetParam()}), ConfigError) << "no folder is made for it";
  std::filesystem::create_directories(folder / "sub");
  const auto path = train_tokenizer({text}, 400, folder / "sub/small", {.type = GetParam()});
  EXPECT_EQ(path, folder / "sub/small.model");
  EXPECT_FALSE(std::filesystem::exists(folder / "sub/small.model.partial"));
  const auto tokenizer = Tokenizer::load(path.string());
  EXPECT_EQ(tokenizer->vocab_size(), 400);
  EXPECT_EQ(tokenizer->eos(), 2);
  EXPECT_EQ(tokenizer->bos(), 1);
  EXPECT_EQ(require_bos(*tokenizer, "--bos"), 1);
  EXPECT_EQ(tokenizer->decode(std::vector<int32_t>{2, 1}), "");
  expect_lossless(*tokenizer);
  expect_cuts_do_not_matter(*tokenizer);
  // It compresses: the point of training.
  const std::string seen = words(200);
  EXPECT_LT(tokenizer->encode(seen).size(), seen.size() / 2);
  // The same text gives the same tokenizer.
  const auto again = train_tokenizer({text}, 400, folder / "again.model", {.type = GetParam()});
  EXPECT_EQ(Tokenizer::load(again.string())->fingerprint(), tokenizer->fingerprint());
  EXPECT_THAT(refusal([&] { tokenizer->decode(std::vector<int32_t>{400}); }), HasSubstr("id 400 is outside its vocabulary of 400"));
}

INSTANTIATE_TEST_SUITE_P(Types, SentencePiece, testing::Values("bpe", "unigram"), [](const auto& info) { return info.param; });

TEST(SentencePieceTraining, RefusesByName) {
  Folder folder;
  const auto text = folder.write("text.txt", words(50));
  const auto train = [&](std::vector<std::filesystem::path> files, int64_t size, TokenizerTraining options = {}) {
    return refusal([&] { train_tokenizer(files, size, folder / "out", options); });
  };
  EXPECT_THAT(train({}, 400), HasSubstr("no file to train on"));
  EXPECT_THAT(train({folder / "none.txt"}, 400), HasSubstr("none.txt: no such file"));
  EXPECT_THAT(train({folder.write("empty.txt", "\n\n")}, 400), HasSubstr("no text to train on"));
  EXPECT_THAT(train({text}, 259), HasSubstr("vocab-size = 259"));
  EXPECT_THAT(train({text}, 262), testing::AllOf(HasSubstr("vocab-size = 262"), HasSubstr("larger vocabulary")));
  EXPECT_THAT(train({text}, 100000), testing::AllOf(HasSubstr("vocab-size = 100000"), HasSubstr("more text or a smaller vocabulary")));
  EXPECT_THAT(train({text}, 100000, {.type = "unigram"}), testing::AllOf(HasSubstr("vocab-size = 100000"), HasSubstr("more text or a smaller vocabulary")));
  EXPECT_THAT(train({text}, 400, {.type = "word"}), HasSubstr("type = word"));
  EXPECT_FALSE(std::filesystem::exists(folder / "out.model"));
}

TEST(SentencePieceModel, RefusesWhatIsNone) {
  Folder folder;
  EXPECT_THAT(refusal([&] { Tokenizer::load((folder / "none.model").string()); }), testing::AllOf(HasSubstr("none.model: no such file"), HasSubstr("byte")));
  for (const std::string& bytes : {std::string(), std::string("rubbish"), std::string(1000, '\xff')}) {
    EXPECT_THAT(refusal([&] { Tokenizer::load(folder.write("bad.model", bytes).string()); }), HasSubstr("bad.model: is no SentencePiece model"));
  }
}

#endif

}  // namespace
}  // namespace tessera::data
