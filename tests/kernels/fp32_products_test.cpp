// fp32 products by oneDNN: the operators stay libtorch's, and what they give stays within rounding, in every layout of operands.
#include "tessera/kernels/fp32_products.h"

#include "tessera/core/error.h"
#include "tessera/memory/memory.h"
#include "tests/kernels/support.h"
#include "tests/test_device.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(CpuProducts, FollowTheProcessorTheLibrariesLimitAndOurSwitch) {
  const auto onednn = [](std::string_view maker, bool avx512, std::string_view isa = "", std::string_view forced = "") {
    return CpuProducts::from(maker, avx512, isa, forced).onednn;
  };
  EXPECT_TRUE(onednn("AuthenticAMD", true));
  EXPECT_TRUE(onednn("AuthenticAMD", true, "AVX512_CORE_BF16"));
  EXPECT_FALSE(onednn("AuthenticAMD", false));
  EXPECT_FALSE(onednn("GenuineIntel", true));
  EXPECT_FALSE(onednn("", true)) << "no x86";
  for (const char* isa : {"AVX2", "avx2_vnni_2", "SSE41", "AVX"}) EXPECT_FALSE(onednn("AuthenticAMD", true, isa)) << isa;
  EXPECT_FALSE(onednn("AuthenticAMD", true, "", "libtorch"));
  EXPECT_TRUE(onednn("GenuineIntel", true, "AVX2", "onednn"));
  EXPECT_THAT(message_of<ConfigError>([&] { onednn("AuthenticAMD", false, "", "onednn"); }), HasSubstr("libtorch lets oneDNN multiply where"));
  EXPECT_EQ(CpuProducts::from("AuthenticAMD", true, "", "").reason, "AuthenticAMD with avx512");
  EXPECT_THAT(message_of<ConfigError>([&] { onednn("", true, "", "mkl"); }), StartsWith("TESSERA_CPU_PRODUCTS = mkl: expected onednn"));
}

/// Every kind of operand that modules and their backward passes bring, at sizes above and below the one from which oneDNN is asked.
TEST(FastProducts, AreLibtorchsWithinRounding) {
  for (const int64_t rows : {7, 129, 255}) {
    for (const int64_t inner : {31, 129}) {
      const int64_t columns = 257;
      const at::Tensor left = random({rows, inner}), right = random({inner, columns}, at::kFloat, 2), sum = random({rows, columns}, at::kFloat, 3);
      const at::Tensor left_t = left.t().contiguous().t(), right_t = right.t().contiguous().t(), bias = random({columns}, at::kFloat, 4);
      const at::Tensor gaps = random({rows, 2 * inner}).slice(1, 0, 2 * inner, 2);
      const auto everything = [&] {
        std::vector<at::Tensor> results;
        for (const at::Tensor& a : {left, left_t, gaps}) {
          for (const at::Tensor& b : {right, right_t}) {
            results.push_back(at::mm(a, b));
            results.push_back(at::addmm(sum, a, b));
            results.push_back(at::addmm(bias, a, b));
            results.push_back(at::addmm(sum, a, b, /*beta=*/2, /*alpha=*/0.5));
            at::Tensor in_place = sum.clone(), narrow = at::zeros({rows, columns + 3}), part = narrow.narrow(1, 2, columns);
            at::addmm_out(in_place, in_place, a, b);
            at::mm_out(part, a, b);
            results.insert(results.end(), {in_place, narrow, at::mm(a.to(at::kDouble), b.to(at::kDouble)).to(at::kFloat)});
            results.push_back(at::linear(a.unsqueeze(0), b.t(), bias));
          }
        }
        return results;
      };
      const auto expected = everything();
      const FastProducts fast;
      const auto got = everything();
      for (size_t i = 0; i < expected.size(); ++i) expect_close(got[i], expected[i], tolerance(at::kFloat), "product " + std::to_string(i));
    }
  }
}

TEST(FastProducts, AreMadeOnlyWhereAGuardLivesAndTakeNoMoreMemory) {
  if (!testing_support::test_device().is_cpu()) GTEST_SKIP() << "a device's products are libtorch's";
  const at::Tensor x = random({255, 383}), weight = random({301, 383}, at::kFloat, 2);
  const auto product = [&] { return at::mm(x, weight.t()); };
  const at::Tensor plain = product();
  const auto peak_of = [&](bool fast) {
    const FastProducts guard(fast);
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    product();
    return tracker.peak();
  };
  EXPECT_EQ(peak_of(true), peak_of(false));
  EXPECT_TRUE(at::equal(product(), plain)) << "the guard is gone";
  const FastProducts fast;
  const at::Tensor one = product();
  EXPECT_EQ(at::equal(one, plain), !cpu_products().onednn) << "another order of sums tells that another library made it";
  EXPECT_TRUE(at::equal(product(), one));
  const int threads = at::get_num_threads();
  at::set_num_threads(2);
  EXPECT_TRUE(at::equal(product(), one)) << "the number of threads changes no bit";
  at::set_num_threads(threads);
}

TEST(FastProducts, RefuseWhatLibtorchRefuses) {
  const FastProducts fast;
  EXPECT_THROW(at::mm(random({200, 200}), random({199, 200})), c10::Error);
  EXPECT_THROW(at::mm(random({200, 200}), random({200, 200}, at::kDouble)), c10::Error);
  EXPECT_TRUE(at::equal(at::mm(random({0, 300}), random({300, 200})), at::zeros({0, 200})));
}

}  // namespace
}  // namespace tessera::kernels
