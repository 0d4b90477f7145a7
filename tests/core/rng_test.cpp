#include "tessera/core/rng.h"

#include <bit>
#include <cmath>
#include <numeric>
#include <set>
#include <vector>

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tessera/core/hash.h"

namespace tessera {
namespace {

TEST(Philox, MatchesThePublishedVectors) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}), (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}), (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(CounterRngTest, SeedAndStreamChangeEverything) {
  std::set<uint64_t> keys;
  for (uint64_t seed : {0, 1, 2}) {
    for (const char* stream : {"", "a", "b", "layers.0.w1", "layers.1.w1"}) keys.insert(CounterRng(seed, stream).key());
  }
  EXPECT_EQ(keys.size(), 15u);
  const CounterRng rng(7, "w");
  EXPECT_EQ(CounterRng::from_key(rng.key()).bits(123), rng.bits(123));
}

// The bits are part of every saved run: another compiler, machine or refactoring must not change them.
TEST(CounterRngTest, BitsAreTheSameEverywhere) {
  EXPECT_EQ(hash_string("tessera"), 0x6d3de5b3d15a6ed6ull);
  const CounterRng rng(1, "layers.0.attention.wq.weight");
  std::vector<float> normal(100003), uniform(100003);
  rng.fill_normal(normal.data(), 0, normal.size(), 0.0f, 0.02f);
  rng.fill_uniform(uniform.data(), 0, uniform.size(), -0.1f, 0.1f);
  EXPECT_EQ(hash_hex(normal.data(), normal.size() * 4), "22b9c1360b7f86f4");
  EXPECT_EQ(hash_hex(uniform.data(), uniform.size() * 4), "2d4c732b0e9a640d");
}

TEST(CounterRngTest, FillsEqualElementwiseValuesForAnyStartAndLength) {
  const CounterRng rng(42, "w");
  for (const uint64_t first :
       {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{3}, uint64_t{4}, uint64_t{1001}, (uint64_t{1} << 34) - 3, (uint64_t{1} << 40) + 1}) {
    for (const int64_t n : {0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 65, 1000, 20001}) {
      std::vector<float> normal(n + 1, -99.0f), uniform(n + 1, -99.0f);
      std::vector<uint32_t> bits(n + 1, 99);
      rng.fill_normal(normal.data(), first, n, 0.5f, 3.0f);
      rng.fill_uniform(uniform.data(), first, n, -2.0f, 1.0f);
      rng.fill_bits(bits.data(), first, n);
      for (int64_t i = 0; i < n; ++i) {
        const float scaled = 3.0f * rng.normal(first + i);
        ASSERT_EQ(std::bit_cast<uint32_t>(normal[i]), std::bit_cast<uint32_t>(0.5f + scaled)) << first << " + " << i << " of " << n;
        const float stretched = 3.0f * rng.uniform(first + i);
        ASSERT_EQ(std::bit_cast<uint32_t>(uniform[i]), std::bit_cast<uint32_t>(-2.0f + stretched)) << first << " + " << i << " of " << n;
        ASSERT_EQ(bits[i], rng.bits(first + i));
      }
      EXPECT_EQ(normal[n], -99.0f) << "wrote past the end";
      EXPECT_EQ(uniform[n], -99.0f);
      EXPECT_EQ(bits[n], 99u);
    }
  }
}

TEST(CounterRngTest, ThreadsDoNotChangeTheBits) {
  const CounterRng rng(3, "w");
  std::vector<float> one(300001), two(300001);
  const int before = at::get_num_threads();
  at::set_num_threads(1);
  rng.fill_normal(one.data(), 5, one.size(), 0, 1);
  at::set_num_threads(2);
  rng.fill_normal(two.data(), 5, two.size(), 0, 1);
  at::set_num_threads(before);
  EXPECT_EQ(one, two);
}

TEST(CounterRngTest, NormalsAreNormal) {
  const CounterRng rng(11, "moments");
  const int64_t n = 4'000'000;
  std::vector<float> z(n);
  rng.fill_normal(z.data(), 0, n, 0, 1);
  std::array<double, 5> moment{};
  double neighbors = 0, largest = 0;
  std::array<int64_t, 4> inside{};
  for (int64_t i = 0; i < n; ++i) {
    double power = 1;
    for (double& m : moment) m += power, power *= z[i];
    if (i) neighbors += double(z[i]) * z[i - 1];
    for (int k = 1; k < 4; ++k) inside[k] += std::abs(z[i]) < k;
    largest = std::max<double>(largest, std::abs(z[i]));
  }
  // Bounds of five standard errors.
  EXPECT_NEAR(moment[1] / n, 0, 5 / std::sqrt(n));
  EXPECT_NEAR(moment[2] / n, 1, 5 * std::sqrt(2.0 / n));
  EXPECT_NEAR(moment[3] / n, 0, 5 * std::sqrt(15.0 / n));
  EXPECT_NEAR(moment[4] / n, 3, 5 * std::sqrt(96.0 / n));
  EXPECT_NEAR(neighbors / n, 0, 5 / std::sqrt(n));
  for (int k = 1; k < 4; ++k) {
    const double expected = std::erf(k / std::sqrt(2.0));
    EXPECT_NEAR(double(inside[k]) / n, expected, 5 * std::sqrt(expected * (1 - expected) / n)) << k;
  }
  EXPECT_GT(largest, 4.5);
  EXPECT_LT(largest, 6.7);
}

/// Box-Muller in double precision from the same words; u is rounded to float as the generator does.
double exact_normal(const CounterRng& rng, uint64_t index) {
  const uint64_t pair = index & ~uint64_t{1};
  const double u = (static_cast<float>(rng.bits(pair) >> 1) + 0.5f) * 0x1p-31f;
  const double angle = rng.bits(pair + 1) * 0x1p-32 * 2 * M_PI;
  return std::sqrt(-2 * std::log(u)) * (index & 1 ? std::sin(angle) : std::cos(angle));
}

TEST(CounterRngTest, OwnLogarithmAndSineAreAccurate) {
  const CounterRng rng(5, "accuracy");
  double worst = 0;
  for (uint64_t i = 0; i < 400000; ++i) worst = std::max(worst, std::abs(rng.normal(i) - exact_normal(rng, i)));
  EXPECT_LT(worst, 1e-6);
}

TEST(CounterRngTest, UniformsAreUniform) {
  const CounterRng rng(12, "uniform");
  const int64_t n = 1'000'000;
  std::vector<float> u(n);
  rng.fill_uniform(u.data(), 0, n, 0, 1);
  std::array<int64_t, 16> bins{};
  for (const float x : u) {
    ASSERT_GE(x, 0.0f);
    ASSERT_LT(x, 1.0f);
    ++bins[static_cast<int>(x * 16)];
  }
  double chi2 = 0;
  for (const int64_t count : bins) chi2 += (count - n / 16.0) * (count - n / 16.0) / (n / 16.0);
  EXPECT_LT(chi2, 45) << "15 degrees of freedom: above 45 once in ten thousand seeds";
}

}  // namespace
}  // namespace tessera
