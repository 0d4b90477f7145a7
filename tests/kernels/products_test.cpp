// bf16 where the processor has no products of it: operands widened, fp32 kernels, one rounding. Forced by a guard, so that every machine tests both ways.
#include "tessera/kernels/products.h"

#include "tessera/core/error.h"
#include "tessera/kernels/attention.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/memory/memory.h"
#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr auto bf16 = at::kBFloat16;

Operator product(bool bias) {
  return [bias](const std::vector<at::Tensor>& in) { return kernels::linear(in[0], in[1], bias ? in[2] : at::Tensor()); };
}

TEST(CpuFormats, FollowTheProcessorTheLibrariesLimitAndOurSwitch) {
  const auto bf16_of = [](std::string_view instructions, std::string_view isa, std::string_view forced = "") {
    return CpuFormats::from(instructions, isa, forced).bf16;
  };
  EXPECT_TRUE(bf16_of("avx512_bf16", ""));
  EXPECT_TRUE(bf16_of("amx_bf16, avx512_bf16", "AVX512_CORE_AMX"));
  EXPECT_TRUE(bf16_of("avx512_bf16", "AVX512_CORE_BF16"));
  EXPECT_TRUE(bf16_of("avx512_bf16", "all"));
  EXPECT_FALSE(bf16_of("", ""));
  for (const char* isa : {"AVX512_CORE", "avx512_core_vnni", "AVX2", "SSE41", "AVX2_VNNI_2"}) EXPECT_FALSE(bf16_of("avx512_bf16", isa)) << isa;
  EXPECT_FALSE(bf16_of("avx512_bf16", "", "fp32"));
  EXPECT_TRUE(bf16_of("", "AVX2", "bf16"));
  EXPECT_EQ(CpuFormats::from("amx_bf16, avx512_bf16", "", "").reason, "amx_bf16, avx512_bf16");
  EXPECT_EQ(CpuFormats::from("avx512_bf16", "AVX512_CORE", "").reason, "ONEDNN_MAX_CPU_ISA = AVX512_CORE");
  EXPECT_EQ(CpuFormats::from("", "", "").reason, "it has neither avx512_bf16 nor amx_bf16");
  EXPECT_EQ(CpuFormats::from("", "", "fp32").reason, "TESSERA_CPU_FORMATS = fp32");
  EXPECT_THAT(message_of<ConfigError>([&] { bf16_of("", "", "fp16"); }), StartsWith("TESSERA_CPU_FORMATS = fp16: expected fp32 "));
}

TEST(CpuFormats, AGuardSpeaksForItsThreadAndForADryRun) {
  const bool machine = multiplies_bf16(at::kCPU);
  for (const bool native : {false, true}) {
    const Bf16ProductsGuard guard(native);
    for (const auto device : {at::kCPU, at::kMeta}) {
      EXPECT_EQ(multiplies_bf16(device), native);
      EXPECT_EQ(is_widened(bf16, device), !native);
      EXPECT_TRUE(is_widened(at::kHalf, device)) << "no CPU has those products";
      EXPECT_FALSE(is_widened(at::kFloat, device));
    }
    EXPECT_FALSE(is_widened(bf16, at::Device(at::kCUDA, 0)));
  }
  EXPECT_EQ(multiplies_bf16(at::kCPU), machine);
}

/// Exact operands, fp32 sums, one rounding: the fp32 operator's results and gradients, each rounded, bit for bit.
TEST(WidenedProducts, RoundOperandsAndResultsAlone) {
  const Bf16ProductsGuard widened(/*native=*/false);
  for (const auto dtype : {bf16, at::kHalf}) {
    for (const bool bias : {false, true}) {
      for (const auto& shape : {std::vector<int64_t>{33}, {7, 33}, {2, 5, 33}, {0, 33}}) {
        std::vector<at::Tensor> narrow, wide;
        for (const auto& input : {random(shape), random({19, 33}, at::kFloat, 2), random({19}, at::kFloat, 3)}) {
          narrow.push_back(input.to(dtype));
          wide.push_back(narrow.back().to(at::kFloat));
        }
        auto sizes = shape;
        sizes.back() = 19;
        const at::Tensor cotangent = random(sizes, dtype, 9);
        const auto got = evaluate(product(bias), narrow, cotangent), want = evaluate(product(bias), wide, cotangent.to(at::kFloat));
        EXPECT_EQ(got.result.scalar_type(), dtype);
        EXPECT_TRUE(at::equal(got.result, want.result.to(dtype)));
        for (size_t i = 0; i < (bias ? 3 : 2); ++i)
          EXPECT_TRUE(at::equal(got.gradients[i], want.gradients[i].to(dtype))) << "gradient " << i << " of " << shape;
      }
    }
  }
}

TEST(WidenedProducts, KeepWhatTheProcessorsOwnWouldKeep) {
  const auto kept = [](bool native, const Operator& f, const std::vector<at::Tensor>& inputs) {
    const Bf16ProductsGuard guard(native);
    std::vector<at::Tensor> leaves;
    for (const auto& input : inputs) leaves.push_back(input.detach().requires_grad_(true));
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    const at::Tensor result = f(leaves);
    return tracker.current();
  };
  const auto x = random({2, 40, 64}, bf16), weight = random({96, 64}, bf16), bias = random({96}, bf16);
  EXPECT_EQ(kept(false, product(true), {x, weight, bias}), kept(true, product(true), {x, weight, bias}));
  const auto q = random({2, 33, 4, 16}, bf16).transpose(1, 2);
  const auto attention = [](const auto& in) { return flash_attention(in[0], in[0], in[0], /*causal=*/true); };
  EXPECT_EQ(kept(false, attention, {q}), kept(true, attention, {q}));
}

TEST(WidenedProducts, OfOneGradientAloneMakeNoOther) {
  const Bf16ProductsGuard widened(/*native=*/false);
  const at::Tensor x = random({4, 8}, bf16), weight = random({3, 8}, bf16, 2).requires_grad_(true);
  kernels::linear(x, weight).sum().backward();
  EXPECT_FALSE(x.grad().defined());
  EXPECT_TRUE(at::equal(weight.grad(), x.to(at::kFloat).sum(0).to(bf16).expand({3, 8})));
}

TEST(WidenedProducts, OfAttentionAreThoseOfFp32RoundedOnce) {
  const Bf16ProductsGuard widened(/*native=*/false);
  for (const int64_t length : {1, 5, 33, 300}) {
    std::vector<at::Tensor> narrow, wide;
    for (const auto& input : {random({2, 4, length, 8}), random({2, 2, length, 8}, at::kFloat, 2), random({2, 2, length, 8}, at::kFloat, 3)}) {
      narrow.push_back(input.to(bf16));
      wide.push_back(narrow.back().to(at::kFloat));
    }
    const auto f = [](const auto& x) { return flash_attention(x[0], x[1], x[2], /*causal=*/true); };
    const at::Tensor cotangent = random({2, 4, length, 8}, bf16, 9);
    const auto got = evaluate(f, narrow, cotangent), want = evaluate(f, wide, cotangent.to(at::kFloat));
    EXPECT_TRUE(at::equal(got.result, want.result.to(bf16)));
    EXPECT_EQ(got.result.strides(), want.result.strides());
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(got.gradients[i].scalar_type(), bf16);
      expect_close(got.gradients[i], want.gradients[i], tolerance(bf16), "gradient " + std::to_string(i));  // the output was rounded before they were made
    }
    const auto forward = flash_attention_forward(narrow[0], narrow[1], narrow[2], /*causal=*/true);
    EXPECT_TRUE(at::equal(forward.output, got.result));
    const auto gradients = flash_attention_backward(cotangent, narrow[0], narrow[1], narrow[2], forward, /*causal=*/true);
    EXPECT_TRUE(at::equal(std::get<2>(gradients), got.gradients[2]));
  }
}

TEST(WidenedProducts, OfTheLossTakeRoundedOperandsAndRoundNothingElse) {
  const Bf16ProductsGuard widened(/*native=*/false);
  const at::Tensor labels = at::arange(50).remainder(97);
  for (const auto dtype : {at::kFloat, bf16}) {
    const at::Tensor hidden = random({50, 24}, dtype), weight = random({97, 24}, dtype, 2);
    const auto loss = [&](at::ScalarType compute) {
      return [&labels, compute](const auto& in) { return linear_cross_entropy(in[0], in[1], labels, {.chunk_tokens = 16, .compute_dtype = compute}); };
    };
    const auto got = evaluate(loss(bf16), {hidden, weight}, at::ones({}));
    const auto want = evaluate(loss(at::kFloat), {hidden.to(bf16).to(at::kFloat), weight.to(bf16).to(at::kFloat)}, at::ones({}));
    EXPECT_TRUE(at::equal(got.result, want.result));
    for (const size_t i : {0, 1}) EXPECT_TRUE(at::equal(got.gradients[i], want.gradients[i].to(dtype))) << i;
    const Bf16ProductsGuard native(/*native=*/true);
    const auto emulated = evaluate(loss(bf16), {hidden, weight}, at::ones({}));
    expect_close(got.result, emulated.result, 1e-2, "the loss");
    for (const size_t i : {0, 1}) expect_close(got.gradients[i], emulated.gradients[i], 2e-2, "gradient");
  }
}

}  // namespace
}  // namespace tessera::kernels
