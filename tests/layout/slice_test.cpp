#include "tessera/layout/slice.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(Chunk, DealsRunsThatDifferByAtMostOne) {
  for (const int parts : {1, 2, 3, 5, 8}) {
    for (const int64_t total : {0, 1, 2, 7, 8, 9, 100}) {
      int64_t next = 0;
      for (int index = 0; index < parts; ++index) {
        const auto [begin, size] = chunk(total, parts, index);
        EXPECT_EQ(begin, next);
        EXPECT_EQ(size, total / parts + (index < total % parts ? 1 : 0));
        next = begin + size;
      }
      EXPECT_EQ(next, total);
    }
  }
  EXPECT_THROW(chunk(4, 2, 2), InternalError);
  EXPECT_THROW(chunk(4, 2, -1), InternalError);
}

TEST(BoxTest, IntersectsAndContains) {
  const Box a{{0, 2}, {4, 4}}, b{{2, 0}, {4, 3}};
  EXPECT_EQ(intersect(a, b), (Box{{2, 2}, {2, 1}}));
  EXPECT_TRUE(intersect(a, Box{{4, 2}, {1, 1}}).empty());
  EXPECT_TRUE(a.contains(Box{{1, 3}, {2, 2}}));
  EXPECT_FALSE(a.contains(b));
  EXPECT_EQ(Box{}.numel(), 1) << "a scalar";
  EXPECT_EQ(to_string(a), "[0:4, 2:6]");
}

TEST(SliceTest, WholeAndAlong) {
  const Slice whole = Slice::whole("w", {5, 3});
  EXPECT_TRUE(whole.is_whole());
  EXPECT_EQ(whole.numel(), 15);
  const Slice rows = Slice::along("w", {5, 3}, 0, 2, 3);
  EXPECT_FALSE(rows.is_whole());
  EXPECT_EQ(rows.local_shape(), (std::vector<int64_t>{3, 3}));
  EXPECT_EQ(rows.logical_numel(), 15);
  EXPECT_THROW(Slice::along("w", {5, 3}, 0, 4, 2), InternalError);
  EXPECT_THROW(Slice::along("w", {}, 0, 0, 1), InternalError);
  EXPECT_TRUE(Slice::whole("scalar", {}).is_whole());
  EXPECT_EQ(Slice::whole("scalar", {}).local_shape(), std::vector<int64_t>{});
}

TEST(SliceTest, ZigZagLiesAlongTheDimensionThatDiffers) {
  const Slice slice{"x", {4, 8}, {{{0, 0}, {4, 2}}, {{0, 6}, {4, 2}}}};
  slice.check();
  EXPECT_EQ(slice.concat_dim(), 1);
  EXPECT_EQ(slice.local_shape(), (std::vector<int64_t>{4, 4}));
  EXPECT_EQ(slice.local_box(1), (Box{{0, 2}, {4, 2}}));
  const auto whole = at::arange(32).view({4, 8});
  EXPECT_TRUE(take(whole, slice).equal(at::cat({whole.narrow(1, 0, 2), whole.narrow(1, 6, 2)}, 1)));
}

TEST(SliceTest, BoxesThatDifferInTwoDimensionsAreFlattened) {
  const Slice slice{"x", {4, 4}, {{{0, 0}, {2, 2}}, {{2, 2}, {2, 1}}}};
  EXPECT_EQ(slice.concat_dim(), -1);
  EXPECT_EQ(slice.local_shape(), (std::vector<int64_t>{6}));
  EXPECT_EQ(slice.local_box(1), (Box{{4}, {2}}));
  EXPECT_TRUE(take(at::arange(16).view({4, 4}), slice).equal(at::tensor({0, 1, 4, 5, 10, 14}, at::kLong)));
}

TEST(SliceTest, NoBoxesIsNothing) {
  const Slice none{"x", {4, 3}, {}};
  EXPECT_EQ(none.numel(), 0);
  EXPECT_EQ(none.local_shape(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(take(at::zeros({4, 3}), none).numel(), 0);
  EXPECT_EQ((Slice{"s", {}, {}}.local_shape()), (std::vector<int64_t>{0}));
}

TEST(SliceTest, CheckFindsOverlapsAndBoxesOutside) {
  EXPECT_THROW((Slice{"x", {4}, {{{0}, {3}}, {{2}, {2}}}}.check()), InternalError);
  EXPECT_THROW((Slice{"x", {4}, {{{2}, {3}}}}.check()), InternalError);
  EXPECT_THROW((Slice{"x", {4}, {{{0, 0}, {1, 1}}}}.check()), InternalError);
  (Slice{"x", {4}, {{{0}, {2}}, {{2}, {2}}}}.check());
  EXPECT_THROW((Slice{"x", {6, 4}, {{{0, 0}, {6, 1}}, {{1, 2}, {1, 2}}, {{3, 1}, {1, 2}}, {{3, 2}, {2, 1}}}}.check()), InternalError);
  (Slice{"x", {6, 4}, {{{0, 0}, {6, 1}}, {{1, 2}, {1, 2}}, {{3, 1}, {1, 1}}, {{3, 2}, {2, 1}}, {{3, 2}, {0, 2}}}}.check());
  EXPECT_THROW((Slice{"x", {}, {{{}, {}}, {{}, {}}}}.check()), InternalError);
}

TEST(ForEachRun, VisitsTheBoxInRowMajorOrder) {
  const auto runs = [](const std::vector<int64_t>& shape, const Box& box) {
    std::vector<std::pair<int64_t, int64_t>> out;
    for_each_run(shape, box, [&](int64_t first, int64_t count) { out.emplace_back(first, count); });
    return out;
  };
  using Runs = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(runs({4, 6}, {{1, 0}, {2, 6}}), (Runs{{6, 12}}));
  EXPECT_EQ(runs({4, 6}, {{1, 2}, {2, 3}}), (Runs{{8, 3}, {14, 3}}));
  EXPECT_EQ(runs({2, 3, 4}, {{0, 1, 0}, {2, 2, 4}}), (Runs{{4, 8}, {16, 8}}));
  EXPECT_EQ(runs({2, 3, 4}, {{0, 0, 1}, {2, 2, 2}}), (Runs{{1, 2}, {5, 2}, {13, 2}, {17, 2}}));
  EXPECT_EQ(runs({}, {}), (Runs{{0, 1}}));
  EXPECT_EQ(runs({1}, {{0}, {1}}), (Runs{{0, 1}}));
  EXPECT_EQ(runs({4, 6}, {{1, 0}, {0, 6}}), Runs{});
}

TEST(Reshard, NamesTensorAndMissingBox) {
  const Slice target = Slice::whole("layers.3.w1", {6, 2});
  const std::vector<Slice> sources = {Slice::along("layers.3.w1", {6, 2}, 0, 0, 2), Slice::along("layers.3.w1", {6, 2}, 0, 4, 2)};
  try {
    reshard(sources, target);
    FAIL() << "a hole went unnoticed";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("layers.3.w1"));
    EXPECT_THAT(error.what(), HasSubstr("[2:4, 0:2]"));
  }
  EXPECT_THROW(reshard({}, target), ConfigError);
  EXPECT_THROW(reshard({Slice::whole("layers.3.w1", {6, 3})}, target), ConfigError);
  EXPECT_THROW(reshard({Slice::whole("layers.3.w2", {6, 2})}, target), ConfigError);
  EXPECT_TRUE(reshard({}, Slice{"empty", {6, 2}, {}}).empty()) << "a rank that holds nothing needs nothing";
}

TEST(Reshard, PrefersTheFirstOfEqualSources) {
  const Slice whole = Slice::whole("w", {4});
  const auto pieces = reshard({whole, whole}, whole);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].source, 0);
  const auto later = reshard({Slice::along("w", {4}, 0, 1, 3), whole}, whole);  // also where another begins before it
  ASSERT_EQ(later.size(), 2u);
  EXPECT_EQ(later[0].source, 0);
  EXPECT_EQ(later[0].box.numel(), 3);
}

TEST(Reshard, RowsToColumnsIsOnePieceEach) {
  std::vector<Slice> rows;
  for (int rank = 0; rank < 3; ++rank) {
    const auto [begin, size] = chunk(7, 3, rank);
    rows.push_back(Slice::along("w", {7, 5}, 0, begin, size));
  }
  const auto pieces = reshard(rows, Slice::along("w", {7, 5}, 1, 3, 2));
  ASSERT_EQ(pieces.size(), 3u);
  EXPECT_EQ(pieces[1].source_local, (Box{{0, 3}, {2, 2}}));
  EXPECT_EQ(pieces[1].target_local, (Box{{3, 0}, {2, 2}}));
}

TEST(Reshard, WholeRowsOfAFlatSliceAreOnePiece) {
  const Slice whole = Slice::whole("x", {6, 4});
  const std::vector<Slice> flat{elements(whole, 0, 14), elements(whole, 14, 10)};
  for (const Slice& slice : flat) ASSERT_EQ(slice.concat_dim(), -1);
  EXPECT_EQ(reshard(flat, whole).size(), 4) << "three rows, two halves of one, and two rows";
}

TEST(Elements, OfEveryRunAreTheRunItself) {
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{}, {0}, {1}, {7}, {3, 4}, {1, 5}, {5, 1}, {2, 3, 4}, {2, 1, 3}, {2, 0, 3}, {1, 1, 1}, {2, 2, 2, 3}}) {
    const Slice whole = Slice::whole("w", shape);
    const int64_t n = whole.numel();
    const at::Tensor values = at::arange(n, at::kLong).view(shape);
    for (int64_t begin = 0; begin <= n; ++begin) {
      for (int64_t size = 0; begin + size <= n; ++size) {
        const Slice run = elements(whole, begin, size);
        run.check();
        ASSERT_EQ(run.numel(), size);
        EXPECT_LE(run.boxes.size(), std::max<size_t>(1, 2 * shape.size()));
        const at::Tensor local = values.reshape({n}).narrow(0, begin, size).view(run.local_shape());
        for (size_t box = 0; box < run.boxes.size(); ++box) {
          const Slice target{"w", shape, {run.boxes[box]}};
          at::Tensor part = at::empty(target.local_shape(), at::kLong);
          copy_slices({run}, {local}, target, part);
          EXPECT_TRUE(at::equal(part, take(values, target))) << to_string(run.boxes[box]) << " of " << begin << " + " << size;
        }
      }
    }
  }
}

TEST(Elements, OfASliceAreASliceOfTheWhole) {
  const Slice rows = Slice::along("w", {6, 3}, 0, 2, 3);
  EXPECT_EQ(elements(rows, 0, 9), rows);
  EXPECT_EQ(elements(rows, 3, 3).boxes, (std::vector<Box>{{{3, 0}, {1, 3}}}));
  EXPECT_EQ(elements(rows, 1, 4).boxes, (std::vector<Box>{{{2, 1}, {1, 2}}, {{3, 0}, {1, 2}}}));
  EXPECT_TRUE(elements(rows, 4, 0).boxes.empty());
  const Slice zigzag{"w", {8, 2}, {{{0, 0}, {2, 2}}, {{6, 0}, {2, 2}}}};
  EXPECT_EQ(elements(zigzag, 2, 4).boxes, (std::vector<Box>{{{1, 0}, {1, 2}}, {{6, 0}, {1, 2}}}));
  const Slice side_by_side{"w", {2, 8}, {{{0, 0}, {2, 2}}, {{0, 6}, {2, 2}}}};
  EXPECT_THROW(elements(side_by_side, 0, 2), InternalError);
  EXPECT_THROW(elements(rows, 8, 2), InternalError);
  EXPECT_THROW(elements(rows, -1, 2), InternalError);
}

}  // namespace
}  // namespace tessera
