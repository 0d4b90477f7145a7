#include "tessera/kernels/cuda/grid.h"

#include <gmock/gmock.h>

#include "tests/refusal.h"

namespace tessera::kernels::cuda {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using namespace testing_support;

/// What a device refuses to start is told by no build and no test without one.
TEST(CudaGrid, TokensLieWhereTheLimitIsHigh) {
  for (const int64_t rows : {int64_t{1}, int64_t{64}, int64_t{65}, int64_t{4194240}, int64_t{4194241}, int64_t{1} << 31, kMostAlongX * kRmsNormBlock}) {
    for (const int64_t columns : {int64_t{1}, int64_t{256}, int64_t{257}, int64_t{32768}, kMostAlongY * kThreads}) {
      const Grid grid = grid_of_columns(rows, columns);
      EXPECT_LE(grid.x, kMostAlongX);
      EXPECT_LE(grid.y, kMostAlongY);
      EXPECT_GE(grid.x * kRmsNormBlock, rows);
      EXPECT_LT((grid.x - 1) * kRmsNormBlock, rows);
      EXPECT_GE(static_cast<int64_t>(grid.y) * kThreads, columns);
      EXPECT_LT(static_cast<int64_t>(grid.y - 1) * kThreads, columns);
    }
  }
  EXPECT_EQ(blocks_for(0), 0);
  EXPECT_EQ(blocks_for(257), 2);
  EXPECT_EQ(blocks_for(kMostAlongX * kThreads), kMostAlongX);
}

TEST(CudaGrid, WhatNoLaunchHasIsRefusedByName) {
  EXPECT_THAT(refusal([] { grid_of_columns(1, kMostAlongY * kThreads + 1); }), AllOf(HasSubstr("over [1, 16776961]"), HasSubstr("run.kernels")));
  EXPECT_THAT(refusal([] { grid_of_columns(kMostAlongX * kRmsNormBlock + 1, 1); }), HasSubstr("rows"));
  EXPECT_THAT(refusal([] { blocks_for(kMostAlongX * kThreads + 1); }), HasSubstr("fewer rows at once"));
}

}  // namespace
}  // namespace tessera::kernels::cuda
