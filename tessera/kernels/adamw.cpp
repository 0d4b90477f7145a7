#include "tessera/kernels/adamw.h"

#include <cmath>

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"
#include "tessera/kernels/cpu/loops.h"

namespace tessera::kernels {

namespace {

bool has_16_bits(at::ScalarType type) { return type == at::kBFloat16 || type == at::kHalf; }

cpu::Type number_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kFloat ? cpu::Type::Float : tensor.scalar_type() == at::kHalf ? cpu::Type::Half : cpu::Type::BFloat16;
}

}  // namespace

void adamw_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const AdamWStep& step,
            const at::Tensor& copy) {
  const auto lies_alike = [&](const at::Tensor& tensor) { return tensor.strides() == parameter.strides() && tensor.sizes() == parameter.sizes(); };
  invariant(lies_alike(gradient) && lies_alike(exp_avg) && lies_alike(exp_avg_sq) && (!copy.defined() || lies_alike(copy)) &&
                parameter.is_non_overlapping_and_dense(),
            "adamw: parameter, gradient, averages and copy lie differently, or with gaps");
  invariant(parameter.scalar_type() == at::kFloat && exp_avg.scalar_type() == at::kFloat && exp_avg_sq.scalar_type() == at::kFloat &&
                (gradient.scalar_type() == at::kFloat || has_16_bits(gradient.scalar_type())) && (!copy.defined() || has_16_bits(copy.scalar_type())),
            "adamw: parameter and averages must be fp32, the gradient fp32, bf16 or fp16, a copy bf16 or fp16");
  if (parameter.is_meta()) return;
  invariant(parameter.is_cpu(), "adamw: a kernel of the host was given a parameter on ", parameter.device());
  const auto correction = [&](double beta) { return 1 - std::pow(beta, static_cast<double>(step.step)); };
  const cpu::AdamW args{.parameter = parameter.data_ptr<float>(),
                        .gradient = {gradient.const_data_ptr(), number_type(gradient)},
                        .exp_avg = exp_avg.data_ptr<float>(),
                        .exp_avg_sq = exp_avg_sq.data_ptr<float>(),
                        .copy = copy.defined() ? cpu::Output{copy.data_ptr(), number_type(copy)} : cpu::Output{},
                        .scale = static_cast<float>(step.gradient_scale),
                        .beta1 = static_cast<float>(step.beta1),
                        .beta2 = static_cast<float>(step.beta2),
                        .rest1 = static_cast<float>(1 - step.beta1),
                        .rest2 = static_cast<float>(1 - step.beta2),
                        .eps = static_cast<float>(step.eps),
                        .kept = static_cast<float>(1 - step.lr * step.weight_decay),
                        .step_size = static_cast<float>(step.lr / correction(step.beta1)),
                        .inverse_root = static_cast<float>(1 / std::sqrt(correction(step.beta2)))};
  parallel_for(0, parameter.numel(), 1 << 14, [&](int64_t begin, int64_t end) { cpu::loops().adamw(args, begin, end); });
}

}  // namespace tessera::kernels
