#include "tests/support/cuda_on_host/launch.h"

#include <set>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>

namespace tessera::cuda_on_host {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

std::string message_of_last_launch() {
  try {
    throw_error();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "none";
}

TEST(CudaOnHost, RunsEachThreadOfEachBlockOnce) {
  std::multiset<std::tuple<unsigned, unsigned, unsigned>> seen;
  for (int launch = 0; launch < 2; ++launch) run({3, 2}, 5, [&] { seen.emplace(blockIdx.x, blockIdx.y, threadIdx.x); });
  EXPECT_EQ(message_of_last_launch(), "none");
  EXPECT_EQ(seen.size(), 60U);
  for (unsigned x = 0; x < 3; ++x) {
    for (unsigned y = 0; y < 2; ++y) {
      for (unsigned thread = 0; thread < 5; ++thread) EXPECT_EQ(seen.count({x, y, thread}), 2U);
    }
  }
}

/// values[i] <- sum over the threads up to i, step by step; without `waits` as somebody writes it who forgot.
std::vector<int> running_sums(bool waits) {
  std::vector<int> values(8, 1);
  run(1, 8, [&] {
    for (unsigned step = 1; step < 8; step *= 2) {
      const int other = threadIdx.x >= step ? values[threadIdx.x - step] : 0;
      if (waits) __syncthreads();
      values[threadIdx.x] += other;
      if (waits) __syncthreads();
    }
  });
  return values;
}

TEST(CudaOnHost, AThreadHasWhatTheOthersWroteBehindABarrier) {
  const std::vector<int> sums{1, 2, 3, 4, 5, 6, 7, 8};
  EXPECT_EQ(running_sums(true), sums);
  EXPECT_EQ(running_sums(true), sums);
}

TEST(CudaOnHost, AMissingBarrierShowsInOneOfTwoLaunches) { EXPECT_NE(running_sums(false), running_sums(false)); }

TEST(CudaOnHost, RefusesGridsThatCudaHasNotGot) {
  int ran = 0;
  for (const auto& [grid, block] : {std::pair{Dim3(0), 32U}, {Dim3(1, 65536), 32U}, {Dim3(1), 0U}, {Dim3(1), 1025U}, {Dim3(2147483648U), 1U}}) {
    run(grid, block, [&] { ++ran; });
    EXPECT_THAT(message_of_last_launch(), HasSubstr("invalid configuration"));
  }
  EXPECT_EQ(ran, 0);
  run({1, 65535}, 1, [&] { ++ran; });
  EXPECT_EQ(message_of_last_launch(), "none");
  EXPECT_EQ(ran, 65535);
}

TEST(CudaOnHost, ABarrierIsForAllThreadsOfABlock) {
  for (int order = 0; order < 2; ++order) {
    run(1, 4, [] {
      if (threadIdx.x < 3) __syncthreads();
    });
    EXPECT_THAT(message_of_last_launch(), HasSubstr("1 threads of a block have ended"));
    run(1, 4, [] {
      if (threadIdx.x < 3) {
        __syncthreads();
      } else {
        __syncthreads();
      }
    });
    EXPECT_THAT(message_of_last_launch(), HasSubstr("threads of one block wait at"));
  }
}

/// Also where others wait for it; launches that follow are as before.
TEST(CudaOnHost, AFailedAssertionEndsTheLaunch) {
  std::vector<int> at(4, 0);
  const auto kernel = [&] {
    at[threadIdx.x] = 1;
    __syncthreads();
    CUDA_KERNEL_ASSERT(threadIdx.x != 2);
    __syncthreads();
    at[threadIdx.x] = 2;
  };
  run(1, 4, kernel);
  EXPECT_THAT(message_of_last_launch(), HasSubstr("device-side assert triggered"));
  EXPECT_THAT(at, Each(1));
  run(1, 2, kernel);
  EXPECT_EQ(message_of_last_launch(), "none");
  EXPECT_EQ(at, (std::vector{2, 2, 1, 1}));
}

}  // namespace
}  // namespace tessera::cuda_on_host
