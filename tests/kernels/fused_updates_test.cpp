#include "tessera/kernels/fused_updates.h"

#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>

#include "tests/kernels/support.h"

namespace tessera::kernels {
namespace {

using namespace tessera::testing_support;

struct Updated {
  Updated(int64_t n, at::ScalarType dtype)
      : parameter(random({n}).to(dtype)),
        gradient(random({n}, at::kFloat, 2).to(dtype)),
        average(random({n}, at::kFloat, 3).to(dtype)),
        square(random({n}, at::kFloat, 4).square().to(dtype)) {}
  Updated part(int64_t first, int64_t count) const {
    Updated some = *this;
    for (at::Tensor* tensor : {&some.parameter, &some.gradient, &some.average, &some.square}) *tensor = tensor->narrow(0, first, count);
    return some;
  }
  std::vector<at::Tensor> all() const { return {parameter, average, square}; }
  at::Tensor parameter, gradient, average, square;
};

using UpdateOf = std::function<void(const Updated&)>;

constexpr double kRate = 0.01, kBeta1 = 0.8, kBeta2 = 0.95, kEps = 1e-6, kDecay = 0.3, kMomentum = 0.9;

void adamw(const Updated& t, const std::optional<at::Tensor>& skip = {}) {
  at::_fused_adamw_({t.parameter}, {t.gradient}, {t.average}, {t.square}, {}, {at::full({}, 3.0f)}, kRate, kBeta1, kBeta2, kDecay, kEps, /*amsgrad=*/false,
                    /*maximize=*/false, {}, skip);
}

void sgd_of(const Updated& t, double momentum, const std::optional<at::Tensor>& skip = {}) {
  std::vector<at::Tensor> buffers;
  if (momentum != 0) buffers.push_back(t.average);
  at::_fused_sgd_({t.parameter}, {t.gradient}, buffers, kDecay, momentum, kRate, /*dampening=*/0, /*nesterov=*/false, /*maximize=*/false,
                  /*is_first_step=*/false, {}, skip);
}

std::vector<std::pair<UpdateOf, std::vector<at::ScalarType>>> updates() {
  return {{[](const Updated& t) { adamw(t); }, {at::kFloat, at::kDouble}},
          {[](const Updated& t) { sgd_of(t, 0); }, {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}},
          {[](const Updated& t) { sgd_of(t, kMomentum); }, {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}}};
}

TEST(FusedUpdates, BitsOfAnElementDoNotDependOnWhereAPartBegins) {
  const UpdatesByElement here;
  for (const auto& [update, dtypes] : updates()) {
    for (const auto dtype : dtypes) {
      const Updated whole(50000, dtype), parts(50000, dtype);
      update(whole);
      for (const auto& [first, count] : {std::pair<int64_t, int64_t>{0, 7}, {7, 25}, {32, 20001}, {20033, 29967}}) update(parts.part(first, count));
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(whole.all()[i], parts.all()[i])) << dtype << ", tensor " << i;
    }
  }
}

/// By the formulas, in fp64. In 16 bits libtorch's momentum is not.
TEST(FusedUpdates, AreTheFormulas) {
  const UpdatesByElement here;
  for (const double momentum : {0.0, kMomentum}) {
    for (const auto& [dtype, bound] :
         std::vector<std::pair<at::ScalarType, double>>{{at::kDouble, 1e-15}, {at::kFloat, 2e-7}, {at::kBFloat16, 8e-3}, {at::kHalf, 1e-3}}) {
      const Updated t(333, dtype);
      const at::Tensor p = t.parameter.to(at::kDouble, false, /*copy=*/true),
                       buffer = momentum * t.average.to(at::kDouble) + t.gradient.to(at::kDouble) + kDecay * p;
      sgd_of(t, momentum);
      expect_close(t.parameter.to(at::kDouble), p - kRate * buffer, bound, "parameter");
      if (momentum != 0) expect_close(t.average.to(at::kDouble), buffer, bound, "buffer");
    }
  }
  for (const auto& [dtype, bound] : std::vector<std::pair<at::ScalarType, double>>{{at::kDouble, 1e-14}, {at::kFloat, 1e-6}}) {
    const Updated t(333, dtype);
    const at::Tensor p = t.parameter.to(at::kDouble, false, /*copy=*/true), g = t.gradient.to(at::kDouble),
                     m = kBeta1 * t.average.to(at::kDouble) + (1 - kBeta1) * g, v = kBeta2 * t.square.to(at::kDouble) + (1 - kBeta2) * g * g;
    adamw(t);
    const at::Tensor denominator = (v / (1 - std::pow(kBeta2, 3))).sqrt() + kEps;
    expect_close(t.average.to(at::kDouble), m, bound, "average");
    expect_close(t.square.to(at::kDouble), v, bound, "square");
    expect_close(t.parameter.to(at::kDouble), p * (1 - kRate * kDecay) - kRate * m / (1 - std::pow(kBeta1, 3)) / denominator, bound, "parameter");
  }
}

TEST(FusedUpdates, AreSkippedByWhatWasNotFinite) {
  const UpdatesByElement here;
  for (const float skip : {0.0f, 1.0f}) {
    const Updated one(100, at::kFloat), two(100, at::kFloat), before(100, at::kFloat);
    adamw(one, at::full({}, skip));
    sgd_of(two, kMomentum, at::full({}, skip));
    EXPECT_EQ(at::equal(one.parameter, before.parameter), skip == 1);
    EXPECT_EQ(at::equal(two.parameter, before.parameter), skip == 1);
    EXPECT_EQ(at::equal(two.average, before.average), skip == 1);
  }
}

/// What ours do not do, or nobody has asked ours for.
TEST(FusedUpdates, AreLibtorchsOtherwise) {
  const auto nesterov = [](const Updated& t) {
    at::_fused_sgd_({t.parameter}, {t.gradient}, {t.average}, kDecay, kMomentum, kRate, 0, /*nesterov=*/true, false, false);
  };
  const Updated asked(1000, at::kFloat), plain(1000, at::kFloat);
  nesterov(plain);
  {
    const UpdatesByElement here;
    nesterov(asked);
  }
  EXPECT_TRUE(at::equal(asked.parameter, plain.parameter));
}

}  // namespace
}  // namespace tessera::kernels
