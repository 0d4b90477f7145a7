#include "tessera/data/loader.h"

#include <set>

#include <ATen/ATen.h>
#include <gmock/gmock.h>

#include "tessera/data/sequential_loader.h"
#include "tests/data/files.h"

namespace tessera::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;

/// Ids 0, 1, 2, ... modulo 251, so that a window tells its place.
class LoaderTest : public testing::Test {
 protected:
  std::shared_ptr<const Corpus> corpus(int64_t tokens) {
    std::string text(static_cast<size_t>(tokens), '\0');
    for (int64_t i = 0; i < tokens; ++i) text[static_cast<size_t>(i)] = static_cast<char>(i % 251);
    const std::string name = std::to_string(tokens) + ".txt";
    return Corpus::open_or_build({folder_.write(name, text)}, *byte_, folder_ / "cache");
  }

  Folder folder_;
  std::unique_ptr<Tokenizer> byte_ = Tokenizer::load("byte");
};

/// Everything that a step trains on, in the order of global micro-batches.
struct Global {
  std::vector<int64_t> index, first_sample, tokens, labels;
  int64_t valid_tokens = 0;
  bool operator==(const Global&) const = default;
};

Global gather(const std::shared_ptr<const Corpus>& corpus, LoaderOptions options, int ranks, const Cursor* from = nullptr, int steps = 1) {
  options.ranks = ranks;
  std::vector<Loader> loaders;
  for (options.rank = 0; options.rank < ranks; ++options.rank) {
    loaders.emplace_back(corpus, options);
    if (from) loaders.back().seek(*from);
  }
  Global all;
  for (int s = 0; s < steps; ++s) {
    size_t count = 0;
    int64_t valid = 0;
    for (Loader& loader : loaders) {
      const StepBatch batch = loader.next();
      if (count == 0) count = batch.micro_batches.size();
      EXPECT_EQ(batch.micro_batches.size(), count);
      EXPECT_EQ(batch.step, loader.cursor().step);
      EXPECT_EQ(batch.global_valid_tokens, options.global_size * options.seq_len);
      bool padding = false;
      for (const MicroBatch& micro : batch.micro_batches) {
        EXPECT_EQ(micro.tokens.sizes(), at::IntArrayRef({options.micro_size, options.seq_len}));
        EXPECT_EQ(micro.labels.sizes(), micro.tokens.sizes());
        EXPECT_FALSE(padding) << "padding comes last, and once";
        padding = micro.weight == 0;
        if (padding) {
          EXPECT_EQ(micro.index, -1);
          EXPECT_EQ(micro.valid_tokens, 0);
          EXPECT_TRUE((micro.labels == ignored_label).all().item<bool>());
          continue;
        }
        EXPECT_EQ(micro.weight, 1);
        valid += micro.valid_tokens;
        all.index.push_back(micro.index);
        all.first_sample.push_back(micro.first_sample);
        for (int64_t v : values(micro.tokens)) all.tokens.push_back(v);
        for (int64_t v : values(micro.labels)) all.labels.push_back(v);
      }
    }
    EXPECT_EQ(valid, options.global_size * options.seq_len);
    all.valid_tokens += valid;
  }
  return all;
}

TEST_F(LoaderTest, EveryLayoutSeesTheSameBatch) {
  const auto data = corpus(5 * 101 + 1);
  for (bool shuffle : {false, true}) {
    for (int64_t micro_size : {1, 2, 3}) {
      const LoaderOptions options{.seq_len = 5, .global_size = micro_size * 8, .micro_size = micro_size, .shuffle = shuffle, .seed = 3};
      const Global whole = gather(data, options, 1, nullptr, 20);
      std::vector<int64_t> order;
      for (int64_t s = 0; s < 20 * 8; ++s) order.push_back(s % 8);
      EXPECT_EQ(whole.index, order);
      for (int ranks : {2, 3, 5, 8}) EXPECT_EQ(gather(data, options, ranks, nullptr, 20), whole) << ranks << " ranks";
      // And windows depend on the global size alone, not on how it is cut into micro-batches.
      LoaderOptions single = options;
      single.micro_size = 1;
      EXPECT_EQ(gather(data, single, 1, nullptr, 20).tokens, whole.tokens);
    }
  }
}

TEST_F(LoaderTest, ReadsInOrderWithoutShuffleAndStartsAgain) {
  const auto data = corpus(4 * 7 + 2);  // 7 windows, and one token too many
  Loader loader(data, {.seq_len = 4, .global_size = 3, .shuffle = false});
  EXPECT_EQ(loader.windows(), 7);
  int64_t window = 0;
  for (int64_t step = 1; step <= 9; ++step) {
    const StepBatch batch = loader.next();
    EXPECT_EQ(batch.step, step);
    for (const MicroBatch& micro : batch.micro_batches) {
      EXPECT_EQ(values(micro.tokens), (std::vector<int64_t>{4 * window, 4 * window + 1, 4 * window + 2, 4 * window + 3}));
      EXPECT_EQ(values(micro.labels), (std::vector<int64_t>{4 * window + 1, 4 * window + 2, 4 * window + 3, 4 * window + 4}));
      window = (window + 1) % 7;
    }
  }
}

TEST_F(LoaderTest, ShuffleVisitsEachWindowOnceAnEpoch) {
  const auto data = corpus(2 * 97 + 1);
  const Loader loader(data, {.seq_len = 2, .global_size = 4, .shuffle = true, .seed = 11});
  const Loader other(data, {.seq_len = 2, .global_size = 4, .shuffle = true, .seed = 12});
  std::vector<std::vector<int64_t>> epochs;
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    std::vector<int64_t> order;
    for (int64_t s = 0; s < 97; ++s) order.push_back(loader.window_of(epoch * 97 + s));
    epochs.push_back(order);
    std::ranges::sort(order);
    for (int64_t s = 0; s < 97; ++s) EXPECT_EQ(order[static_cast<size_t>(s)], s);
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
  EXPECT_NE(epochs[0], epochs[2]);
  EXPECT_NE(loader.window_of(0) * 97 + loader.window_of(1), other.window_of(0) * 97 + other.window_of(1));
}

TEST_F(LoaderTest, EachEpochThatIsReadHasAnOrderOfItsOwn) {
  const auto data = corpus(2 * 50 + 1);
  Loader loader(data, {.seq_len = 2, .global_size = 10, .micro_size = 5, .shuffle = true, .seed = 11});
  std::set<std::vector<int64_t>> orders;
  for (int epoch = 0; epoch < 5; ++epoch) {
    std::vector<int64_t> read;
    for (int step = 0; step < 5; ++step) {
      for (const MicroBatch& micro : loader.next().micro_batches) std::ranges::copy(values(micro.tokens), std::back_inserter(read));
    }
    orders.insert(read);
  }
  EXPECT_EQ(orders.size(), 5);
}

TEST_F(LoaderTest, SeekContinuesAsIfNeverStopped) {
  const auto data = corpus(3 * 50 + 1);
  const LoaderOptions options{.seq_len = 3, .global_size = 6, .micro_size = 2, .shuffle = true, .seed = 5};
  const Global whole = gather(data, options, 1, nullptr, 40);
  for (int64_t stop : {0, 1, 7, 8, 39}) {
    Loader loader(data, options);
    for (int64_t s = 0; s < stop; ++s) loader.next();
    const Cursor cursor = loader.cursor();
    EXPECT_EQ(cursor.step, stop);
    for (int ranks : {1, 2, 3}) {
      const Global rest = gather(data, options, ranks, &cursor, static_cast<int>(40 - stop));
      EXPECT_TRUE(std::ranges::equal(rest.tokens, std::vector(whole.tokens.begin() + stop * 18, whole.tokens.end())));
      EXPECT_TRUE(std::ranges::equal(rest.first_sample, std::vector(whole.first_sample.begin() + stop * 3, whole.first_sample.end())));
    }
  }
}

TEST_F(LoaderTest, SeekRefusesAnotherPosition) {
  const auto data = corpus(100);
  const LoaderOptions options{.seq_len = 4, .global_size = 6, .micro_size = 2, .seed = 5};
  Loader loader(data, options);
  const auto seek = [&](auto&& change) {
    Cursor cursor = loader.cursor();
    change(cursor);
    return refusal([&] { loader.seek(cursor); });
  };
  EXPECT_THAT(seek([](Cursor& c) { c.seq_len = 8, c.step = 1; }),
              AllOf(HasSubstr("data.seq_len = 4"), HasSubstr("shuffled windows of 8 tokens"), HasSubstr("set data.seq_len = 8")));
  EXPECT_THAT(seek([](Cursor& c) { c.offset = -1; }), HasSubstr("must be 0 or more"));
  EXPECT_THAT(seek([](Cursor& c) { c.seed = 1; }), HasSubstr("data.seed = 5"));
  EXPECT_THAT(seek([](Cursor& c) { c.shuffle = false; }), HasSubstr("data.shuffle = true"));
  EXPECT_THAT(seek([](Cursor& c) { c.content = "other"; }), HasSubstr("data.files"));
  EXPECT_THAT(seek([](Cursor& c) { c.step = -1; }), HasSubstr("step -1"));
  EXPECT_EQ(loader.cursor().step, 0);

  Loader in_order(data, {.seq_len = 4, .global_size = 6, .micro_size = 2, .shuffle = false, .seed = 5});
  Cursor cursor = in_order.cursor();
  cursor.seed = 1;
  cursor.step = 2;
  in_order.seek(cursor);
  EXPECT_EQ(in_order.cursor().step, 2) << "without shuffle no order depends on the seed";
}

/// A run whose batch grows on the way reads every window once an epoch, as one whose batch did not.
TEST_F(LoaderTest, AnotherBatchGoesOnAtTheNextSample) {
  const auto data = corpus(3 * 50 + 1);
  const LoaderOptions small{.seq_len = 3, .global_size = 6, .micro_size = 2, .shuffle = true, .seed = 5};
  const LoaderOptions large{.seq_len = 3, .global_size = 10, .micro_size = 5, .shuffle = true, .seed = 5};
  const Global whole = gather(data, small, 1, nullptr, 30);
  Loader loader(data, small);
  for (int s = 0; s < 3; ++s) loader.next();
  const Cursor third = loader.cursor();
  for (const int ranks : {1, 2}) {
    const Global rest = gather(data, large, ranks, &third, 4);
    EXPECT_TRUE(std::ranges::equal(rest.tokens, std::vector(whole.tokens.begin() + 3 * 18, whole.tokens.begin() + 3 * 18 + 4 * 30)));
  }
  Loader other(data, large);
  other.seek(third);
  other.next();
  EXPECT_EQ(other.cursor().step, 4);
  const Cursor fourth = other.cursor();
  const Global back = gather(data, small, 1, &fourth, 2);  // and back again: 3 * 6 + 10 samples are behind
  EXPECT_TRUE(std::ranges::equal(back.tokens, std::vector(whole.tokens.begin() + 28 * 3, whole.tokens.begin() + 28 * 3 + 36)));
}

TEST_F(LoaderTest, AnotherWindowGoesOnWhereOneBeginsThere) {
  const auto data = corpus(120 + 1);
  const auto options = [](int64_t seq_len, bool shuffle) {
    return LoaderOptions{.seq_len = seq_len, .global_size = 2, .micro_size = 1, .shuffle = shuffle, .seed = 5};
  };
  const auto at = [&](int64_t step, int64_t seq_len, bool shuffle) {
    Loader loader(data, options(seq_len, shuffle));
    for (int64_t s = 0; s < step; ++s) loader.next();
    return loader.cursor();
  };
  // 40 windows of 3: step 8 ends at token 48, where a window of 4 begins, step 7 at token 42, where none does.
  Loader longer(data, options(4, false));
  longer.seek(at(8, 3, false));
  EXPECT_EQ(longer.window_of(8 * 2), 12);
  EXPECT_THAT(refusal([&] { longer.seek(at(7, 3, false)); }),
              AllOf(HasSubstr("data.seq_len = 4"), HasSubstr("at token 42"), HasSubstr("set data.seq_len = 3")));
  // The end of an epoch is the same place in any windows, shuffled or not.
  Loader shuffled(data, options(4, true)), afresh(data, options(4, true));
  shuffled.seek(at(20, 3, true));
  for (int64_t s = 0; s < 30; ++s) EXPECT_EQ(shuffled.window_of(20 * 2 + s), afresh.window_of(30 + s));
  EXPECT_THAT(refusal([&] { shuffled.seek(at(19, 3, true)); }), HasSubstr("inside an epoch"));
}

TEST_F(LoaderTest, RefusesSizesThatCannotBeDealt) {
  const auto data = corpus(41);  // 10 windows of 4
  const auto make = [&](LoaderOptions options) { return refusal([&] { Loader(data, options); }); };
  EXPECT_THAT(make({.seq_len = 4, .global_size = 7, .micro_size = 2}), AllOf(HasSubstr("batch.global_size = 7"), HasSubstr("micro_size = 2"), HasSubstr("8")));
  EXPECT_THAT(make({.seq_len = 4, .global_size = 0}), HasSubstr("batch.global_size = 0"));
  EXPECT_THAT(make({.seq_len = 4, .global_size = 4, .micro_size = 2, .ranks = 3}),
              AllOf(HasSubstr("batch.global_size = 4"), HasSubstr("3 data ranks"), HasSubstr("6 or more")));
  EXPECT_THAT(make({.seq_len = 4, .global_size = 11}), AllOf(HasSubstr("41 tokens"), HasSubstr("10 windows"), HasSubstr("needs 11")));
  EXPECT_THAT(make({.seq_len = 41, .global_size = 1}), AllOf(HasSubstr("data.seq_len = 41"), HasSubstr("0 windows")));
  EXPECT_EQ(Loader(data, {.seq_len = 4, .global_size = 10}).next().micro_batches.size(), 10u);
  EXPECT_EQ(Loader(data, {.seq_len = 40, .global_size = 1}).next().micro_batches.size(), 1u);
}

TEST_F(LoaderTest, DryBatchHasTheSameShapesAndCounts) {
  const auto data = corpus(500);
  for (int ranks : {1, 2, 3, 4}) {
    for (int rank = 0; rank < ranks; ++rank) {
      const LoaderOptions options{.seq_len = 4, .global_size = 8, .micro_size = 2, .rank = rank, .ranks = ranks};
      Loader loader(data, options);
      loader.next();
      const StepBatch real = loader.next(), dry = dry_batch(options, 2, at::kMeta);
      EXPECT_EQ(dry.step, real.step);
      EXPECT_EQ(dry.global_valid_tokens, real.global_valid_tokens);
      ASSERT_EQ(dry.micro_batches.size(), real.micro_batches.size());
      for (size_t i = 0; i < real.micro_batches.size(); ++i) {
        const MicroBatch &a = dry.micro_batches[i], &b = real.micro_batches[i];
        EXPECT_TRUE(a.tokens.is_meta() && a.labels.is_meta());
        EXPECT_EQ(a.tokens.sizes(), b.tokens.sizes());
        EXPECT_EQ(a.labels.sizes(), b.labels.sizes());
        EXPECT_EQ(a.tokens.scalar_type(), b.tokens.scalar_type());
        EXPECT_EQ(std::tuple(a.weight, a.index, a.first_sample, a.valid_tokens), std::tuple(b.weight, b.index, b.first_sample, b.valid_tokens));
      }
    }
  }
}

TEST_F(LoaderTest, SequentialLoaderReadsEveryWindowOnceInAnyLayout) {
  for (int64_t windows : {1, 2, 7, 24}) {
    const auto data = corpus(3 * windows + 2);
    for (int64_t micro_size : {1, 2, 5}) {
      std::vector<int64_t> expected;
      for (int64_t i = 0; i < 3 * windows; ++i) expected.push_back(i % 251);
      for (int ranks : {1, 2, 3, 5, 8}) {
        std::vector<int64_t> tokens, labels;
        int64_t valid = 0, calls = -1;
        for (int rank = 0; rank < ranks; ++rank) {
          SequentialLoader loader(data, 3, micro_size, rank, ranks);
          EXPECT_EQ(loader.global_valid_tokens(), 3 * windows);
          EXPECT_EQ(loader.global_bytes(), 3.0 * static_cast<double>(windows));
          if (calls < 0) calls = loader.micro_batches();
          for (int round = 0; round < 2; ++round) {
            int64_t n = 0;
            while (auto micro = loader.next()) {
              ++n;
              EXPECT_EQ(micro->tokens.sizes(), at::IntArrayRef({micro_size, 3}));
              const auto t = values(micro->tokens), l = values(micro->labels);
              EXPECT_EQ(std::ranges::count_if(l, [](int64_t v) { return v != ignored_label; }), micro->valid_tokens);
              EXPECT_EQ(micro->weight, micro->valid_tokens > 0 ? 1 : 0);
              if (round == 1) {
                valid += micro->valid_tokens;
                tokens.insert(tokens.end(), t.begin(), t.begin() + micro->valid_tokens);
                labels.insert(labels.end(), l.begin(), l.begin() + micro->valid_tokens);
              }
            }
            EXPECT_EQ(n, calls);
            loader.rewind();
          }
        }
        EXPECT_EQ(tokens, expected);
        EXPECT_EQ(valid, 3 * windows);
        ASSERT_EQ(labels.size(), tokens.size());
        for (size_t i = 0; i < labels.size(); ++i) ASSERT_EQ(labels[i], (tokens[i] + 1) % 251);
      }
    }
  }
  EXPECT_THAT(refusal([&] { SequentialLoader(corpus(3), 3, 1); }), HasSubstr("0 windows"));
}

TEST_F(LoaderTest, ReadsWhatIsAskedForAndKnowsTheRest) {
  const auto data = corpus(100);
  for (const Reads reads : {Reads{true, false}, Reads{false, true}, Reads{false, false}}) {
    const auto expect_part = [&](const MicroBatch& part, const MicroBatch& whole) {
      EXPECT_EQ(part.tokens.defined(), reads.tokens);
      EXPECT_EQ(part.labels.defined(), reads.labels);
      if (reads.tokens) EXPECT_EQ(values(part.tokens), values(whole.tokens));
      if (reads.labels) EXPECT_EQ(values(part.labels), values(whole.labels));
      EXPECT_EQ(std::tuple(part.rows, part.seq_len, part.valid_tokens, part.weight, part.index, part.first_sample),
                std::tuple(whole.rows, whole.seq_len, whole.valid_tokens, whole.weight, whole.index, whole.first_sample));
      EXPECT_EQ(std::pair(whole.rows, whole.seq_len), std::pair(whole.tokens.size(0), whole.tokens.size(1)));
    };
    const LoaderOptions options{.seq_len = 3, .global_size = 6, .micro_size = 2, .rank = 1, .ranks = 2};  // with padding
    LoaderOptions part_options = options;
    part_options.reads = reads;
    const auto whole = Loader(data, options).next(), part = Loader(data, part_options).next();
    EXPECT_EQ(part.global_valid_tokens, whole.global_valid_tokens);
    for (size_t i = 0; i < whole.micro_batches.size(); ++i) expect_part(part.micro_batches.at(i), whole.micro_batches[i]);
    SequentialLoader all(data, 3, 2, 1, 3), some(data, 3, 2, 1, 3, reads);
    while (const auto micro = all.next()) expect_part(*some.next(), *micro);
  }
}

/// Rows beside the last windows compete with them; micro-batches without a token have nobody to compete with, and a stream none of either.
TEST_F(LoaderTest, RowsBeyondTheLastWindowArePadding) {
  const auto data = corpus(16);  // five windows
  for (const Reads reads : {Reads{}, Reads{.tokens = false, .labels = false, .padding = true}}) {
    std::vector<at::Tensor> masks;
    for (int rank = 0; rank < 2; ++rank) {
      SequentialLoader loader(data, 3, 2, rank, 2, reads);
      while (const auto micro = loader.next()) masks.push_back(micro->padding);
    }
    ASSERT_EQ(masks.size(), 4U);
    for (size_t i = 0; i < masks.size(); ++i) EXPECT_EQ(masks[i].defined(), reads.padding && i == 2) << i;
    if (reads.padding) EXPECT_EQ(values(masks[2].to(at::kLong)), (std::vector<int64_t>{0, 0, 0, 1, 1, 1}));
  }
  Loader loader(data, {.seq_len = 3, .global_size = 3, .rank = 1, .ranks = 2, .reads = {.padding = true}});
  for (const MicroBatch& micro : loader.next().micro_batches) EXPECT_FALSE(micro.padding.defined());
}

/// The label of a rank's last column is the token behind it in the sample, which another rank reads; an odd sequence keeps its last token.
TEST_F(LoaderTest, RanksThatShareSamplesReadTheirColumns) {
  const auto data = corpus(120);
  for (const CutRule rule : {CutRule(&SequenceCut::contiguous), CutRule(&SequenceCut::head_tail)}) {
    for (int cp : {2, 3, 5}) {
      const LoaderOptions options{.seq_len = 7, .global_size = 6, .micro_size = 2, .seed = 5, .rank = 1, .ranks = 2};  // with padding
      const SequenceCut cut = rule({options.seq_len}, cp);
      const StepBatch whole = Loader(data, options).next();
      int64_t valid = 0;
      for (int rank = 0; rank < cp; ++rank) {
        LoaderOptions part = options;
        part.columns = {.rule = rule, .rank = rank, .ranks = cp};
        Loader loader(data, part);
        const StepBatch own = loader.next(), dry = dry_batch(part, 1, at::kMeta);
        EXPECT_EQ(own.global_valid_tokens, whole.global_valid_tokens);
        const at::Tensor positions = cut.positions(rank, at::kCPU);
        for (size_t i = 0; i < whole.micro_batches.size(); ++i) {
          const MicroBatch &a = own.micro_batches.at(i), &b = whole.micro_batches[i];
          EXPECT_TRUE(at::equal(a.positions, positions));
          EXPECT_EQ(a.columns(), cut.columns(rank));
          EXPECT_EQ(dry.micro_batches.at(i).tokens.sizes(), a.tokens.sizes());
          EXPECT_EQ(dry.micro_batches[i].positions.sizes(), positions.sizes());
          EXPECT_EQ(dry.micro_batches[i].valid_tokens, a.valid_tokens);
          EXPECT_TRUE(at::equal(a.tokens, b.tokens.index_select(1, positions)));
          EXPECT_TRUE(at::equal(a.labels, b.labels.index_select(1, positions)));
          EXPECT_EQ(std::tuple(a.rows, a.seq_len, a.weight, a.index, a.first_sample, a.global_valid_tokens),
                    std::tuple(b.rows, b.seq_len, b.weight, b.index, b.first_sample, b.global_valid_tokens));
          valid += a.valid_tokens;
        }
        SequentialLoader all(data, 7, 2, 1, 3), some(data, 7, 2, 1, 3, {}, part.columns);
        while (const auto micro = all.next()) {
          const auto of_them = some.next();
          EXPECT_TRUE(at::equal(of_them->tokens, micro->tokens.index_select(1, positions)));
          EXPECT_TRUE(at::equal(of_them->labels, micro->labels.index_select(1, positions)));
          EXPECT_TRUE(at::equal(of_them->positions, positions));
          EXPECT_EQ(of_them->valid_tokens * 7, micro->valid_tokens * positions.numel());
        }
      }
      EXPECT_EQ(valid, 2 * 7);  // of this data rank's one micro-batch beside padding
    }
  }
}

}  // namespace
}  // namespace tessera::data
