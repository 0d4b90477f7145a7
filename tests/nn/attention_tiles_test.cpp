#include "tessera/nn/attention_tiles.h"

#include <algorithm>
#include <random>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "tessera/kernels/choice.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/attention.h"
#include "tessera/nn/column_order.h"
#include "tessera/nn/tiled_attention.h"

namespace tessera::nn {
namespace {

TEST(ColumnOrderTest, DocumentsThatADoubleCannotTellApartStayApart) {
  const at::Tensor ids = at::tensor({0, 0, 0, 1, 1, 1}, at::kLong).view({1, 6});
  EXPECT_EQ(column_order(1, 6, std::nullopt, ids + (int64_t{1} << 60)).columns.rows, column_order(1, 6, std::nullopt, ids).columns.rows);
}

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
void expect_the_mask(const AttentionColumns& queries, const AttentionColumns& keys, const AttentionReach& reach) {
  const auto tiles = attention_tiles(queries, keys, reach);
  for (size_t row = 0; row < std::max(queries.rows.size(), keys.rows.size()); ++row) {
    const auto q = columns_of(queries, row), k = columns_of(keys, row);
    std::vector<int> times(q.size() * k.size());
    int64_t pairs = 0;
    for (const AttentionTile& tiles_of_a_size : tiles) {
      if (tiles_of_a_size.row >= 0 && tiles_of_a_size.row != static_cast<int64_t>(row)) continue;
      pairs += tiles_of_a_size.pairs();
      for (int64_t time = 0; time < tiles_of_a_size.times; ++time) {
        const AttentionTile tile = tiles_of_a_size.single(time);
        EXPECT_TRUE(tile.queries.size > 0 && tile.keys.size > 0) << "an empty tile";
        EXPECT_TRUE(tile.form == TileForm::Whole || tile.queries.size == tile.keys.size) << "kernels align others differently";
        for (int64_t i = 0; i < tile.queries.size; ++i) {
          for (int64_t j = 0; j < tile.keys.size; ++j) {
            if (tile.sees(i, j)) ++times.at(static_cast<size_t>(tile.queries.begin + i) * k.size() + static_cast<size_t>(tile.keys.begin + j));
          }
        }
      }
    }
    int64_t visible = 0;
    for (size_t i = 0; i < q.size(); ++i) {
      for (size_t j = 0; j < k.size(); ++j) {
        const bool sees = q[i].document == k[j].document && reach.sees(q[i].position, k[j].position);
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
          expect_the_mask(q, k, {.causal = causal});
          EXPECT_LE(attention_tiles(q, k, {.causal = causal}).size(), 3u);
        }
        for (int64_t window = 1; window <= 9; ++window) {
          const auto q = AttentionColumns::consecutive(queries, 10 + distance), k = AttentionColumns::consecutive(keys, 10);
          expect_the_mask(q, k, {.window = window});
          EXPECT_EQ(within_reach(q, k, {.window = window}), !attention_tiles(q, k, {.window = window}).empty());
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
    for (const AttentionReach& reach : {AttentionReach{}, {.causal = false}, {.window = 1 + draw(4)}, {.window = 1 + draw(12)}}) {
      expect_the_mask(AttentionColumns::of(positions), AttentionColumns::of(others), reach);
      expect_the_mask(AttentionColumns::of(positions, documents), AttentionColumns::of(others, of_keys), reach);
      expect_the_mask(AttentionColumns::of(positions), AttentionColumns::of(others, of_keys), reach);
    }
  }
}

TEST(AttentionTiles, RowsThatAreAlikeAreSaidOnce) {
  EXPECT_EQ(AttentionColumns::of(std::vector<int64_t>{4, 5, 9}, std::vector<int64_t>{0, 0, 0, 0, 0, 0}).rows,
            (std::vector<std::vector<AttentionRun>>{{{0, 4, 2, 0}, {2, 9, 1, 0}}}));
  EXPECT_EQ(attention_tiles(AttentionColumns::consecutive(3, 5), AttentionColumns::consecutive(6), {}),
            (std::vector<AttentionTile>{{.row = -1, .queries = {0, 3}, .keys = {0, 6}}}))
      << "the last key is the first query's own";
  EXPECT_EQ(attention_tiles(AttentionColumns::consecutive(3), AttentionColumns::consecutive(3), {}),
            (std::vector<AttentionTile>{{.row = -1, .queries = {0, 3}, .keys = {0, 3}, .form = TileForm::UpTo}}));
}

TEST(AttentionTiles, AnOrderMakesOneTileOfEachDocument) {
  const at::Tensor positions = at::tensor({7, 2, 4, 0, 1, 5}, at::kLong), documents = at::tensor({3, 3, 1, 1, 3, 1, 0, 0, 0, 0, 0, 0}, at::kLong).view({2, -1});
  const ColumnOrder order = column_order(2, 6, positions, documents);
  EXPECT_EQ(order.index, (std::vector<int64_t>{4, 1, 0, 3, 2, 5, 9, 10, 7, 8, 11, 6}));
  EXPECT_EQ(order.columns.rows, (std::vector<std::vector<AttentionRun>>{{{0, 0, 3, 0}, {3, 0, 3, 2}}, {{0, 0, 6, 0}}}));
  EXPECT_TRUE(column_order(1, 3, at::tensor({1, 5, 9}, at::kLong), {}).index.empty()) << "gaps change no order";
  expect_the_mask(column_order(1, 4, at::tensor({2, 2, 0, 2}, at::kLong), {}).columns, AttentionColumns::of(std::vector<int64_t>{0, 1, 1, 1}), {});
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
        AttentionCore core(AttentionReach{.causal = causal});
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
    AttentionCore core(AttentionReach{.causal = causal});
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
  auto tiles = attention_tiles(AttentionColumns::consecutive(12), AttentionColumns{.rows = {{{0, 0, 5, 0}, {5, 5, 4, 0}, {9, 9, 3, 0}}}}, {});
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

/// [1 or B, 1, S, L]: the last queries of `positions`, each of which sees `window` of them.
at::Tensor in_window(const at::Tensor& positions, int64_t queries, int64_t window, const std::optional<at::Tensor>& documents = {}) {
  const at::Tensor behind = positions.narrow(0, positions.size(0) - queries, queries).unsqueeze(1) - positions.unsqueeze(0);
  const at::Tensor visible = behind.ge(0).bitwise_and(behind.lt(window)).unsqueeze(0).unsqueeze(0);
  return documents ? visible.bitwise_and(documents->unsqueeze(2).eq(documents->unsqueeze(1)).unsqueeze(1)) : visible;
}

/// Windows of one position, of less and more than a block that divides nothing, of all but one.
TEST(SlidingWindows, EqualTheMaskInDouble) {
  const int64_t length = 23;
  const at::Tensor packed = at::cat({at::zeros({2, 14}, at::kLong), at::ones({2, 9}, at::kLong)}, 1);
  packed[1].narrow(0, 4, 5).fill_(7);                                                                        // in the midst of another
  const at::Tensor gaps = at::arange(length) * 3 / 2, turned = gaps.flip(0), tied = at::arange(length) / 2;  // how far apart they are counts
  const std::vector<at::Tensor> given{normal({2, length, 6, 8}, 1), normal({2, length, 2, 8}, 2), normal({2, length, 2, 8}, 3)};
  const std::vector<std::pair<std::optional<at::Tensor>, std::optional<at::Tensor>>> described{
      {{}, {}}, {{}, packed}, {gaps.to(at::kLong), {}}, {turned.to(at::kLong), packed}, {tied.to(at::kLong), {}}};
  for (const int64_t window : {1, 5, 12, 22}) {
    for (size_t i = 0; i < described.size(); ++i) {
      const auto& [positions, documents] = described[i];
      const at::Tensor visible = in_window(positions.value_or(at::arange(length)), length, window, documents);
      const auto reference = passes([&](const auto& q, const auto& k, const auto& v) { return masked_attention(q, k, v, visible); }, given, at::kFloat);
      AttentionCore core(AttentionReach{.window = window});
      const auto attend = [&](const auto& q, const auto& k, const auto& v) { return core(q, k, v, positions, documents); };
      for (const auto& [dtype, bound] : {std::pair{at::kFloat, 5e-6}, {at::kBFloat16, 2e-2}}) {
        const auto got = passes(attend, given, dtype);
        // A query that sees itself alone has no gradient but rounding.
        for (const size_t tensor : window == 1 ? std::vector<size_t>{0, 3} : std::vector<size_t>{0, 1, 2, 3}) {
          EXPECT_LE(worst(got[tensor], reference[tensor]), bound) << "tensor " << tensor << ", window " << window << ", columns " << i;
        }
      }
      const kernels::KernelChoiceGuard plain(kernels::KernelChoice::Reference);
      EXPECT_LE(worst(attend(given[0], given[1], given[2]), reference[0].to(at::kFloat)), 5e-6) << "reference kernels, window " << window << ", columns " << i;
    }
  }
}

TEST(SlidingWindows, OfTheWholeSequenceChangeNoBit) {
  const std::vector<at::Tensor> given{normal({2, 23, 4, 8}, 1), normal({2, 23, 2, 8}, 2), normal({2, 23, 2, 8}, 3)};
  const at::Tensor packed = at::cat({at::zeros({2, 9}, at::kLong), at::ones({2, 14}, at::kLong)}, 1);
  AttentionCore whole;
  for (const int64_t window : {23, 24, 1000}) {
    AttentionCore core(AttentionReach{.window = window});
    for (const std::optional<at::Tensor>& documents : {std::optional<at::Tensor>(), std::optional(packed)}) {
      const auto with = [&](AttentionCore& one) {
        return passes([&](const auto& q, const auto& k, const auto& v) { return one(q, k, v, std::nullopt, documents); }, given, at::kFloat);
      };
      const auto got = with(core), want = with(whole);
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], want[i])) << "tensor " << i << ", window " << window;
    }
  }
}

TEST(SlidingWindows, SeeTheLastOfEarlierKeys) {
  const at::Tensor k = normal({2, 29, 2, 8}, 2), v = normal({2, 29, 2, 8}, 3);
  for (const int64_t window : {1, 4, 28, 29, 40}) {
    AttentionCore core(AttentionReach{.window = window});
    for (const int64_t queries : {1, 3, 11, 28}) {
      const at::Tensor q = normal({2, queries, 6, 8}, 1);
      const at::Tensor want = masked_attention(q, k, v, in_window(at::arange(29), queries, window)), got = core(q, k, v);
      EXPECT_LE(worst(got, want), 5e-6) << queries << " queries, window " << window;
      const kernels::KernelChoiceGuard plain(kernels::KernelChoice::Reference);
      EXPECT_LE(worst(core(q, k, v), want), 5e-6) << queries << " queries, window " << window;
    }
  }
}

TEST(SlidingWindows, CostTheirPairsAndFewCalls) {
  for (const auto& [length, window] : {std::pair<int64_t, int64_t>{4096, 64}, {1000, 1}, {1000, 37}, {1000, 999}, {4095, 1024}}) {
    const auto all = AttentionColumns::consecutive(length);
    const auto tiles = attention_tiles(all, all, {.window = window});
    int64_t pairs = 0;
    for (const AttentionTile& tile : tiles) pairs += tile.pairs();
    EXPECT_EQ(pairs, length * window - window * (window - 1) / 2);
    EXPECT_LE(tiles.size(), 5u) << "whole blocks are two, and what is left at the end three";
  }
}

TEST(SlidingWindows, HoldNothingOfTheSizeOfAllScores) {
  const int64_t length = 2048;
  const at::Tensor q = normal({1, length, 2, 4}, 1).requires_grad_(), k = normal({1, length, 1, 4}, 2).requires_grad_();
  AttentionCore core(AttentionReach{.window = 50});
  MemoryTracker tracker;
  {
    const TrackMemory tracking(tracker);
    core(q, k, k).sum().backward();
  }
  // Scores would be 32 MiB; q is 64 KiB, and of such there are some copies, beside a thread's tile.
  EXPECT_LE(tracker.peak(), 2 << 20);
}

TEST(MaskedAttention, ASecondDerivativeIsRefused) {
  const at::Tensor q = normal({1, 4, 2, 3}, 1).requires_grad_(), k = normal({1, 4, 2, 3}, 2), visible = at::ones({4, 4}, at::kBool).tril().view({1, 1, 4, 4});
  const at::Tensor slope = torch::autograd::grad({masked_attention(q, k, k, visible).square().sum()}, {q}, {}, true, /*create_graph=*/true)[0];
  EXPECT_THAT([&] { slope.square().sum().backward(); }, ::testing::ThrowsMessage<ConfigError>(::testing::HasSubstr("attention over a mask")));
}

/// Tiles are merged in fp32, and doubles are not.
TEST(TiledAttention, OfDoublesIsTheMaskInDouble) {
  const at::Tensor q = normal({2, 9, 4, 8}, 1).to(at::kDouble), k = normal({2, 9, 2, 8}, 2).to(at::kDouble), v = normal({2, 9, 2, 8}, 3).to(at::kDouble);
  const at::Tensor documents = at::tensor({0, 0, 0, 1, 1, 1, 2, 2, 2}, at::kLong).unsqueeze(0).expand({2, 9}).contiguous(), places = at::arange(9);
  AttentionCore core(AttentionReach{.causal = true});
  const at::Tensor got = core(q, k, v, std::nullopt, documents);
  const auto heads = [](const at::Tensor& x) { return x.transpose(1, 2).repeat_interleave(4 / x.size(2), 1); };
  const at::Tensor hidden =
      (places.unsqueeze(1).ge(places.unsqueeze(0)).unsqueeze(0).bitwise_and(documents.unsqueeze(2).eq(documents.unsqueeze(1)))).unsqueeze(1).logical_not();
  const at::Tensor scores = (at::matmul(heads(q), heads(k).transpose(-2, -1)) / std::sqrt(8.0)).masked_fill(hidden, -1e300);
  const at::Tensor want = at::matmul(at::softmax(scores, -1), heads(v)).transpose(1, 2);
  EXPECT_LE((got - want).abs().max().item<double>(), 1e-14);
}

TEST(TiledAttention, FeaturesNeedNotLieSideBySide) {
  const at::Tensor x = normal({2, 24, 7}, 1), q = x.unflatten(1, {3, 8}).permute({0, 3, 1, 2}),
                   documents = at::tensor({0, 0, 1, 1, 1, 2, 2}, at::kLong).unsqueeze(0).expand({2, 7});
  AttentionCore core(AttentionReach{.causal = true});
  for (const std::optional<at::Tensor>& packed : {std::optional<at::Tensor>(), std::optional(documents.contiguous())}) {
    const at::Tensor rows = q.contiguous();
    EXPECT_LE(worst(core(q, q, q, std::nullopt, packed), core(rows, rows, rows, std::nullopt, packed)), 1e-6);
  }
}

}  // namespace
}  // namespace tessera::nn
