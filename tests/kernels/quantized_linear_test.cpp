#include "tessera/kernels/quantized_linear.h"

#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"

namespace tessera::kernels {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

MatrixPart all_of(const at::Tensor& whole) { return {.rows = whole.size(0), .columns = whole.size(1), .whole_columns = whole.size(1)}; }

at::Tensor back(const QuantizedMatrix& matrix) { return dequantize(matrix, 0, matrix.part.rows, at::kFloat); }

/// What the definition says, block by block of the flattened matrix.
at::Tensor plain(const at::Tensor& whole, const QuantizeForm& form) {
  at::Tensor flat = whole.clone().view({-1});
  float* const values = flat.mutable_data_ptr<float>();
  for (int64_t begin = 0; begin < flat.numel(); begin += form.block) {
    const int64_t end = std::min(flat.numel(), begin + form.block);
    float largest = 0;
    for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::abs(values[i]));
    for (int64_t i = begin; i < end; ++i) {
      const float x = largest > 0 ? values[i] / largest : 0;
      if (form.format == WeightFormat::Int8) {
        values[i] = std::nearbyint(x * 127) * (largest / 127);
        continue;
      }
      float nearest = nf4_numbers()[0];
      for (const float number : nf4_numbers()) nearest = std::abs(number - x) < std::abs(nearest - x) ? number : nearest;
      values[i] = nearest * largest;
    }
  }
  return flat.view(whole.sizes());
}

TEST(QuantizedLinear, KeepsWhatTheDefinitionSays) {
  for (const auto format : {WeightFormat::Int8, WeightFormat::Nf4}) {
    for (const auto& [rows, columns, block] : {std::array<int64_t, 3>{7, 13, 5}, {4, 64, 64}, {3, 200, 64}, {5, 3, 64}, {1, 1, 1}}) {
      at::Tensor whole = at::randn({rows, columns});
      whole[0].zero_();
      const QuantizeForm form{.format = format, .block = block};
      EXPECT_TRUE(at::equal(back(quantize(whole, form, all_of(whole), at::kCPU)), plain(whole, form))) << rows << "x" << columns << " by " << block;
    }
  }
}

TEST(QuantizedLinear, APartHoldsTheWholesNumbers) {
  const at::Tensor whole = at::randn({11, 29});
  for (const auto format : {WeightFormat::Int8, WeightFormat::Nf4}) {
    for (const bool twice : {false, true}) {
      for (const int64_t block : {1, 7, 64}) {
        const QuantizeForm form{.format = format, .block = block, .double_scales = twice};
        const at::Tensor expected = back(quantize(whole, form, all_of(whole), at::kCPU));
        for (const auto& [row, rows, column, columns] :
             {std::array<int64_t, 4>{3, 5, 0, 29}, {0, 11, 10, 9}, {2, 1, 28, 1}, {9, 2, 3, 20}, {10, 1, 5, 0}, {4, 0, 0, 29}}) {
          const MatrixPart part{.row = row, .rows = rows, .column = column, .columns = columns, .whole_columns = 29};
          EXPECT_TRUE(at::equal(back(quantize(whole, form, part, at::kCPU)), expected.narrow(0, row, rows).narrow(1, column, columns)));
        }
      }
    }
  }
}

TEST(QuantizedLinear, TakesTheBytesThatAreSaid) {
  const auto bits = [](const QuantizeForm& form, at::Device device) {
    const at::Tensor whole = at::randn({256, 512});
    return 8.0 * static_cast<double>(quantize(whole, form, all_of(whole), device).bytes()) / (256 * 512);
  };
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kMeta)}) {
    EXPECT_DOUBLE_EQ(bits({.format = WeightFormat::Nf4, .block = 64}, device), 4.5);
    EXPECT_NEAR(bits({.format = WeightFormat::Nf4, .block = 64, .double_scales = true}, device), 4.127, 5e-4);
    EXPECT_DOUBLE_EQ(bits({.format = WeightFormat::Int8, .block = 64}, device), 8.5);
  }
}

TEST(QuantizedLinear, ScalesInEightBitsAreClose) {
  const at::Tensor whole = at::randn({64, 320});
  const auto once = back(quantize(whole, {.block = 64}, all_of(whole), at::kCPU));
  const auto twice = back(quantize(whole, {.block = 64, .double_scales = true}, all_of(whole), at::kCPU));
  EXPECT_LT((once - twice).abs().max().item<double>(), 0.02 * whole.abs().max().item<double>());
  EXPECT_FALSE(at::equal(once, twice));
}

TEST(QuantizedLinear, MultipliesInTilesForwardAndBackward) {
  // More elements than a tile has.
  for (const auto& [rows, columns] : {std::pair<int64_t, int64_t>{9, 5}, {2200, 500}}) {
    const at::Tensor whole = at::randn({rows, columns}), dy = at::randn({2, 3, rows});
    const auto matrix = std::make_shared<QuantizedMatrix>(quantize(whole, {.format = WeightFormat::Int8, .block = 32}, all_of(whole), at::kCPU));
    const at::Tensor x = at::randn({2, 3, columns}).requires_grad_(), weight = back(*matrix);
    const at::Tensor y = quantized_linear(x, matrix);
    EXPECT_TRUE(at::allclose(y, at::matmul(x, weight.t()), 1e-5, 1e-4));
    y.backward(dy);
    EXPECT_TRUE(at::allclose(x.grad(), at::matmul(dy, weight), 1e-5, 1e-3));
    const at::Tensor narrow = quantized_linear(x.detach().to(at::kBFloat16), matrix);
    EXPECT_EQ(narrow.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::allclose(narrow.to(at::kFloat), y.detach(), 3e-2, 0.3));
  }
}

/// Gradients in 16 bits are those of one product, rounded once, however many tiles the weight has.
TEST(QuantizedLinear, ErrorsDoNotGrowWithTheTiles) {
  const auto error_of = [](int64_t rows, int64_t columns) {
    const auto whole = at::randn({rows, columns}), dy = at::randn({3, rows}).to(at::kBFloat16);
    const auto matrix = std::make_shared<QuantizedMatrix>(quantize(whole, {.format = WeightFormat::Int8, .block = 64}, all_of(whole), at::kCPU));
    const at::Tensor x = at::zeros({3, columns}, at::kBFloat16).requires_grad_();
    quantized_linear(x, matrix).backward(dy);
    EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
    const at::Tensor exact = at::matmul(dy.to(at::kDouble), dequantize(*matrix, 0, rows, at::kBFloat16).to(at::kDouble));
    return ((x.grad().to(at::kDouble) - exact).norm() / exact.norm()).item<double>();
  };
  const double of_one = error_of(512, 2048), of_many = error_of(16 * 512, 2048);
  EXPECT_LT(of_many, 1.6 * of_one);  // each tile's term is rounded, too; their sum in 16 bits is off by 3.2
}

/// As libtorch has it of what it saves.
TEST(QuantizedLinear, IsLetGoOfByTheLastBackward) {
  const at::Tensor x = at::ones({2, 3}).requires_grad_();
  int brought = 0;
  const auto matrix =
      std::make_shared<QuantizedMatrix>(quantize(at::ones({4, 3}), {.format = WeightFormat::Int8}, {.rows = 4, .columns = 3, .whole_columns = 3}, at::kCPU));
  const auto before = matrix.use_count();
  const at::Tensor y = quantized_linear(x, [&brought, matrix] {
                         ++brought;
                         return matrix;
                       }).sum();
  y.backward({}, /*retain_graph=*/true);
  EXPECT_EQ(matrix.use_count(), before + 1);
  y.backward();
  EXPECT_EQ(brought, 3);
  EXPECT_EQ(matrix.use_count(), before);
  EXPECT_TRUE(at::equal(x.grad(), at::full({2, 3}, 8.0)));
  EXPECT_THAT([&] { y.backward(); }, ThrowsMessage<ConfigError>(HasSubstr("a second time; give the first one retain_graph = true")));
}

TEST(QuantizedLinear, RefusesWhatNoCodeStandsFor) {
  const at::Tensor whole = at::randn({2, 3});
  whole[1][2] = std::numeric_limits<float>::infinity();
  EXPECT_THAT([&] { quantize(whole, {}, all_of(whole), at::kCPU); }, ThrowsMessage<ConfigError>(HasSubstr("not finite")));
}

}  // namespace
}  // namespace tessera::kernels
