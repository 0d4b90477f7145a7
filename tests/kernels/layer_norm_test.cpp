#include "tessera/kernels/layer_norm.h"

#include <torch/csrc/autograd/autograd.h>

#include "tessera/core/error.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/rms_norm.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;
constexpr double kLayerEps = 1e-5;

TEST(LayerNorm, EqualsTheReferenceInDoublePrecision) {
  for (const auto x : {at::kFloat, at::kBFloat16}) {
    for (const auto weight : {at::kFloat, at::kBFloat16}) {
      for (const auto out : {at::kFloat, at::kBFloat16}) {
        const auto fused = [out](const std::vector<at::Tensor>& in) { return layer_norm(in[0], in[1], in[2], kLayerEps, out); };
        const auto plain = [](const std::vector<at::Tensor>& in) { return reference::layer_norm(in[0], in[1], in[2], kLayerEps); };
        const double bound = std::max({tolerance(x), tolerance(weight), tolerance(out)});
        for (const std::vector<int64_t>& shape : {std::vector<int64_t>{1, 4}, {65, 3}, {2, 67, 33}, {257}, {0, 5}}) {
          expect_same(fused, plain, {random(shape, x) + 3, random({shape.back()}, weight, 2), random({shape.back()}, weight, 3)}, bound);
        }
      }
    }
  }
}

TEST(LayerNorm, IsThatOfLibtorch) {
  const at::Tensor x = random({9, 50}), weight = random({50}, at::kFloat, 2), bias = random({50}, at::kFloat, 3);
  expect_close(layer_norm(x, weight, bias, kLayerEps), at::layer_norm(x, {50}, weight, bias, kLayerEps), 1e-6, "fp32");
}

TEST(LayerNorm, BitsDoNotDependOnThreads) {
  const at::Tensor x = random({700, 96}), weight = random({96}, at::kFloat, 2), cotangent = random({700, 96}, at::kFloat, 3);
  expect_thread_independent([&] {
    const auto e = evaluate([](const auto& in) { return layer_norm(in[0], in[1], in[1], kLayerEps); }, {x, weight}, cotangent);
    return std::vector<at::Tensor>{e.result, e.gradients[0], e.gradients[1]};
  });
}

TEST(LayerNorm, RefusesWhatDoesNotFit) {
  EXPECT_THAT(message_of<ConfigError>([] { layer_norm(random({4, 8}), random({7}), random({7}), kLayerEps); }), ::testing::HasSubstr("one entry per feature"));
  EXPECT_THAT(message_of<ConfigError>([] { layer_norm(random({4, 8}), random({8}), random({8}, at::kBFloat16), kLayerEps); }),
              ::testing::HasSubstr("must be alike"));
}

/// Sum and norm, both of which something is made of, so that both get gradients; `use`: 1 the sum alone, 2 the norm alone, 3 both.
Operator joined(bool centered, bool fused, int use) {
  return [=](const std::vector<at::Tensor>& in) {
    at::Tensor sum, out;
    if (fused) {
      std::tie(sum, out) = centered ? add_layer_norm(in[0], in[1], in[2], in[3], kLayerEps) : add_rms_norm(in[0], in[1], in[2], kLayerEps);
    } else {
      sum = in[0] + in[1];
      out = centered ? reference::layer_norm(sum, in[2], in[3], kLayerEps) : reference::rms_norm(sum, in[2], kLayerEps);
    }
    const at::Tensor both = use == 1 ? sum * 2 : use == 2 ? out : sum * 2 + out;
    return both + 0 * (in[2] + in[3]);
  };
}

TEST(AddedNorm, EqualsTheSumAndItsNorm) {
  for (const bool centered : {false, true}) {
    for (const auto& [stream, part] : {std::pair{at::kFloat, at::kFloat}, {at::kFloat, at::kBFloat16}, {at::kBFloat16, at::kBFloat16}}) {
      for (const int use : {1, 2, 3}) {
        for (const std::vector<int64_t>& shape : {std::vector<int64_t>{3, 67, 33}, {1, 5}, {0, 5}}) {
          const auto feature = [&](uint64_t seed) { return random({shape.back()}, at::kFloat, seed); };
          // The stream's gradient is rounded to 16 bits once by the norm and once with what is added to it.
          const double bound = 2 * std::max(tolerance(stream), tolerance(part));
          expect_same(joined(centered, true, use), joined(centered, false, use), {random(shape, stream), random(shape, part, 4), feature(2), feature(3)},
                      bound);
        }
      }
    }
  }
}

TEST(AddedNorm, GivesTheBitsOfTheTwoOperators) {
  const at::Tensor x = random({70, 40}), added = random({70, 40}, at::kFloat, 2), weight = random({40}, at::kFloat, 3);
  const auto [sum, out] = add_rms_norm(x, added, weight, kLayerEps);
  EXPECT_TRUE(at::equal(sum, x + added));
  EXPECT_TRUE(at::equal(out, rms_norm(x + added, weight, kLayerEps)));
  const auto [other, normed] = add_layer_norm(x, added, weight, weight, kLayerEps, at::kBFloat16);
  EXPECT_TRUE(at::equal(normed, layer_norm(other, weight, weight, kLayerEps, at::kBFloat16)));
}

}  // namespace
}  // namespace tessera::kernels
