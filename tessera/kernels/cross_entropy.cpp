#include "tessera/kernels/cross_entropy.h"

#include <cmath>

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "tessera/core/autograd_function.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/half.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"

// Kept for backward is a number a token, the log-sum-exp, from which the softmax is computed once more: probabilities would be as large as the logits.

namespace tessera::kernels {

namespace {

using Forward = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, double, double);
using Backward = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, double, double);

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& logits, const at::Tensor& labels, double label_smoothing, double z_loss) {
  const auto options = logits.options().dtype(at::kFloat);
  const at::Tensor total = at::empty({}, options);
  const at::Tensor lse = at::empty({logits.size(0)}, options);
  const at::Tensor loss = at::empty({logits.size(0)}, options);
  const auto& routines = routines_for(logits).cross_entropy;
  routines.check_labels(labels, logits.size(1));
  routines.forward(loss, lse, logits.contiguous(), labels, loss_terms({label_smoothing, z_loss}, logits.size(1)));
  routines.sum(total, loss);
  return {total, lse};
}

at::Tensor backward(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& lse, double label_smoothing, double z_loss) {
  const at::Tensor d_logits = at::empty(logits.sizes(), logits.options());
  routines_for(logits).cross_entropy.backward(d_logits, grad, logits.contiguous(), labels, lse, loss_terms({label_smoothing, z_loss}, logits.size(1)));
  return d_logits;
}

struct CrossEntropyFunction : AutogradFunction<CrossEntropyFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits, const at::Tensor& labels, double label_smoothing,
                            double z_loss) {
    static const auto op = find_operator<Forward>("tessera::cross_entropy_sum");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [total, lse] = op.call(logits, labels, label_smoothing, z_loss);
    context->save_for_backward({logits, labels, lse});
    context->saved_data["label_smoothing"] = label_smoothing;
    context->saved_data["z_loss"] = z_loss;
    return total;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = find_operator<Backward>("tessera::cross_entropy_sum_backward");
    const auto saved = context->get_saved_variables();
    const double label_smoothing = context->saved_data["label_smoothing"].toDouble(), z_loss = context->saved_data["z_loss"].toDouble();
    const at::Tensor d_logits = op.call(grads[0], saved[0], saved[1], saved[2], label_smoothing, z_loss);
    return first_derivative("cross_entropy_sum", grads, {d_logits, at::Tensor(), at::Tensor(), at::Tensor()});
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("cross_entropy_sum(Tensor logits, Tensor labels, float label_smoothing, float z_loss) -> (Tensor loss, Tensor lse)");
  m.def("cross_entropy_sum_backward(Tensor grad, Tensor logits, Tensor labels, Tensor lse, float label_smoothing, float z_loss) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("cross_entropy_sum", forward);
  m.impl("cross_entropy_sum_backward", backward);
}

LossTerms loss_terms(const CrossEntropyOptions& options, int64_t entries) {
  const auto& [smoothing, z_loss] = options;
  require(smoothing >= 0 && smoothing <= 1, "label_smoothing = ", smoothing, ": it is a share of the target and must be from 0 to 1");
  require(z_loss >= 0 && std::isfinite(z_loss), "z_loss = ", z_loss, ": it is a weight and must be 0 or more");
  return {.label = 1 - smoothing, .each = smoothing / static_cast<double>(entries), .z = z_loss};
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels, const CrossEntropyOptions& options) {
  require(logits.dim() == 2 && labels.dim() == 1 && labels.size(0) == logits.size(0) && labels.scalar_type() == at::kLong && logits.size(1) > 0,
          "cross_entropy_sum: logits ", logits.sizes(), " must be [tokens, vocabulary] and labels ", labels.sizes(), " int64 [tokens]");
  if (is_emulated_half(logits)) return cross_entropy_sum(logits.to(at::kFloat), labels, options);
  if (takes_reference(Kernel::cross_entropy)) return reference::cross_entropy_sum(logits, labels, options);
  require_supported("cross_entropy_sum", logits);
  return CrossEntropyFunction::apply(logits, labels.contiguous(), options.label_smoothing, options.z_loss);
}

}  // namespace tessera::kernels
