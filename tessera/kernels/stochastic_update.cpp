#include "tessera/kernels/stochastic_update.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include <c10/util/BFloat16.h>

#include "tessera/core/error.h"
#include "tessera/core/parallel.h"

// Compiled without contraction of products and sums (CMakeLists.txt): an element's bits must not depend on whether it falls into a vectorized loop's body.
namespace tessera::kernels {

namespace {

constexpr int64_t kBlock = 512;  // elements whose random words are drawn together
constexpr int64_t kGrain = 1 << 14;

float to_float(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }
float to_float(float value) { return value; }

void keep(uint16_t& place, float value, uint32_t random) { place = stochastic_bf16(value, random); }
void keep(float& place, float value, uint32_t /*random*/) { place = value; }

/// Where a run's elements lie in a tensor.
template <class T>
T* at_run(const at::Tensor& tensor, const ElementRun& run) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) + run.offset : nullptr;
}

void check(const char* name, const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& state) {
  require(parameter.is_cpu() || parameter.is_meta(), name, ": stochastic rounding has no kernel for ", parameter.device(),
          "; set precision.master = fp32 and optim.state_dtype = fp32");
  const auto fits = [&](const at::Tensor& tensor) { return !tensor.defined() || (tensor.scalar_type() == at::kBFloat16 && tensor.is_contiguous()); };
  invariant(fits(state), name, ": the state must be bf16 and contiguous");
  invariant(parameter.is_contiguous() && (parameter.scalar_type() == at::kBFloat16 || parameter.scalar_type() == at::kFloat), name,
            ": the parameter must be bf16 or fp32 and contiguous");
  invariant(gradient.is_contiguous() && (gradient.scalar_type() == at::kBFloat16 || gradient.scalar_type() == at::kFloat), name,
            ": gradients must be bf16 or fp32 and contiguous");
}

/// Calls update(k, random) for k in [0, count), with two random words an element.
template <class Update>
void for_each_element(const ElementRun& run, const CounterRng& rng, const Update& update) {
  parallel_for(0, run.count, kGrain, [&](int64_t first, int64_t last) {
    std::array<uint32_t, 2 * kBlock> random;
    for (int64_t begin = first; begin < last; begin += kBlock) {
      const int64_t size = std::min(kBlock, last - begin);
      rng.fill_bits(random.data(), 2 * (run.first_index + static_cast<uint64_t>(begin)), 2 * size);
      for (int64_t k = 0; k < size; ++k) update(begin + k, random[2 * k], random[2 * k + 1]);
    }
  });
}

template <class Weight, class Gradient>
void adamw(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const ElementRun& run,
           const StochasticAdamW& o, const CounterRng& rng) {
  Weight* const p = at_run<Weight>(parameter, run);
  uint16_t* const m = at_run<uint16_t>(exp_avg, run);
  uint16_t* const v = at_run<uint16_t>(exp_avg_sq, run);
  const Gradient* const g = at_run<const Gradient>(gradient, run);
  const auto correction = [&](double beta) { return 1 - std::pow(beta, static_cast<double>(o.step)); };
  const auto beta1 = static_cast<float>(o.beta1), beta2 = static_cast<float>(o.beta2), eps = static_cast<float>(o.eps);
  const auto rest1 = static_cast<float>(1 - o.beta1), rest2 = static_cast<float>(1 - o.beta2);
  const auto kept = static_cast<float>(1 - o.lr * o.weight_decay), step_size = static_cast<float>(o.lr / correction(o.beta1));
  const auto root = static_cast<float>(std::sqrt(correction(o.beta2)));
  for_each_element(run, rng, [&](int64_t k, uint32_t first, uint32_t second) {
    const float gradient_k = to_float(g[k]);
    const float average = beta1 * to_float(m[k]) + rest1 * gradient_k;
    const float square = beta2 * to_float(v[k]) + rest2 * gradient_k * gradient_k;
    const float weight = kept * to_float(p[k]) - step_size * average / (std::sqrt(square) / root + eps);
    keep(p[k], weight, first);
    m[k] = stochastic_bf16(average, first >> 16);
    v[k] = stochastic_bf16(square, second);
  });
}

template <class Weight, class Gradient>
void lion(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const ElementRun& run, const LionStep& o, const CounterRng& rng) {
  Weight* const p = at_run<Weight>(parameter, run);
  uint16_t* const m = at_run<uint16_t>(exp_avg, run);
  const Gradient* const g = at_run<const Gradient>(gradient, run);
  const auto lr = static_cast<float>(o.lr), kept = static_cast<float>(1 - o.lr * o.weight_decay);
  const auto beta1 = static_cast<float>(o.beta1), rest1 = static_cast<float>(1 - o.beta1);
  const auto beta2 = static_cast<float>(o.beta2), rest2 = static_cast<float>(1 - o.beta2);
  for_each_element(run, rng, [&](int64_t k, uint32_t first, uint32_t) {
    const float gradient_k = to_float(g[k]), average = to_float(m[k]);
    const float direction = beta1 * average + rest1 * gradient_k;
    const float sign = direction > 0 ? 1.0f : direction < 0 ? -1.0f : direction;  // NaN stays
    keep(p[k], kept * to_float(p[k]) - lr * sign, first);
    m[k] = stochastic_bf16(beta2 * average + rest2 * gradient_k, first >> 16);
  });
}

template <class Weight, class Gradient>
void sgd(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& momentum_buffer, const ElementRun& run, const StochasticSgd& o,
         const CounterRng& rng) {
  Weight* const p = at_run<Weight>(parameter, run);
  uint16_t* const b = at_run<uint16_t>(momentum_buffer, run);
  const Gradient* const g = at_run<const Gradient>(gradient, run);
  const auto lr = static_cast<float>(o.lr), momentum = static_cast<float>(o.momentum), decay = static_cast<float>(o.weight_decay);
  for_each_element(run, rng, [&](int64_t k, uint32_t first, uint32_t) {
    float direction = to_float(g[k]) + decay * to_float(p[k]);
    if (b != nullptr) {
      direction += momentum * to_float(b[k]);
      b[k] = stochastic_bf16(direction, first >> 16);
    }
    keep(p[k], to_float(p[k]) - lr * direction, first);
  });
}

/// Calls with a value of each of the two types.
template <class Run>
void with_types(const at::Tensor& parameter, const at::Tensor& gradient, const Run& run) {
  const bool wide = parameter.scalar_type() == at::kFloat;
  if (gradient.scalar_type() == at::kFloat) {
    wide ? run(float(), float()) : run(uint16_t(), float());
  } else {
    wide ? run(float(), uint16_t()) : run(uint16_t(), uint16_t());
  }
}

}  // namespace

uint16_t stochastic_bf16(float value, uint32_t random) {
  const auto bits = std::bit_cast<uint32_t>(value);
  constexpr uint32_t exponent = 0x7f800000;
  if ((bits & exponent) == exponent) return c10::BFloat16(value).x;
  return static_cast<uint16_t>((bits + (random & 0xffff)) >> 16);
}

void stochastic_adamw_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const ElementRun& run,
                       const StochasticAdamW& options, const CounterRng& rng) {
  check("adamw", parameter, gradient, exp_avg);
  if (parameter.is_meta()) return;
  with_types(parameter, gradient, [&](auto weight, auto of_gradient) {
    adamw<decltype(weight), decltype(of_gradient)>(parameter, gradient, exp_avg, exp_avg_sq, run, options, rng);
  });
}

void stochastic_lion_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const ElementRun& run, const LionStep& options,
                      const CounterRng& rng) {
  check("lion", parameter, gradient, exp_avg);
  if (parameter.is_meta()) return;
  with_types(parameter, gradient,
             [&](auto weight, auto of_gradient) { lion<decltype(weight), decltype(of_gradient)>(parameter, gradient, exp_avg, run, options, rng); });
}

void stochastic_sgd_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& momentum_buffer, const ElementRun& run,
                     const StochasticSgd& options, const CounterRng& rng) {
  check("sgd", parameter, gradient, momentum_buffer);
  if (parameter.is_meta()) return;
  with_types(parameter, gradient,
             [&](auto weight, auto of_gradient) { sgd<decltype(weight), decltype(of_gradient)>(parameter, gradient, momentum_buffer, run, options, rng); });
}

}  // namespace tessera::kernels
