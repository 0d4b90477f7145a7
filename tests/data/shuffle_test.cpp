#include "tessera/data/shuffle.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

namespace tessera::data {
namespace {

TEST(Permutation, IsABijectionOfAnySize) {
  for (int64_t size : {1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000, 4096, 4097, 65537}) {
    for (uint64_t epoch : {0, 1, 2}) {
      const Permutation permutation(size, 7, epoch);
      std::vector<char> seen(static_cast<size_t>(size));
      for (int64_t i = 0; i < size; ++i) {
        const int64_t image = permutation(i);
        ASSERT_GE(image, 0);
        ASSERT_LT(image, size);
        ASSERT_FALSE(seen[static_cast<size_t>(image)]++) << "size " << size << " index " << i;
      }
    }
  }
}

TEST(Permutation, HoldsAtTheLargestSizes) {
  for (int64_t size : {int64_t{1} << 40, (int64_t{1} << 40) + 1, int64_t{1} << 62, INT64_MAX}) {
    const Permutation permutation(size, 1, 0);
    for (int64_t i : {int64_t{0}, int64_t{1}, size / 2, size - 1}) {
      EXPECT_GE(permutation(i), 0);
      EXPECT_LT(permutation(i), size);
    }
  }
}

TEST(Permutation, DependsOnSeedAndEpochAndNothingElse) {
  const int64_t size = 1000;
  const auto same = [&](Permutation a, Permutation b) {
    int64_t n = 0;
    for (int64_t i = 0; i < size; ++i) n += a(i) == b(i);
    return n;
  };
  EXPECT_EQ(same({size, 3, 5}, {size, 3, 5}), size);
  // Two random permutations agree in one place on average, in more than ten practically never.
  EXPECT_LE(same({size, 3, 5}, {size, 3, 6}), 10);
  EXPECT_LE(same({size, 3, 5}, {size, 4, 5}), 10);
  EXPECT_LE(same({size, 3, 5}, {size, 5, 3}), 10);
}

TEST(Permutation, MixesPlaces) {
  // Chi-square of where the first tenth of the indices lands, over ten bins: mean 9, and 35 happens once in 10,000.
  const int64_t size = 10007;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const Permutation permutation(size, seed, 0);
    std::vector<double> bins(10);
    for (int64_t i = 0; i < size / 10; ++i) ++bins[static_cast<size_t>(permutation(i) * 10 / size)];
    double chi = 0;
    for (double n : bins) chi += (n - size / 100.0) * (n - size / 100.0) / (size / 100.0);
    EXPECT_LT(chi, 35) << "seed " << seed;
  }
}

}  // namespace
}  // namespace tessera::data
