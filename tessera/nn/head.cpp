#include "tessera/nn/head.h"

#include <cmath>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/nn/init.h>

#include "tessera/core/error.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/linear_cross_entropy.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/calls.h"
#include "tessera/nn/gradient_dispatcher.h"
#include "tessera/nn/linear.h"
#include "tessera/nn/operator_watch.h"
#include "tessera/nn/parameter.h"
#include "tessera/nn/sample_scope.h"

namespace tessera::nn {

namespace {

/// Where the fused loss may compute the weight's gradient, when it does; undefined where it has to make a tensor.
std::function<kernels::GradientPlace()> place_of_gradient(const at::Tensor& weight, at::ScalarType dtype) {
  const bool fused = !kernels::takes_reference(kernels::Kernel::linear_cross_entropy) && dtype != at::kHalf;
  if (!fused || !at::GradMode::is_enabled() || weight.scalar_type() != at::kFloat || !weight.is_contiguous()) return {};
  return [weight] { return GradientDispatcher::take_place(weight); };
}

}  // namespace

LanguageModelHeadImpl::LanguageModelHeadImpl(int64_t dim, int64_t vocab_size) {
  weight = register_parameter("weight", at::empty({vocab_size, dim}));
  const double bound = dim > 0 ? 1.0 / std::sqrt(static_cast<double>(dim)) : 0.0;
  set_init(weight, InitRule::uniform(-bound, bound));
  torch::nn::init::uniform_(weight, -bound, bound);
}

LanguageModelHeadImpl::LanguageModelHeadImpl(at::Tensor tied) {
  require(tied.dim() == 2 && tied.is_leaf(), "LanguageModelHead: what it shares must be the embedding's own weight [V, D], not a tensor of shape ",
          tied.sizes(), " made from it");
  weight = register_parameter("weight", std::move(tied));
}

at::Tensor LanguageModelHeadImpl::forward(const at::Tensor& hidden, const std::optional<at::Tensor>& labels) {
  if (bypassed(*this)) return call(*this, hidden, labels);
  const MemoryScope scope(MemoryCategory::Outputs);
  const at::Tensor used = in_use(weight);
  const auto dtype = compute_dtype().value_or(used.scalar_type());
  if (!labels) return project(cast(hidden, dtype), cast(used, dtype));
  require(labels->sizes() == hidden.sizes().slice(0, hidden.dim() - 1), "LanguageModelHead: labels of shape ", labels->sizes(),
          " do not fit hidden states of shape ", hidden.sizes());
  return kernels::linear_cross_entropy(hidden.reshape({-1, hidden.size(-1)}), used, labels->reshape({-1}),
                                       {.compute_dtype = dtype,
                                        .expected_gradient = SampleScope::current().expected_gradient,
                                        .weight_gradient = place_of_gradient(used, dtype),
                                        .in_backward = in_backward_,
                                        .loss = is_training() ? loss_ : kernels::CrossEntropyOptions{},
                                        .parts = parts_});
}

void LanguageModelHeadImpl::set_loss(const kernels::CrossEntropyOptions& loss) {
  kernels::loss_terms(loss, /*entries=*/1);
  loss_ = loss;
}

void LanguageModelHeadImpl::pretty_print(std::ostream& stream) const {
  stream << "tessera::nn::LanguageModelHead(dim=" << weight.size(1) << ", vocab_size=" << weight.size(0) << ")";
}

}  // namespace tessera::nn
