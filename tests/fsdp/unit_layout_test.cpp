#include "tessera/fsdp/unit_layout.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using Shapes = std::vector<std::vector<int64_t>>;

/// Every element of every parameter belongs to one rank, in whole rows, and the ranks' runs are contiguous and in order.
void check(const UnitLayout& layout, const Shapes& shapes, int ranks) {
  ASSERT_EQ(layout.parameters.size(), shapes.size());
  ASSERT_EQ(layout.begin.size(), static_cast<size_t>(ranks) + 1);
  EXPECT_EQ(layout.begin.front(), 0);
  EXPECT_EQ(layout.begin.back(), layout.size);
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_LE(layout.begin[rank], layout.begin[rank + 1]);
    EXPECT_LE(layout.begin[rank + 1] - layout.begin[rank], layout.part);
    if (layout.even) EXPECT_EQ(layout.begin[rank + 1] - layout.begin[rank], layout.part);
  }
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& entry = layout.parameters[i];
    EXPECT_LE(entry.offset + entry.numel, layout.size);
    for (size_t j = 0; j < i; ++j) {
      const auto& other = layout.parameters[j];
      EXPECT_TRUE(other.offset + other.numel <= entry.offset || entry.offset + entry.numel <= other.offset) << j << " and " << i << " overlap";
    }
    const int64_t rows = shapes[i].empty() ? 1 : shapes[i][0], row = rows > 0 ? entry.numel / rows : 0;
    int64_t next = 0;
    for (int rank = 0; rank < ranks && row > 0; ++rank) {
      const auto [first, count] = rows_of(layout, i, rank);
      if (count == 0) continue;
      EXPECT_EQ(first, next);
      EXPECT_GE(entry.offset + first * row, layout.begin[rank]);
      EXPECT_LE(entry.offset + (first + count) * row, layout.begin[rank + 1]);
      next += count;
    }
    if (row > 0) EXPECT_EQ(next, rows) << "parameter " << i;
  }
}

TEST(UnitLayout, CutsAnySizesBetweenRows) {
  const std::vector<Shapes> all{{{7, 5}, {7}, {3, 7}, {}, {1}, {0, 4}, {4, 0}},
                                {{}},
                                {{1}},
                                {{2, 3, 5}, {11, 13}, {17, 19}},
                                {{0}},
                                {{64, 64}, {64}},
                                {{10, 10}, {10}, {5, 10}, {5}},
                                {{3, 5}, {3}},
                                {{2, 300}, {1}},
                                {{1, 50}, {}}};
  for (const auto& shapes : all) {
    for (int ranks = 1; ranks <= 9; ++ranks) check(make_unit_layout(shapes, ranks), shapes, ranks);
  }
}

TEST(UnitLayout, OneRankHasEverythingWithoutGaps) {
  const UnitLayout layout = make_unit_layout({{7, 5}, {}, {3}}, 1);
  EXPECT_TRUE(layout.even);
  EXPECT_EQ(layout.size, 39);
  EXPECT_EQ(rows_of(layout, 0, 0), std::make_pair(int64_t{0}, int64_t{7}));
}

TEST(UnitLayout, ABlockOfATransformerNeedsNoCopiesAndLittlePadding) {
  const int64_t d = 384, f = 1024;
  for (int ranks : {2, 3, 4, 5, 8}) {
    const UnitLayout layout = make_unit_layout({{d}, {d, d}, {d, d}, {d, d}, {d, d}, {d}, {f, d}, {d, f}, {f, d}}, ranks);
    EXPECT_TRUE(layout.even) << ranks;
    EXPECT_LT(static_cast<double>(layout.size), 1.01 * static_cast<double>(layout.numel())) << ranks;
  }
}

TEST(UnitLayout, LargeCoprimeRowsTravelPadded) {
  const Shapes shapes{{300, 101}, {300, 103}, {300, 107}};
  const UnitLayout layout = make_unit_layout(shapes, 9);
  EXPECT_FALSE(layout.even);
  EXPECT_EQ(layout.size, layout.numel());
  EXPECT_LT(layout.part, layout.size / 9 + 107);
  check(layout, shapes, 9);
}

TEST(UnitLayout, RowsOfASliceThatAnotherTechniqueCut) {
  const Slice columns = Slice::along("w", {6, 8}, 1, 4, 4);
  EXPECT_EQ(cut_rows(columns, 2, 3), (Slice{"w", {6, 8}, {{{2, 4}, {3, 4}}}}));
  const Slice rows = Slice::along("w", {6, 8}, 0, 3, 3);
  EXPECT_EQ(cut_rows(rows, 1, 2), (Slice{"w", {6, 8}, {{{4, 0}, {2, 8}}}}));
  const Slice zigzag{"w", {8, 2}, {{{0, 0}, {2, 2}}, {{6, 0}, {2, 2}}}};
  EXPECT_EQ(cut_rows(zigzag, 1, 2), (Slice{"w", {8, 2}, {{{1, 0}, {1, 2}}, {{6, 0}, {1, 2}}}}));
  EXPECT_EQ(cut_rows(zigzag, 3, 1), (Slice{"w", {8, 2}, {{{7, 0}, {1, 2}}}}));
  EXPECT_EQ(cut_rows(columns, 2, 0).local_shape(), (std::vector<int64_t>{0, 4}));  // as many columns as the others
  EXPECT_TRUE(cut_rows(Slice::whole("w", {6, 8}), 2, 0).boxes.empty());
  EXPECT_TRUE(cut_rows(Slice::whole("s", {}), 0, 0).boxes.empty());
  EXPECT_EQ(cut_rows(Slice::whole("s", {}), 0, 1), Slice::whole("s", {}));
}

}  // namespace
}  // namespace tessera
