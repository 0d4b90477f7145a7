#include "tessera/kernels/cross_entropy.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "tessera/kernels/choice.h"
#include "tessera/kernels/half.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"

namespace tessera::kernels {

namespace {

using Forward = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&);
using Backward = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&);

std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& logits, const at::Tensor& labels) {
  const auto options = logits.options().dtype(at::kFloat);
  const at::Tensor total = at::empty({}, options);
  const at::Tensor lse = at::empty({logits.size(0)}, options);
  const at::Tensor loss = at::empty({logits.size(0)}, options);
  const auto& routines = routines_for(logits).cross_entropy;
  routines.check_labels(labels, logits.size(1));
  routines.forward(loss, lse, logits.contiguous(), labels);
  routines.sum(total, loss);
  return {total, lse};
}

at::Tensor backward(const at::Tensor& grad, const at::Tensor& logits, const at::Tensor& labels, const at::Tensor& lse) {
  const at::Tensor d_logits = at::empty(logits.sizes(), logits.options());
  routines_for(logits).cross_entropy.backward(d_logits, grad, logits.contiguous(), labels, lse);
  return d_logits;
}

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& logits, const at::Tensor& labels) {
    static const auto op = find_operator<Forward>("tessera::cross_entropy_sum");
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [total, lse] = op.call(logits, labels);
    context->save_for_backward({logits, labels, lse});
    return total;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = find_operator<Backward>("tessera::cross_entropy_sum_backward");
    const auto saved = context->get_saved_variables();
    return {op.call(grads[0], saved[0], saved[1], saved[2]), at::Tensor()};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("cross_entropy_sum(Tensor logits, Tensor labels) -> (Tensor loss, Tensor lse)");
  m.def("cross_entropy_sum_backward(Tensor grad, Tensor logits, Tensor labels, Tensor lse) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("cross_entropy_sum", forward);
  m.impl("cross_entropy_sum_backward", backward);
}

at::Tensor cross_entropy_sum(const at::Tensor& logits, const at::Tensor& labels) {
  require(logits.dim() == 2 && labels.dim() == 1 && labels.size(0) == logits.size(0) && labels.scalar_type() == at::kLong && logits.size(1) > 0,
          "cross_entropy_sum: logits ", logits.sizes(), " must be [tokens, vocabulary] and labels ", labels.sizes(), " int64 [tokens]");
  if (is_emulated_half(logits)) return cross_entropy_sum(logits.to(at::kFloat), labels);
  if (kernel_choice() == KernelChoice::Reference) return reference::cross_entropy_sum(logits, labels);
  require_supported("cross_entropy_sum", logits);
  return CrossEntropyFunction::apply(logits, labels.contiguous());
}

}  // namespace tessera::kernels
