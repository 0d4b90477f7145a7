#include "tessera/quantize/quantize.h"

#include <cmath>

#include <ATen/ops/allclose.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/core/error.h"
#include "tessera/nn/layers.h"
#include "tessera/nn/parameter.h"

namespace tessera {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

struct PairImpl : nn::Module {
  PairImpl() : first(13, 7), second(7, 5), norm(5) {
    register_module("first", first);
    register_module("second", second);
    register_module("norm", norm);
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::relu(first(x))); }
  nn::Linear first, second;
  nn::RMSNorm norm;
};
TESSERA_MODULE(Pair);

void freeze(torch::nn::Module& module) {
  for (auto& parameter : module.parameters()) parameter.set_requires_grad(false);
}

TEST(Quantize, TheLayerMultipliesByWhatItsCodesSay) {
  for (const auto format : {kernels::WeightFormat::Int8, kernels::WeightFormat::Nf4}) {
    Pair pair;
    freeze(*pair);
    const at::Tensor weight = pair->first->weight.clone(), bias = pair->first->bias.clone(), x = at::randn({4, 13});
    const kernels::QuantizeForm form{.format = format, .block = 5};
    const auto report = quantize::quantize_weights(*pair, {.modules = {"fir*"}, .form = form}, at::kCPU);
    EXPECT_EQ(report.weights, std::vector<std::string>{"first.weight"});
    EXPECT_EQ(report.elements, 7 * 13);
    EXPECT_FALSE(pair->first->weight.defined());
    EXPECT_EQ(nn::unique_parameters(*pair).front().name, "first.bias");
    const auto matrix = kernels::quantize(weight, form, {.rows = 7, .columns = 13, .whole_columns = 13}, at::kCPU);
    EXPECT_EQ(report.bytes, matrix.bytes());
    EXPECT_TRUE(at::allclose(pair->first(x), at::matmul(x, kernels::dequantize(matrix, 0, 7, at::kFloat).t()) + bias, 1e-5, 1e-5));
    EXPECT_EQ(pair(x).sizes(), at::IntArrayRef({4, 5}));
  }
}

TEST(Quantize, RefusesByName) {
  Pair pair;
  const auto quantized = [&](const std::string& modules) { return [&pair, modules] { quantize::quantize_weights(*pair, {.modules = {modules}}, at::kCPU); }; };
  EXPECT_THAT(quantized("second"), ThrowsMessage<ConfigError>(HasSubstr("'second.weight' is to be trained")));
  freeze(*pair);
  EXPECT_THAT(quantized("secon"), ThrowsMessage<ConfigError>(HasSubstr("the nearest path is 'second'")));
  pair->second->weight[2][3] = NAN;
  EXPECT_THAT(quantized("second"), ThrowsMessage<ConfigError>(HasSubstr("quantize: 'second.weight' holds numbers that are not finite")));
  pair->second->weight[2][3] = 1;
  EXPECT_THAT(quantized("norm"), ThrowsMessage<ConfigError>(HasSubstr("names 'norm' and no linear layer")));
}

}  // namespace
}  // namespace tessera
