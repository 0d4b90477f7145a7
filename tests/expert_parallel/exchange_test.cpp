#include "tessera/expert_parallel/exchange.h"

#include <numeric>
#include <random>

#include <gtest/gtest.h>

namespace tessera::experts {
namespace {

/// counts[rank][expert], the exchange of every rank.
std::vector<Exchange> all_exchanges(const std::vector<std::vector<int64_t>>& counts) {
  const auto ranks = counts.size(), here = counts[0].size() / ranks;
  std::vector<Exchange> exchanges;
  for (size_t rank = 0; rank < ranks; ++rank) {
    std::vector<int64_t> arriving;
    for (const auto& from : counts)
      arriving.insert(arriving.end(), from.begin() + static_cast<int64_t>(rank * here), from.begin() + static_cast<int64_t>((rank + 1) * here));
    exchanges.push_back(make_exchange(counts[rank], arriving, static_cast<int>(ranks)));
  }
  return exchanges;
}

/// A row is (rank, expert, number). Sends all of them as the exchanges say.
void expect_rows_by_expert_and_rank(const std::vector<std::vector<int64_t>>& counts) {
  using Row = std::array<int64_t, 3>;
  const auto ranks = counts.size(), here = counts[0].size() / ranks;
  const auto exchanges = all_exchanges(counts);
  for (size_t to = 0; to < ranks; ++to) {
    std::vector<Row> came;
    for (size_t from = 0; from < ranks; ++from) {
      std::vector<Row> rows;
      for (size_t expert = 0; expert < counts[from].size(); ++expert) {
        for (int64_t i = 0; i < counts[from][expert]; ++i) rows.push_back({static_cast<int64_t>(from), static_cast<int64_t>(expert), i});
      }
      ASSERT_EQ(static_cast<int64_t>(rows.size()), exchanges[from].sent());
      const auto& splits = exchanges[from].to;
      const auto begin = rows.begin() + std::accumulate(splits.begin(), splits.begin() + static_cast<int64_t>(to), int64_t{0});
      ASSERT_EQ(splits[to], exchanges[to].from[from]);
      came.insert(came.end(), begin, begin + splits[to]);
    }
    const Exchange& exchange = exchanges[to];
    ASSERT_EQ(exchange.arrived(), static_cast<int64_t>(came.size()));
    std::vector<Row> expected, placed;
    for (size_t expert = to * here; expert < (to + 1) * here; ++expert) {
      int64_t count = 0;
      for (size_t from = 0; from < ranks; ++from) {
        count += counts[from][expert];
        for (int64_t i = 0; i < counts[from][expert]; ++i) expected.push_back({static_cast<int64_t>(from), static_cast<int64_t>(expert), i});
      }
      EXPECT_EQ(exchange.counts[expert - to * here], count);
    }
    for (const int64_t row : exchange.order) placed.push_back(came[static_cast<size_t>(row)]);
    EXPECT_EQ(placed, expected);
    const auto places = inverse(exchange.order);
    for (size_t place = 0; place < places.size(); ++place) EXPECT_EQ(places[static_cast<size_t>(exchange.order[place])], static_cast<int64_t>(place));
  }
}

TEST(Exchange, SortsWhatComesByExpertAndThenByRank) {
  std::mt19937 random(3);
  for (const size_t ranks : {1, 2, 3, 5, 8}) {
    for (const size_t here : {1, 3}) {
      std::vector<std::vector<int64_t>> counts(ranks, std::vector<int64_t>(ranks * here));
      for (auto& of_rank : counts) {
        for (auto& count : of_rank) count = static_cast<int64_t>(random() % 4);
      }
      expect_rows_by_expert_and_rank(counts);
    }
  }
}

TEST(Exchange, TakesEmptyRanksAndOneExpertForAll) {
  expect_rows_by_expert_and_rank({{0, 0, 0, 0}, {0, 0, 5, 0}});
  expect_rows_by_expert_and_rank({{0, 0}, {0, 0}});
  expect_rows_by_expert_and_rank({{0, 0, 9}, {0, 0, 1}, {0, 0, 2}});
}

/// Two blocks of experts, each shared by two ranks: of three rows, two are of the first block.
TEST(Exchange, SendsARowToAllWhoShareItsExpert) {
  EXPECT_EQ(for_each_sharer({1, 2, 3, 4}, 4, 2), (std::vector<int64_t>{1, 2, 1, 2, 3, 4, 3, 4}));
  EXPECT_EQ(for_each_sharer({1, 2, 3, 4}, 2, 1), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(for_each_sharer({1, 2}, 3, 3), (std::vector<int64_t>{1, 2, 1, 2, 1, 2}));
  const Copies copies = make_copies({2, 2, 1, 1}, 2);
  EXPECT_EQ(copies.order, (std::vector<int64_t>{0, 2, 1, 3, 4, 5}));
  EXPECT_EQ(copies.slots, (std::vector<int64_t>{0, 2, 1, 3, 4, 5}));
  std::mt19937 random(5);
  for (const int sharers : {1, 2, 3}) {
    std::vector<int64_t> to;
    for (int block = 0; block < 4; ++block) to.insert(to.end(), static_cast<size_t>(sharers), static_cast<int64_t>(random() % 5));
    const auto [slots, order] = make_copies(to, sharers);
    ASSERT_EQ(slots.size(), order.size());
    for (size_t place = 0; place < order.size(); ++place) EXPECT_EQ(slots[static_cast<size_t>(order[place])], static_cast<int64_t>(place));
    int64_t place = 0, row = 0;
    for (size_t rank = 0; rank < to.size(); ++rank) {  // the rows of a block, in their order, once for each sharer
      for (int64_t i = 0; i < to[rank]; ++i) EXPECT_EQ(order[static_cast<size_t>(place++)] / sharers, row + i);
      if (static_cast<int>(rank) % sharers == sharers - 1) row += to[rank];
    }
  }
}

}  // namespace
}  // namespace tessera::experts
