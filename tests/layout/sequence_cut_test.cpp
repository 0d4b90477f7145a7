#include "tessera/layout/sequence_cut.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <random>

#include <gtest/gtest.h>

namespace tessera {
namespace {

std::vector<int64_t> columns_of(const SequenceCut& cut, int rank) {
  const at::Tensor places = cut.positions(rank, at::kCPU);
  const int64_t* begin = places.const_data_ptr<int64_t>();
  return {begin, begin + places.numel()};
}

void expect_each_column_once(const SequenceCut& cut, int64_t length) {
  std::vector<int64_t> all;
  for (int rank = 0; rank < cut.ranks(); ++rank) {
    const auto columns = columns_of(cut, rank);
    EXPECT_EQ(static_cast<int64_t>(columns.size()), cut.columns(rank));
    EXPECT_TRUE(std::ranges::is_sorted(columns));
    all.insert(all.end(), columns.begin(), columns.end());
  }
  std::ranges::sort(all);
  ASSERT_EQ(static_cast<int64_t>(all.size()), length);
  for (int64_t i = 0; i < length; ++i) EXPECT_EQ(all[static_cast<size_t>(i)], i);
}

TEST(SequenceCut, EveryColumnLiesOnOneRankAndRanksHoldAsManyGiveOrTakeOne) {
  for (int ranks = 1; ranks <= 8; ++ranks) {
    for (int64_t length = 0; length <= 40; ++length) {
      for (const SequenceCut& cut : {SequenceCut::contiguous(length, ranks), SequenceCut::head_tail(length, ranks)}) {
        expect_each_column_once(cut, length);
        int64_t least = length, most = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          least = std::min(least, cut.columns(rank));
          most = std::max(most, cut.columns(rank));
        }
        EXPECT_LE(most - least, 1) << length << " over " << ranks;
      }
    }
  }
}

TEST(SequenceCut, HeadAndTailMakeCausalWorkEven) {
  EXPECT_EQ(SequenceCut::head_tail(8, 2).runs, (std::vector<std::vector<ColumnRun>>{{{0, 2}, {6, 2}}, {{2, 4}}}));
  for (const int ranks : {2, 3, 5, 8}) {
    const int64_t length = 1003;
    const SequenceCut cut = SequenceCut::head_tail(length, ranks);
    int64_t least = length * length, most = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      int64_t work = 0;  // keys that the rank's queries see
      for (const int64_t column : columns_of(cut, rank)) work += column + 1;
      least = std::min(least, work);
      most = std::max(most, work);
    }
    EXPECT_LE(static_cast<double>(most - least), 0.02 * static_cast<double>(most)) << ranks;
  }
}

/// Keys that each rank's queries see, where attention ends with the document.
std::vector<int64_t> packed_work(const SequenceCut& cut, const std::vector<int64_t>& documents) {
  std::vector<int64_t> seen, work;
  for (const int64_t document : documents) {
    for (int64_t i = 0; i < document; ++i) seen.push_back(i + 1);
  }
  for (int rank = 0; rank < cut.ranks(); ++rank) {
    work.push_back(0);
    for (const int64_t column : columns_of(cut, rank)) work.back() += seen[static_cast<size_t>(column)];
  }
  return work;
}

/// What a plan relies on, which knows no lengths: a column more than an even share at the most.
TEST(PackedWork, GivesNoRankMoreThanAColumnBeyondItsShare) {
  std::mt19937 random(7);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int i = 0; i < 400; ++i) {
    const int ranks = std::array{2, 3, 4, 5, 8, 16}[static_cast<size_t>(i % 6)];
    const int64_t length = ranks + below(i % 3 == 0 ? 2000 : 100);
    const int64_t most = i % 2 == 0 ? length : 2 * ranks + 3;  // of a document
    std::vector<int64_t> documents;
    for (int64_t left = length; left > 0; left -= documents.back()) documents.push_back(std::min(left, 1 + below(most)));
    const SequenceCut cut = SequenceCut::head_tail(documents, ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_LE(cut.columns(rank), (length + ranks - 1) / ranks + 1) << ::testing::PrintToString(documents) << " over " << ranks;
    }
  }
}

TEST(PackedWork, IsEvenWhereEachDocumentIsDealt) {
  const std::vector<int64_t> documents{700, 31, 90, 1203, 5, 416, 2, 64, 333, 1, 240, 1011};
  int64_t length = 0;
  for (const int64_t document : documents) length += document;
  for (const int ranks : {1, 2, 3, 4, 5, 8}) {
    const SequenceCut dealt = SequenceCut::head_tail(documents, ranks);
    expect_each_column_once(dealt, length);
    const auto even = packed_work(dealt, documents), plain = packed_work(SequenceCut::head_tail(length, ranks), documents);
    const auto ratio = [](const std::vector<int64_t>& work) {
      return static_cast<double>(std::ranges::max(work)) / static_cast<double>(std::ranges::min(work));
    };
    EXPECT_LE(ratio(even), 1.02) << ranks;
    std::vector<int64_t> held;
    for (int rank = 0; rank < ranks; ++rank) held.push_back(dealt.columns(rank));
    EXPECT_LE(std::ranges::max(held) - std::ranges::min(held), 3) << "layers that see one column cost what there are";
    if (ranks > 1) {
      std::printf("%d ranks: most over least work %.3f, with head and tail of the whole %.3f\n", ranks, ratio(even), ratio(plain));
      EXPECT_GT(ratio(plain), 1.02) << "what it is for";
    }
  }
  EXPECT_EQ(SequenceCut::head_tail(std::vector<int64_t>{8}, 2), SequenceCut::head_tail(8, 2));
}

}  // namespace
}  // namespace tessera
