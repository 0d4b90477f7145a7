#include <algorithm>
#include <numeric>
#include <random>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

namespace tessera {
namespace {

using Random = std::mt19937;

int64_t draw(Random& random, int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); }

std::vector<int64_t> random_shape(Random& random) {
  std::vector<int64_t> shape(draw(random, 0, 4));
  for (auto& size : shape) size = draw(random, 0, 9) == 0 ? 0 : draw(random, 1, 7);
  return shape;
}

/// Uneven contiguous runs along one dimension; some may be empty.
std::vector<Slice> random_chunks(Random& random, const std::vector<int64_t>& shape, int parts) {
  const int64_t dim = draw(random, 0, static_cast<int64_t>(shape.size()) - 1);
  std::vector<int64_t> cuts = {0, shape[dim]};
  for (int i = 1; i < parts; ++i) cuts.push_back(draw(random, 0, shape[dim]));
  std::sort(cuts.begin(), cuts.end());
  std::vector<Slice> slices;
  for (int i = 0; i < parts; ++i) slices.push_back(Slice::along("w", shape, dim, cuts[i], cuts[i + 1] - cuts[i]));
  return slices;
}

/// Part i and part 2n - 1 - i of 2n chunks: what ring attention gives rank i.
std::vector<Slice> zig_zag(Random& random, const std::vector<int64_t>& shape, int parts) {
  const int64_t dim = draw(random, 0, static_cast<int64_t>(shape.size()) - 1);
  std::vector<Slice> slices;
  for (int i = 0; i < parts; ++i) {
    Slice slice{"w", shape, {}};
    for (const int half : {i, 2 * parts - 1 - i}) {
      const auto [begin, size] = chunk(shape[dim], 2 * parts, half);
      slice.boxes.push_back(Slice::along("w", shape, dim, begin, size).boxes[0]);
    }
    slices.push_back(slice);
  }
  return slices;
}

/// A grid of blocks over two dimensions, dealt at random: boxes differ in more than one dimension, so local tensors are flattened.
std::vector<Slice> scattered_blocks(Random& random, const std::vector<int64_t>& shape, int parts) {
  std::vector<Box> boxes = {Box::whole(shape)};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<Box> cut;
    for (const auto& box : boxes) {
      const int64_t at = draw(random, 0, box.size[d]);
      Box low = box, high = box;
      low.size[d] = at;
      high.offset[d] += at;
      high.size[d] -= at;
      cut.push_back(low);
      cut.push_back(high);
    }
    boxes = std::move(cut);
  }
  std::vector<Slice> slices(parts, Slice{"w", shape, {}});
  for (const auto& box : boxes) slices[draw(random, 0, parts - 1)].boxes.push_back(box);
  return slices;
}

/// Runs of one dimension, dealt at random: what ranks hold of blocks of a weight that they cut by columns.
std::vector<Slice> scattered_runs(Random& random, const std::vector<int64_t>& shape, int parts) {
  std::vector<Slice> slices(parts, Slice{"w", shape, {}});
  for (int64_t begin = 0, size = 0; begin < shape[0]; begin += size) {
    size = draw(random, 1, std::min<int64_t>(3, shape[0] - begin));
    slices[draw(random, 0, parts - 1)].boxes.push_back({{begin}, {size}});
  }
  for (Slice& slice : slices) std::shuffle(slice.boxes.begin(), slice.boxes.end(), random);
  return slices;
}

std::vector<Slice> random_layout(Random& random, const std::vector<int64_t>& shape) {
  const int parts = static_cast<int>(draw(random, 1, 5));
  if (shape.empty()) return std::vector<Slice>(parts, Slice::whole("w", shape));
  switch (draw(random, 0, 3)) {
    case 0:
      return std::vector<Slice>(parts, Slice::whole("w", shape));
    case 1:
      return random_chunks(random, shape, parts);
    case 2:
      return zig_zag(random, shape, parts);
    default:
      return scattered_blocks(random, shape, parts);
  }
}

TEST(ReshardProperty, AnyLayoutBecomesAnyOther) {
  for (unsigned seed = 0; seed < 400; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const auto shape = random_shape(random);
    const int64_t numel = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    const auto whole = at::arange(numel).view(shape);
    const auto sources = random_layout(random, shape);
    std::vector<at::Tensor> source_tensors;
    for (const auto& source : sources) {
      source.check();
      source_tensors.push_back(take(whole, source).contiguous());
      ASSERT_EQ(source_tensors.back().sizes(), at::IntArrayRef(source.local_shape()));
    }
    for (const auto& target : random_layout(random, shape)) {
      auto filled = at::full(target.local_shape(), -1, at::kLong);
      copy_slices(sources, source_tensors, target, filled);
      ASSERT_TRUE(filled.equal(take(whole, target)));
      int64_t moved = 0;
      for (const auto& piece : reshard(sources, target)) {
        moved += piece.box.numel();
        ASSERT_EQ(piece.source_local.numel(), piece.box.numel());
        ASSERT_EQ(piece.target_local.numel(), piece.box.numel());
      }
      ASSERT_EQ(moved, target.numel()) << "each element once";
    }
  }
}

TEST(ReshardProperty, RunsInAnyOrderBecomeAnyOthers) {
  for (unsigned seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const std::vector<int64_t> shape{draw(random, 1, 60)};
    auto sources = scattered_runs(random, shape, static_cast<int>(draw(random, 1, 4)));
    const auto replicas = scattered_runs(random, shape, 2);
    if (seed % 2 == 0) sources.insert(sources.begin(), replicas.front());
    const at::Tensor whole = at::arange(shape[0]);
    std::vector<at::Tensor> held;
    for (const Slice& source : sources) held.push_back(take(whole, source));
    for (const Slice& target : scattered_runs(random, shape, 3)) {
      at::Tensor filled = at::full(target.local_shape(), -1, at::kLong);
      copy_slices(sources, held, target, filled);
      ASSERT_TRUE(filled.equal(take(whole, target)));
    }
    const size_t needed = seed % 2 == 0 ? 1 : 0;
    if (sources[needed].boxes.empty() || seed % 2 == 0) continue;
    sources[needed].boxes.pop_back();
    ASSERT_THROW(reshard(sources, Slice::whole("w", shape)), ConfigError);
  }
}

/// The scales of 8-bit Adam of a weight of 3,000 rows that two ranks cut by columns, and three by rows: compared box by box, this takes minutes.
TEST(ReshardProperty, ThousandsOfRunsFindEachOther) {
  constexpr int64_t kRows = 3000, kBlocks = 8;
  const std::vector<int64_t> shape{kRows * kBlocks};
  std::vector<Slice> columns(2, Slice{"w", shape, {}});
  for (int64_t row = 0; row < kRows; ++row) {
    columns[0].boxes.push_back({{row * kBlocks}, {3}});
    columns[1].boxes.push_back({{row * kBlocks + 3}, {5}});
  }
  for (const Slice& slice : columns) slice.check();
  EXPECT_EQ(reshard(columns, Slice::whole("w", shape)).size(), 2 * kRows);
  EXPECT_EQ(reshard(columns, columns[1]).size(), kRows);
  EXPECT_EQ(reshard(columns, Slice::along("w", shape, 0, 0, shape[0] / 3)).size(), 2 * kRows / 3);
  columns[1].boxes.insert(columns[1].boxes.begin(), Box{{shape[0] - 4}, {1}});
  EXPECT_THROW(columns[1].check(), InternalError) << "the last row's run holds it, too";
}

TEST(ReshardProperty, AMissingSourceIsAlwaysNoticed) {
  int noticed = 0;
  for (unsigned seed = 0; seed < 200; ++seed) {
    Random random(seed);
    auto shape = random_shape(random);
    if (shape.empty()) continue;
    auto sources = scattered_blocks(random, shape, 4);
    const size_t lost = draw(random, 0, 3);
    const bool matters = sources[lost].numel() > 0;
    sources.erase(sources.begin() + lost);
    if (matters) {
      EXPECT_ANY_THROW(reshard(sources, Slice::whole("w", shape)));
      ++noticed;
    } else {
      EXPECT_NO_THROW(reshard(sources, Slice::whole("w", shape)));
    }
  }
  EXPECT_GT(noticed, 50);
}

TEST(ReshardProperty, RunsCoverExactlyTheBox) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    Random random(seed);
    const auto shape = random_shape(random);
    const int64_t numel = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    const auto whole = at::arange(numel).view(shape);
    Slice slice = Slice::whole("w", shape);
    for (size_t d = 0; d < shape.size(); ++d) {
      slice.boxes[0].offset[d] = draw(random, 0, shape[d]);
      slice.boxes[0].size[d] = draw(random, 0, shape[d] - slice.boxes[0].offset[d]);
    }
    std::vector<int64_t> visited;
    for_each_run(shape, slice.boxes[0], [&](int64_t first, int64_t count) {
      for (int64_t i = 0; i < count; ++i) visited.push_back(first + i);
    });
    const auto expected = take(whole, slice).contiguous();
    ASSERT_TRUE(at::tensor(visited, at::kLong).equal(expected.view({-1}))) << seed;
  }
}

}  // namespace
}  // namespace tessera
