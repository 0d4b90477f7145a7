#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "tessera/core/rng.h"
#include "tessera/kernels/element_run.h"
#include "tessera/kernels/lion.h"

/// Optimizer steps with state in bf16, of weights in bf16 or fp32: each element is read, updated in fp32, and rounded stochastically: up with the probability
/// of the part that bf16 cannot hold, so that the expected value is exact and small updates are not lost, in expectation (arXiv:2010.06192). The randomness of
/// an element is a function of the generator and of the element's index in the logical tensor, so neither threads nor the way a tensor is cut over ranks show
/// in the bits.
namespace tessera::kernels {

struct StochasticAdamW {
  double lr = 0, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0;
  int64_t step = 1;  ///< updates of this parameter, this one included
};

struct StochasticSgd {
  double lr = 0, momentum = 0, weight_decay = 0;
};

/// `value` in bf16, rounded up or down by the low 16 bits of `random`. Infinities and NaN stay what they are.
uint16_t stochastic_bf16(float value, uint32_t random);

/// Updates `parameter`, bf16 or fp32, and its averages, bf16, from `gradient`, bf16 or fp32, all contiguous. A weight in fp32 is not rounded.
/// Traffic: 14 bytes an element (2 more from fp32 gradients, 4 more for fp32 weights).
/// CPU; nothing on meta; ConfigError elsewhere.
void stochastic_adamw_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const at::Tensor& exp_avg_sq, const ElementRun& run,
                       const StochasticAdamW& options, const CounterRng& rng);

/// The same for Lion (kernels/lion.h). Traffic: 10 bytes an element.
void stochastic_lion_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& exp_avg, const ElementRun& run, const LionStep& options,
                      const CounterRng& rng);

/// The same for SGD; `momentum_buffer` is undefined without momentum.
void stochastic_sgd_(const at::Tensor& parameter, const at::Tensor& gradient, const at::Tensor& momentum_buffer, const ElementRun& run,
                     const StochasticSgd& options, const CounterRng& rng);

}  // namespace tessera::kernels
