#include "tessera/data/documents.h"

#include <map>
#include <random>

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tessera/data/loader.h"
#include "tessera/data/sequential_loader.h"
#include "tests/data/files.h"

namespace tessera::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::vector<std::string> cut(std::string_view text, Documents documents, size_t block = 1000) {
  std::vector<std::string> found;
  std::string seen;
  for (size_t read = 0; read < text.size() || !seen.empty();) {
    const size_t more = std::min(block, text.size() - read);
    seen += text.substr(read, more);
    read += more;
    size_t next = 0;
    for (;;) {
      const auto [begin, end] = find_document(std::string_view(seen).substr(next), documents, read == text.size());
      if (end == 0) break;
      found.push_back(seen.substr(next + begin, end - begin));
      next += end;
    }
    seen.erase(0, next);
    if (read == text.size()) break;
  }
  return found;
}

TEST(Documents, AreLinesOrParagraphsWhereverTheTextIsCutIntoBlocks) {
  const std::string text = "\n\none\ntwo\r\n \t\n\nthree\n\n\nfour";
  for (const size_t block : {1, 2, 3, 5, 1000}) {
    EXPECT_THAT(cut(text, Documents::Lines, block), testing::ElementsAre("one\n", "two\r\n", "three\n", "four")) << block;
    EXPECT_THAT(cut(text, Documents::Paragraphs, block), testing::ElementsAre("one\ntwo\r\n", "three\n", "four")) << block;
    EXPECT_THAT(cut("\n \n", Documents::Paragraphs, block), testing::IsEmpty());
  }
  EXPECT_EQ(documents_named("lines"), Documents::Lines);
  EXPECT_THAT(refusal([] { documents_named("pages", "--documents"); }), HasSubstr("--documents = pages: expected none, files, paragraphs or lines"));
}

std::vector<int64_t> ends_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> ends;
  for (int64_t end = 0; const int64_t length : lengths) ends.push_back(end += length);
  return ends;
}

TEST(PackedWindows, HoldEveryDocumentOnceAndWhole) {
  std::mt19937 draw(7);
  for (const int64_t seq_len : {5, 16, 61}) {
    std::vector<int64_t> lengths(200);
    for (auto& length : lengths) length = std::min<int64_t>(1 + static_cast<int64_t>(draw() % 20) * (draw() % 7 == 0 ? 4 : 1), seq_len + 1);
    const auto ends = ends_of(lengths);
    const PackedWindows windows(ends, seq_len);
    std::map<int64_t, int64_t> sizes;  // by the first token
    int64_t all = 0, last = -1;
    for (int64_t w = 0; w < windows.count(); ++w) {
      int64_t column = 0;
      const auto window = windows.window(w);
      EXPECT_GT(window.front().first, last) << "windows lie in the order of the text, by their first documents";
      last = window.front().first;
      for (size_t i = 0; i < window.size(); ++i) {
        EXPECT_EQ(window[i].column, column);
        EXPECT_TRUE(i == 0 || window[i - 1].first < window[i].first);
        EXPECT_TRUE(sizes.emplace(window[i].first, window[i].size).second);
        column += window[i].size;
      }
      EXPECT_LE(column, seq_len);
      EXPECT_EQ(windows.targets(w), column);
      all += column;
    }
    for (size_t i = 0; i < lengths.size(); ++i) {
      const auto found = sizes.find(ends[i] - lengths[i]);
      EXPECT_EQ(found == sizes.end() ? 0 : found->second, lengths[i] - 1) << i;
    }
    EXPECT_LE(static_cast<double>(windows.count() * seq_len), 1.1 * static_cast<double>(all) + static_cast<double>(seq_len)) << "little is left empty";
  }
}

TEST(PackedWindows, FillTheFullestThatHasRoom) {
  // 8 columns: 6 and 2, 5 and 3; the first window is the one of the first document.
  const PackedWindows windows(ends_of({4, 7, 6, 1, 3}), 8);
  ASSERT_EQ(windows.count(), 2);
  EXPECT_EQ(windows.window(0), (std::vector<Piece>{{0, 3, 0}, {3, 5, 11}}));
  EXPECT_EQ(windows.window(1), (std::vector<Piece>{{0, 6, 4}, {6, 2, 18}}));
  EXPECT_EQ(PackedWindows({}, 8).count(), 0);
  EXPECT_EQ(PackedWindows({1, 2}, 8).count(), 0) << "a document of one token predicts nothing";
  EXPECT_THAT(
      refusal([] { PackedWindows(ends_of({4, 10, 3, 12}), 8); }),
      AllOf(HasSubstr("data.seq_len = 8"), HasSubstr("2 of 4 are longer"), HasSubstr("the longest has 12 tokens"), HasSubstr("set data.seq_len = 11 or more")));
}

/// Lines of letters of their own, and a corpus of them.
class DocumentsTest : public testing::Test {
 protected:
  std::shared_ptr<const Corpus> corpus(const std::string& text, Documents documents = Documents::Lines, const std::string& name = "lines.txt") const {
    return Corpus::open_or_build({folder_.write(name, text)}, *byte_, folder_ / "cache", 1, "data.files", documents);
  }
  static std::string lines(int count) {
    std::string text;
    for (int i = 0; i < count; ++i) text += std::string(1 + static_cast<size_t>(i * 7 % 11), static_cast<char>('a' + i % 26)) + (i % 5 == 0 ? "\n\n" : "\n");
    return text;
  }

  Folder folder_;
  std::unique_ptr<Tokenizer> byte_ = Tokenizer::load("byte");
};

TEST_F(DocumentsTest, APackedFileKeepsThem) {
  const std::string text = "ab\n\ncdef\n\n\nx\ny\n";
  EXPECT_EQ(corpus(text)->tokens(), 3 + 5 + 2 + 2);
  EXPECT_EQ(corpus(text)->windows(4), 2);
  EXPECT_EQ(corpus(text, Documents::Paragraphs)->packed(4)->window(2), (std::vector<Piece>{{0, 3, 8}}));
  EXPECT_EQ(corpus(text, Documents::Files)->windows(20), 1);
  EXPECT_EQ(corpus(text, Documents::None)->windows(4), 3);
  EXPECT_NE(corpus(text)->content(), corpus(text, Documents::None)->content()) << "a run goes on with the documents that it began with";
  const auto file = Corpus::build({folder_ / "lines.txt"}, *byte_, folder_ / "lines.bin", 1, "FILES", Documents::Lines)->path();
  const auto open = [&](Documents documents) { return Corpus::open_or_build({file}, *byte_, folder_ / "cache", 1, "data.files", documents); };
  EXPECT_EQ(open(Documents::Lines)->windows(4), 2);
  EXPECT_THAT(refusal([&] { open(Documents::None); }), AllOf(HasSubstr("data.documents = none"), HasSubstr("was packed with documents = lines")));
}

TEST_F(DocumentsTest, LabelsAndPlacesEndWithTheDocumentAndPaddingHasNone) {
  const auto data = corpus("ab\ncdef\nx\n");  // 2, 4 and 1 columns
  const StepBatch batch = Loader(data, {.seq_len = 5, .global_size = 2, .micro_size = 2, .shuffle = false, .reads = {.padding = true}}).next();
  ASSERT_EQ(batch.micro_batches.size(), 1U);
  const MicroBatch& micro = batch.micro_batches.front();
  EXPECT_EQ(std::tuple(micro.rows, micro.seq_len, micro.row_samples, micro.sample_columns()), std::tuple(1, 10, 2, 5)) << "one row holds both windows";
  EXPECT_EQ(values(micro.tokens), (std::vector<int64_t>{'a', 'b', 0, 0, 0, 'c', 'd', 'e', 'f', 'x'}));
  EXPECT_EQ(values(micro.labels), (std::vector<int64_t>{'b', '\n', -100, -100, -100, 'd', 'e', 'f', '\n', '\n'}));
  EXPECT_EQ(values(micro.document_ids), (std::vector<int64_t>{0, 0, 2, 2, 2, 5, 5, 5, 5, 9}));
  EXPECT_EQ(values(micro.places), (std::vector<int64_t>{0, 1, 0, 1, 2, 0, 1, 2, 3, 0}));
  EXPECT_EQ(values(micro.padding.to(at::kLong)), (std::vector<int64_t>{0, 0, 1, 1, 1, 0, 0, 0, 0, 0}));
  EXPECT_EQ(micro.padding_size(), 3);
  EXPECT_EQ(micro.valid_tokens, 7);
  EXPECT_EQ(batch.global_valid_tokens, 7);
  EXPECT_EQ(micro.global_valid_tokens, 7);
}

/// What there is of it in every layout: each label once, where its token is, and the same counts on every rank.
TEST_F(DocumentsTest, EveryLayoutReadsTheSame) {
  const auto data = corpus(lines(90));
  for (const CutRule rule : {CutRule(&SequenceCut::contiguous), CutRule(&SequenceCut::head_tail)}) {
    for (const int ranks : {1, 2, 3}) {
      for (const int columns : {1, 2, 3, 5}) {
        const LoaderOptions options{.seq_len = 17, .global_size = 10, .micro_size = 2, .shuffle = true, .seed = 5};
        Loader whole(data, options);
        std::vector<Loader> parts;
        for (int rank = 0; rank < ranks * columns; ++rank) {
          LoaderOptions own = options;
          own.rank = rank / columns;
          own.ranks = ranks;
          own.columns = {.rule = rule, .rank = rank % columns, .ranks = columns};
          own.reads = {.tokens = rank % 2 == 0, .labels = true, .padding = rank % 3 != 1};  // as stages do
          parts.emplace_back(data, own);
        }
        for (int step = 1; step <= 3; ++step) {
          const StepBatch all = whole.next();
          int64_t valid = 0;
          for (Loader& loader : parts) {
            const StepBatch own = loader.next();
            EXPECT_EQ(own.global_valid_tokens, all.global_valid_tokens);
            for (const MicroBatch& micro : own.micro_batches) {
              valid += micro.valid_tokens;
              EXPECT_EQ(micro.valid_tokens, micro.labels.ne(ignored_label).sum().item<int64_t>());
              EXPECT_EQ(micro.padding.defined(), loader.options().reads.padding);
              if (micro.padding.defined()) {
                EXPECT_TRUE(at::equal(micro.padding, micro.labels.eq(ignored_label)));
                EXPECT_EQ(micro.padding_size(), micro.padding.sum().item<int64_t>());
              }
              if (micro.index < 0) continue;
              const MicroBatch& full = all.micro_batches.at(static_cast<size_t>(micro.index));
              const at::Tensor at = micro.positions.defined() ? micro.positions : at::arange(full.seq_len);
              EXPECT_EQ(micro.columns(), at.numel());
              if (micro.tokens.defined()) EXPECT_TRUE(at::equal(micro.tokens, full.tokens.index_select(1, at)));
              EXPECT_TRUE(at::equal(micro.labels, full.labels.index_select(1, at)));
              EXPECT_TRUE(at::equal(micro.document_ids, full.document_ids.index_select(1, at)));
              EXPECT_TRUE(at::equal(micro.places, full.places.index_select(0, at)));
              EXPECT_EQ(std::tuple(micro.rows, micro.seq_len, micro.first_sample), std::tuple(full.rows, full.seq_len, full.first_sample));
            }
          }
          EXPECT_EQ(valid, all.global_valid_tokens);
        }
      }
    }
  }
}

TEST_F(DocumentsTest, TheSameDocumentsWhateverTheMicroSize) {
  const auto data = corpus(lines(60));
  const auto read = [&](int64_t micro_size) {
    Loader loader(data, {.seq_len = 13, .global_size = 6, .micro_size = micro_size, .seed = 2});
    std::vector<int64_t> tokens;
    for (const MicroBatch& micro : loader.next().micro_batches) {
      for (const int64_t token : values(micro.tokens)) tokens.push_back(token);
      EXPECT_EQ(micro.first_sample % micro_size, 0);
    }
    return tokens;
  };
  EXPECT_EQ(read(1), read(2));
  EXPECT_EQ(read(1), read(6));
}

TEST_F(DocumentsTest, ADryBatchHasTheirShapesAndAnEvaluationReadsEachOnce) {
  const auto data = corpus(lines(40));
  const LoaderOptions options{.seq_len = 17,
                              .global_size = 6,
                              .micro_size = 3,
                              .reads = {.padding = true},
                              .columns = {.rule = &SequenceCut::contiguous, .rank = 1, .ranks = 2},
                              .packed = true};
  const StepBatch real = Loader(data, options).next(), dry = dry_batch(options, 1, at::kMeta);
  for (size_t i = 0; i < real.micro_batches.size(); ++i) {
    for (const auto tensor :
         {&MicroBatch::tokens, &MicroBatch::labels, &MicroBatch::positions, &MicroBatch::document_ids, &MicroBatch::places, &MicroBatch::padding}) {
      EXPECT_EQ((dry.micro_batches.at(i).*tensor).sizes(), (real.micro_batches[i].*tensor).sizes());
      EXPECT_EQ((dry.micro_batches.at(i).*tensor).dtype(), (real.micro_batches[i].*tensor).dtype());
    }
  }
  LoaderOptions balanced = options;
  balanced.columns.rule = &SequenceCut::head_tail;
  const int64_t columns = dry_batch(balanced, 1, at::kMeta).micro_batches.front().columns();
  EXPECT_GE(columns, 3 * 17 / 2 + 2);
  EXPECT_LE(columns, 3 * 17 / 2 + 4);
  for (const int64_t micro_size : {1, 2, 3}) {
    for (const int64_t documents : {1, 8}) {  // of which the row has some columns more, or fewer, than its windows
      balanced.micro_size = micro_size;
      balanced.dry_documents = documents;
      EXPECT_EQ(dry_batch(balanced, 1, at::kMeta).micro_batches.front().row_samples, micro_size);
    }
  }
  balanced.micro_size = 3;
  balanced.dry_documents = 1;
  Loader all(data, balanced);
  for (int step = 0; step < 5; ++step) {
    for (const MicroBatch& micro : all.next().micro_batches) EXPECT_LE(micro.columns(), columns) << "a plan is never too low";
  }
  for (const int ranks : {1, 2}) {
    int64_t valid = 0, bytes = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      SequentialLoader loader(data, 17, 2, rank, ranks);
      while (const auto micro = loader.next()) valid += micro->valid_tokens;
      EXPECT_EQ(loader.global_bytes(), static_cast<double>(loader.global_valid_tokens())) << "each target is a byte";
      bytes = loader.global_valid_tokens();
    }
    EXPECT_EQ(valid, bytes);
    EXPECT_EQ(valid, data->tokens() - 40) << "all but the first token of each line";
  }
}

TEST_F(DocumentsTest, APlaceInsideAnEpochBelongsToItsWindows) {
  const auto data = corpus(lines(90));
  const LoaderOptions options{.seq_len = 17, .global_size = 3, .shuffle = false};
  Loader loader(data, options);
  loader.next();
  LoaderOptions longer = options;
  longer.seq_len = 34;
  EXPECT_THAT(refusal([&] { Loader(data, longer).seek(loader.cursor()); }), HasSubstr("windows of another length hold other documents"));
  Loader other(data, options);
  other.seek(loader.cursor());
  EXPECT_EQ(values(other.next().micro_batches[0].tokens), values(loader.next().micro_batches[0].tokens));
}

}  // namespace
}  // namespace tessera::data
