#include "tessera/kernels/lion.h"

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"

// Compiled without contraction of products and sums (CMakeLists.txt): an element's bits must not depend on whether it falls into a vectorized loop's body.
namespace tessera::kernels {

namespace {

void on_cpu(float* p, const float* g, float* m, int64_t count, const LionStep& step) {
  const auto lr = static_cast<float>(step.lr), kept = static_cast<float>(1 - step.lr * step.weight_decay);
  const auto beta1 = static_cast<float>(step.beta1), rest1 = static_cast<float>(1 - step.beta1);
  const auto beta2 = static_cast<float>(step.beta2), rest2 = static_cast<float>(1 - step.beta2);
  parallel_for(0, count, 1 << 14, [=](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const float direction = beta1 * m[i] + rest1 * g[i];
      const float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction;  // NaN stays
      p[i] = kept * p[i] - lr * sign;
      m[i] = beta2 * m[i] + rest2 * g[i];
    }
  });
}

}  // namespace

void lion_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const LionStep& step) {
  invariant(parameter.strides() == gradient.strides() && parameter.strides() == exp_avg.strides(), "lion: parameter, gradient and average lie differently");
  if (parameter.is_meta()) return;
  const auto is_plain = [](const at::Tensor& tensor) { return tensor.is_cpu() && tensor.scalar_type() == at::kFloat; };
  if (is_plain(parameter) && is_plain(gradient) && is_plain(exp_avg)) {
    return on_cpu(parameter.data_ptr<float>(), gradient.const_data_ptr<float>(), exp_avg.data_ptr<float>(), parameter.numel(), step);
  }
  const at::Tensor direction = exp_avg.mul(step.beta1).add_(gradient, 1 - step.beta1).sign_();
  parameter.mul_(1 - step.lr * step.weight_decay).sub_(direction, step.lr);
  exp_avg.mul_(step.beta2).add_(gradient, 1 - step.beta2);
}

}  // namespace tessera::kernels
