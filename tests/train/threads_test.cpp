#include "tessera/train/threads.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/refusal.h"

namespace tessera {
namespace {

TEST(ThreadsPerRank, FollowTheSettingThenTheVariableThenTheCores) {
  RunConfig run;
  EXPECT_EQ(threads_per_rank(run, 2, 8, std::nullopt), 4);
  EXPECT_EQ(threads_per_rank(run, 16, 8, std::nullopt), 1);
  EXPECT_EQ(threads_per_rank(run, 2, 8, "1"), 1);
  EXPECT_EQ(threads_per_rank(run, 2, 8, "6,2"), 6) << "of nested regions the outer one";
  for (const char* nothing : {"", "0", "-3", "many", "2x"}) EXPECT_EQ(threads_per_rank(run, 2, 8, nothing), 4) << nothing;
  EXPECT_THAT(testing_support::refusal([&] { threads_per_rank(run, 2, 8, "1000000"); }),
              testing::HasSubstr("OMP_NUM_THREADS = 1000000: expected at most 1024"));
  EXPECT_THAT(testing_support::refusal([&] { threads_per_rank(run, 2, 8, "99999999999"); }), testing::HasSubstr("OMP_NUM_THREADS"));
  run.deterministic = true;
  EXPECT_EQ(threads_per_rank(run, 2, 8, "6"), 1) << "part of the arithmetic, so of no variable";
  run.threads = 3;
  EXPECT_EQ(threads_per_rank(run, 2, 8, "6"), 3);
}

}  // namespace
}  // namespace tessera
