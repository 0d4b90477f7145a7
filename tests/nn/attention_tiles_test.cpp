#include "tessera/nn/attention_tiles.h"

#include <algorithm>
#include <random>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/kernels/choice.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/column_order.h"
#include "tessera/nn/tiled_attention.h"

namespace tessera::nn {
namespace {

/// What each column of a row is.
struct Column {
  int64_t position, document;
};

std::vector<Column> columns_of(const AttentionColumns& columns, size_t row) {
  std::vector<Column> all(static_cast<size_t>(columns.size()));
  for (const AttentionRun& run : columns.rows[columns.rows.size() == 1 ? 0 : row]) {
    for (int64_t i = 0; i < run.size; ++i) all.at(static_cast<size_t>(run.column + i)) = {run.position + i, run.document};
  }
  return all;
}

/// Each pair that a query sees is in one tile, and no other is in any.
void expect_the_mask(const AttentionColumns& queries, const AttentionColumns& keys, bool causal) {
  const auto tiles = attention_tiles(queries, keys, causal);
  for (size_t row = 0; row < std::max(queries.rows.size(), keys.rows.size()); ++row) {
    const auto q = columns_of(queries, row), k = columns_of(keys, row);
    std::vector<int> times(q.size() * k.size());
    int64_t pairs = 0;
    for (const AttentionTile& tile : tiles) {
      if (tile.row >= 0 && tile.row != static_cast<int64_t>(row)) continue;
      pairs += tile.pairs();
      EXPECT_TRUE(tile.queries.size > 0 && tile.keys.size > 0) << "an empty tile";
      EXPECT_TRUE(!tile.aligned || tile.queries.size == tile.keys.size) << "kernels align others differently";
      for (int64_t i = 0; i < tile.queries.size; ++i) {
        for (int64_t j = 0; j < tile.keys.size; ++j) {
          if (!tile.aligned || j <= i) ++times.at(static_cast<size_t>(tile.queries.begin + i) * k.size() + static_cast<size_t>(tile.keys.begin + j));
        }
      }
    }
    int64_t visible = 0;
    for (size_t i = 0; i < q.size(); ++i) {
      for (size_t j = 0; j < k.size(); ++j) {
        const bool sees = q[i].document == k[j].document && (!causal || k[j].position <= q[i].position);
        visible += sees;
        ASSERT_EQ(times[i * k.size() + j], sees) << "query " << i << " and key " << j;
      }
    }
    EXPECT_EQ(pairs, visible);
  }
}

TEST(AttentionTiles, OfTwoRunsAreTheMaskAtEveryDistance) {
  for (int64_t queries = 1; queries <= 4; ++queries) {
    for (int64_t keys = 1; keys <= 4; ++keys) {
      for (int64_t distance = -6; distance <= 6; ++distance) {
        for (const bool causal : {true, false}) {
          const auto q = AttentionColumns::consecutive(queries, 10 + distance), k = AttentionColumns::consecutive(keys, 10);
          expect_the_mask(q, k, causal);
          EXPECT_LE(attention_tiles(q, k, causal).size(), 3u);
        }
      }
    }
  }
}

TEST(AttentionTiles, OfAnyColumnsAreTheMask) {
  std::mt19937 random(1);
  const auto draw = [&](int64_t below) { return static_cast<int64_t>(random() % static_cast<uint64_t>(below)); };
  for (int trial = 0; trial < 200; ++trial) {
    const int64_t size = 1 + draw(9), rows = 1 + draw(3);
    std::vector<int64_t> positions, others, documents, of_keys;
    for (int64_t i = 0; i < size; ++i) {
      positions.push_back(draw(3) == 0 || i == 0 ? draw(12) : positions.back() + 1);
      others.push_back(draw(3) == 0 || i == 0 ? draw(12) : others.back() + 1);
    }
    for (int64_t i = 0; i < rows * size; ++i) {
      documents.push_back(draw(2));
      of_keys.push_back(draw(2));
    }
    for (const bool causal : {true, false}) {
      expect_the_mask(AttentionColumns::of(positions), AttentionColumns::of(others), causal);
      expect_the_mask(AttentionColumns::of(positions, documents), AttentionColumns::of(others, of_keys), causal);
      expect_the_mask(AttentionColumns::of(positions), AttentionColumns::of(others, of_keys), causal);
    }
  }
}

TEST(AttentionTiles, RowsThatAreAlikeAreSaidOnce) {
  EXPECT_EQ(AttentionColumns::of(std::vector<int64_t>{4, 5, 9}, std::vector<int64_t>{0, 0, 0, 0, 0, 0}).rows,
            (std::vector<std::vector<AttentionRun>>{{{0, 4, 2, 0}, {2, 9, 1, 0}}}));
  EXPECT_EQ(attention_tiles(AttentionColumns::consecutive(3, 5), AttentionColumns::consecutive(6), true),
            (std::vector<AttentionTile>{{.row = -1, .queries = {0, 3}, .keys = {0, 6}, .aligned = false}}))
      << "the last key is the first query's own";
  EXPECT_EQ(attention_tiles(AttentionColumns::consecutive(3), AttentionColumns::consecutive(3), true),
            (std::vector<AttentionTile>{{.row = -1, .queries = {0, 3}, .keys = {0, 3}, .aligned = true}}));
}

TEST(AttentionTiles, AnOrderMakesOneTileOfEachDocument) {
  const at::Tensor positions = at::tensor({7, 2, 4, 0, 1, 5}, at::kLong), documents = at::tensor({3, 3, 1, 1, 3, 1, 0, 0, 0, 0, 0, 0}, at::kLong).view({2, -1});
  const ColumnOrder order = column_order(2, 6, positions, documents);
  EXPECT_EQ(order.index, (std::vector<int64_t>{4, 1, 0, 3, 2, 5, 9, 10, 7, 8, 11, 6}));
  EXPECT_EQ(order.columns.rows, (std::vector<std::vector<AttentionRun>>{{{0, 0, 3, 0}, {3, 0, 3, 2}}, {{0, 0, 6, 0}}}));
  EXPECT_TRUE(column_order(1, 3, at::tensor({1, 5, 9}, at::kLong), {}).index.empty()) << "gaps change no order";
  expect_the_mask(column_order(1, 4, at::tensor({2, 2, 0, 2}, at::kLong), {}).columns, AttentionColumns::of(std::vector<int64_t>{0, 1, 1, 1}), true);
}

at::Tensor normal(at::IntArrayRef sizes, int64_t seed, double scale = 1) { return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed)) * scale; }

double worst(const at::Tensor& got, const at::Tensor& want) { return ((got - want).abs().max() / want.abs().max()).item<double>(); }

/// Outputs and gradients of `attention` for the same q, k, v and gradient.
std::vector<at::Tensor> passes(const std::function<at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&)>& attention,
                               const std::vector<at::Tensor>& given, at::ScalarType dtype) {
  std::vector<at::Tensor> in;
  for (const at::Tensor& tensor : given) in.push_back(tensor.to(dtype).detach().requires_grad_());
  const at::Tensor out = attention(in[0], in[1], in[2]);
  out.backward(normal(out.sizes(), 9).to(dtype));
  std::vector<at::Tensor> results{out.detach().to(at::kDouble)};
  for (const at::Tensor& tensor : in) results.push_back(tensor.grad().to(at::kDouble));
  return results;
}

TEST(TiledAttention, OfPositionsAndDocumentsEqualsTheMaskInDouble) {
  const at::Tensor permuted = at::tensor({3, 0, 9, 1, 4, 2, 6, 5, 8, 7, 10}, at::kLong), tied = at::tensor({0, 1, 1, 2, 0, 3, 4, 4, 4, 5, 6}, at::kLong);
  const at::Tensor packed = at::tensor({0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0}, at::kLong).view({2, -1});
  const at::Tensor tangled = at::tensor({0, 1, 0, 1, 1, 2, 0, 2, 1, 2, 0, 7, 7, 7, 7, 7, 7, 7, 7, 0, 0, 0}, at::kLong).view({2, -1});
  for (const bool causal : {true, false}) {
    for (const std::optional<at::Tensor>& positions : {std::optional<at::Tensor>(), std::optional(permuted), std::optional(tied)}) {
      for (const std::optional<at::Tensor>& documents : {std::optional<at::Tensor>(), std::optional(packed), std::optional(tangled)}) {
        AttentionCore core(causal);
        const std::vector<at::Tensor> given{normal({2, 11, 6, 8}, 1), normal({2, 11, 2, 8}, 2), normal({2, 11, 2, 8}, 3)};
        const at::Tensor places = positions ? *positions : at::arange(11);
        at::Tensor visible = causal ? places.unsqueeze(1).ge(places.unsqueeze(0)) : at::ones({11, 11}, at::kBool);
        visible = visible.unsqueeze(0).unsqueeze(0);
        if (documents) visible = visible.bitwise_and(documents->unsqueeze(2).eq(documents->unsqueeze(1)).unsqueeze(1));
        const auto reference = passes([&](const auto& q, const auto& k, const auto& v) { return masked_attention(q, k, v, visible); }, given, at::kFloat);
        for (const auto& [dtype, bound] : {std::pair{at::kFloat, 5e-6}, {at::kBFloat16, 2e-2}}) {
          const auto got = passes([&](const auto& q, const auto& k, const auto& v) { return core(q, k, v, positions, documents); }, given, dtype);
          for (size_t i = 0; i < got.size(); ++i) EXPECT_LE(worst(got[i], reference[i]), bound) << "tensor " << i << ", causal " << causal;
        }
      }
    }
  }
}

TEST(TiledAttention, EqualsTheReferenceKernels) {
  const at::Tensor documents = at::tensor({0, 0, 0, 1, 1, 2, 2}, at::kLong).unsqueeze(0), order = at::tensor({3, 0, 5, 1, 6, 4, 2}, at::kLong);
  const at::Tensor q = normal({1, 7, 4, 8}, 1), k = normal({1, 7, 2, 8}, 2), v = normal({1, 7, 2, 8}, 3);
  for (const bool causal : {true, false}) {
    AttentionCore core(causal);
    const auto all = [&] { return std::vector{core(q, k, v, order, documents), core(q, k, v, order), core(q.narrow(1, 4, 3), k, v)}; };
    const auto fused = all();
    const kernels::KernelChoiceGuard reference(kernels::KernelChoice::Reference);
    const auto plain = all();
    for (size_t i = 0; i < fused.size(); ++i) EXPECT_LE(worst(fused[i], plain[i]), 5e-6) << i << ", causal " << causal;
  }
}

TEST(TiledAttention, LargeScoresDoNotOverflow) {
  AttentionCore core;
  const std::vector<at::Tensor> given{normal({1, 12, 2, 8}, 1), normal({1, 12, 2, 8}, 2), normal({1, 12, 2, 8}, 3)};
  for (size_t i : {0, 1}) given[i].select(-1, 0).fill_(50);  // all scores about 880, whose exponential is no fp32 number
  const auto whole = passes([&](const auto& q, const auto& k, const auto& v) { return core(q, k, v); }, given, at::kFloat);
  auto tiles = attention_tiles(AttentionColumns::consecutive(12), AttentionColumns{.rows = {{{0, 0, 5, 0}, {5, 5, 4, 0}, {9, 9, 3, 0}}}}, true);
  const auto merged = passes([&](const auto& q, const auto& k, const auto& v) { return tiled_attention(q, k, v, tiles); }, given, at::kFloat);
  for (size_t i : {0, 3}) EXPECT_LE(worst(merged[i], whole[i]), 2.5e-4) << i << ": fp32 numbers are 6e-5 apart there, and each merge rounds";
  for (size_t i : {1, 2}) EXPECT_TRUE(at::isfinite(merged[i]).all().item<bool>()) << i;
}

TEST(TiledAttention, HoldsNothingOfTheSizeOfAllScores) {
  const int64_t length = 512;
  const at::Tensor q = normal({1, length, 2, 4}, 1).requires_grad_(), k = normal({1, length, 2, 4}, 2).requires_grad_();
  const at::Tensor documents = (at::arange(length) / 100).floor().to(at::kLong).unsqueeze(0);
  AttentionCore core;
  MemoryTracker tracker;
  {
    const TrackMemory tracking(tracker);
    core(q, k, k, std::nullopt, documents).sum().backward();
  }
  // A score for each pair would be 2 MiB in fp32 alone; the kernel's tiles of a thread are a part of what is here.
  EXPECT_LE(tracker.peak(), 1 << 20);
}

}  // namespace
}  // namespace tessera::nn
