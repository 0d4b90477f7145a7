// The loops are compiled once per instruction set: what this machine can run must agree.

#include "tessera/kernels/cpu/loops.h"

#include <limits>

#include "tests/kernels/support.h"

namespace tessera::kernels::cpu {
namespace {

using namespace tessera::testing_support;

std::vector<const Loops*> others() {
  std::vector<const Loops*> tables;
#if defined(__x86_64__)
  if (loops_avx2() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) tables.push_back(loops_avx2());
  if (loops_avx512() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    tables.push_back(loops_avx512());
    if (loops_avx512_bf16() && __builtin_cpu_supports("avx512bf16")) tables.push_back(loops_avx512_bf16());
  }
#endif
  return tables;
}

TEST(Loops, TheFastestOfThisMachineIsChosen) {
  const auto tables = others();
  if (std::getenv("ATEN_CPU_CAPABILITY")) GTEST_SKIP() << "ATEN_CPU_CAPABILITY chooses";
  EXPECT_STREQ(loops().name, tables.empty() ? "baseline" : tables.back()->name);
}

TEST(Loops, EveryInstructionSetGivesTheSameCrossEntropy) {
  for (const int64_t vocabulary : {1, 5, 16, 63, 64, 65, 1000}) {
    const at::Tensor logits = random({3, vocabulary}) * 5, labels = at::tensor({int64_t{0}, vocabulary - 1, int64_t{-100}}, at::kLong);
    const auto run = [&](const Loops& table) {
      at::Tensor out = logits.clone(), loss = at::empty({3});
      const LossTerms smoothed{.label = 0.9, .each = 0.1 / static_cast<double>(vocabulary), .z = 0.01};
      table.cross_entropy_in_place({{out.data_ptr(), Type::Float}, labels.const_data_ptr<int64_t>(), vocabulary, loss.data_ptr<float>(), 0.5f, smoothed}, 0, 3);
      return std::pair{out, loss};
    };
    const auto [gradient, loss] = run(*loops_baseline());
    for (const Loops* table : others()) {
      const auto [other_gradient, other_loss] = run(*table);
      expect_close(other_loss, loss, 1e-6, table->name);
      EXPECT_LE((other_gradient - gradient).abs().max().item().toDouble(), 3e-7) << table->name << ", vocabulary " << vocabulary;
    }
  }
}

TEST(Loops, WhereAnUpdateIsCutChangesNoBitUnderAnyInstructionSet) {
  constexpr int64_t n = 5000;
  for (const Loops* table : others()) {
    const auto run = [&](const std::vector<int64_t>& cuts) {
      std::vector<at::Tensor> state{random({n}), random({n}, at::kFloat, 2), random({n}, at::kFloat, 3).square()};
      const at::Tensor gradient = random({n}, at::kFloat, 4);
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        table->adamw({.parameter = state[0].data_ptr<float>(),
                      .gradient = {gradient.const_data_ptr(), Type::Float},
                      .exp_avg = state[1].data_ptr<float>(),
                      .exp_avg_sq = state[2].data_ptr<float>(),
                      .scale = 0.9f,
                      .beta1 = 0.8f,
                      .beta2 = 0.95f,
                      .rest1 = 0.2f,
                      .rest2 = 0.05f,
                      .eps = 1e-6f,
                      .kept = 0.997f,
                      .step_size = 0.02f,
                      .inverse_root = 2.7f},
                     cuts[i], cuts[i + 1]);
      }
      return state;
    };
    const auto whole = run({0, n}), parts = run({0, 7, 32, 2033, n});
    for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(at::equal(whole[i], parts[i])) << table->name << ", tensor " << i;
  }
}

TEST(Loops, EveryInstructionSetDrawsTheSameMask) {
  const at::Tensor x = at::ones({4, 131}), rows = at::tensor({0, 9, 2, 77}, at::kLong);
  const auto run = [&](const Loops& table) {
    at::Tensor out = at::empty_like(x);
    table.dropout({{x.data_ptr(), Type::Float}, {out.data_ptr(), Type::Float}, rows.const_data_ptr<int64_t>(), 131, 3, 140, 12345, 0.25f}, 0, 4);
    return out;
  };
  for (const Loops* table : others()) EXPECT_TRUE(at::equal(run(*table), run(*loops_baseline()))) << table->name;
}

TEST(Loops, EveryInstructionSetRoundsToBFloat16Alike) {
  // Ties, signs, infinities and NaN: what ATen's own cast gives. (Of subnormals the instruction of some CPUs makes zeros.)
  const at::Tensor values = at::cat({random({500}), at::tensor({0.0f, -0.0f, 1.00390625f, 1.01171875f, INFINITY, -INFINITY, NAN, 3.3961776e38f})});
  const at::Tensor expected = values.to(at::kBFloat16);
  for (const Loops* table : others()) {
    at::Tensor sum = at::empty_like(values), out = at::empty_like(expected);
    table->sum_rows(values.const_data_ptr<float>(), 1, values.numel(), {out.data_ptr(), Type::BFloat16}, 0, values.numel());
    EXPECT_TRUE(at::allclose(out.to(at::kFloat), expected.to(at::kFloat), 0, 0, /*equal_nan=*/true)) << table->name;
    table->accumulate(sum.data_ptr<float>(), {out.data_ptr(), Type::BFloat16}, true, 0, values.numel());
    EXPECT_TRUE(at::allclose(sum, expected.to(at::kFloat), 0, 0, /*equal_nan=*/true)) << table->name;
  }
}

TEST(Loops, SumsOfSquaresHaveTheSameBitsFromEveryInstructionSet) {
  for (const int64_t n : {0, 1, 7, 8, 9, 15, 16, 33, 1000}) {
    const at::Tensor values = random({n + 1});
    const float* x = values.const_data_ptr<float>() + 1;  // aligned to nothing
    const double expected = loops_baseline()->sum_of_squares(x, n);
    EXPECT_NEAR(expected, values.narrow(0, 1, n).to(at::kDouble).square().sum().item<double>(), 1e-12 * (1 + expected)) << n;
    for (const Loops* table : others()) EXPECT_EQ(table->sum_of_squares(x, n), expected) << table->name << " " << n;
  }
}

TEST(Loops, EveryInstructionSetBringsTheSameNumbersBackFromCodes) {
  at::Tensor codes = at::arange(3 * 97, at::kLong).mul(37).remainder(256).to(at::kByte), numbers = random({16}), scales = random({10}).abs();
  for (const bool is_nf4 : {false, true}) {
    for (const int64_t offset : {0, 5, 63}) {
      for (const int64_t block : {7, 64}) {
        if (offset >= block) continue;
        const auto run = [&](const Loops& table) {
          at::Tensor out = at::empty({61});
          table.dequantize({codes.const_data_ptr<uint8_t>(),
                            is_nf4,
                            numbers.const_data_ptr<float>(),
                            scales.const_data_ptr<float>(),
                            offset,
                            block,
                            61,
                            {out.data_ptr(), Type::Float}});
          return out;
        };
        for (const Loops* table : others()) EXPECT_TRUE(at::equal(run(*table), run(*loops_baseline()))) << table->name << " " << offset << " " << block;
      }
    }
  }
}

/// Every number of 16 bits, and fp32 beside the middle between two of them: an update of nothing shows how they are widened and rounded.
TEST(Loops, WidenAndRoundAsLibtorch) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor numbers = at::arange(65536, at::kInt).to(at::kShort).view(dtype), wide = numbers.to(at::kFloat);
    const auto bits = [](const at::Tensor& floats) { return floats.view(at::kInt); };
    const at::Tensor middle = bits(wide) + (dtype == at::kHalf ? 0x1000 : 0x8000);
    const auto beside = [&](int by) { return (middle + by).to(at::kInt).view(at::kFloat); };
    std::vector<const Loops*> tables = others();
    tables.push_back(loops_baseline());
    for (const Loops* table : tables) {
      const auto update_of_nothing = [&](const at::Tensor& parameter, const at::Tensor& copy) {
        const at::Tensor gradient = at::zeros_like(parameter), exp_avg = at::zeros_like(parameter), exp_avg_sq = at::zeros_like(parameter);
        table->adamw({.parameter = parameter.data_ptr<float>(),
                      .gradient = {gradient.const_data_ptr(), Type::Float},
                      .exp_avg = exp_avg.data_ptr<float>(),
                      .exp_avg_sq = exp_avg_sq.data_ptr<float>(),
                      .copy = {copy.data_ptr(), dtype == at::kHalf ? Type::Half : Type::BFloat16},
                      .scale = 1,
                      .beta1 = 0,
                      .beta2 = 0,
                      .rest1 = 1,
                      .rest2 = 1,
                      .eps = 1,
                      .kept = 1,
                      .step_size = 0,
                      .inverse_root = 1},
                     0, parameter.numel());
      };
      const auto same = [](const at::Tensor& a, const at::Tensor& b) { return a.eq(b).logical_or(a.ne(a).logical_and(b.ne(b))).all().item<bool>(); };
      const at::Tensor follows = at::full_like(wide, std::numeric_limits<float>::quiet_NaN()), shown = numbers.clone();
      update_of_nothing(follows, shown);
      EXPECT_TRUE(same(follows, wide)) << table->name << " " << dtype;
      for (const int by : {-1, 0, 1}) {
        const at::Tensor parameter = beside(by), kept = parameter.clone(), copy = parameter.to(dtype), as_was = copy.clone();
        update_of_nothing(parameter, copy);
        EXPECT_TRUE(same(parameter, kept)) << table->name << " " << dtype << " " << by << ": rounds another way, and takes the copy's value";
        EXPECT_TRUE(same(copy, as_was)) << table->name << " " << dtype << " " << by;
      }
    }
  }
}

TEST(Loops, ARowDoesNotDependOnTheRange) {
  const at::Tensor x = random({7, 45}), weight = random({45}, at::kFloat, 2);
  const auto run = [&](const std::vector<int64_t>& bounds) {
    at::Tensor out = at::empty_like(x), rstd = at::empty({7});
    for (size_t i = 0; i + 1 < bounds.size(); ++i) {
      loops().rms_norm({{x.data_ptr(), Type::Float}, {weight.data_ptr(), Type::Float}, {out.data_ptr(), Type::Float}, rstd.data_ptr<float>(), 45, 1e-5},
                       bounds[i], bounds[i + 1]);
    }
    return out;
  };
  EXPECT_TRUE(at::equal(run({0, 7}), run({0, 1, 4, 7})));
}

}  // namespace
}  // namespace tessera::kernels::cpu
