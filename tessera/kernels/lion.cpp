#include "tessera/kernels/lion.h"

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/kernels/pieces.h"
#include "tessera/memory/on_host.h"

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

/// The directions take memory of their own. What is a rank's slice is taken by detach(): a view of the parameter itself may be a forward's (fully_shard).
void by_operators(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const LionStep& step) {
  constexpr int64_t kPiece = int64_t{1} << 25;
  in_pieces(parameter.numel(), kPiece, parameter.is_meta(), [&](int64_t begin, int64_t count) {
    const auto piece_of = [&](const at::Tensor& all) { return all.as_strided({all.numel()}, {1}).narrow(0, begin, count); };
    const at::Tensor p = piece_of(parameter.detach()), g = piece_of(gradient), m = piece_of(exp_avg);
    const at::Tensor direction = m.mul(step.beta1).add_(g, 1 - step.beta1).sign_();
    p.mul_(1 - step.lr * step.weight_decay).sub_(direction, step.lr);
    m.mul_(step.beta2).add_(g, 1 - step.beta2);
  });
}

}  // namespace

void lion_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const LionStep& step) {
  invariant(parameter.strides() == gradient.strides() && parameter.strides() == exp_avg.strides(), "lion: parameter, gradient and average lie differently");
  const auto is_plain = [](const at::Tensor& tensor) { return is_on_host(tensor) && tensor.scalar_type() == at::kFloat; };
  if (!is_plain(parameter) || !is_plain(gradient) || !is_plain(exp_avg)) return by_operators(parameter, gradient, exp_avg, step);
  if (parameter.is_meta()) return;
  on_cpu(parameter.data_ptr<float>(), gradient.const_data_ptr<float>(), exp_avg.data_ptr<float>(), parameter.numel(), step);
}

}  // namespace tessera::kernels
