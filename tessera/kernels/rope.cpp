#include "tessera/kernels/rope.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "tessera/core/autograd_function.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/half.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"

namespace tessera::kernels {

namespace {

using Rotate = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&, double);

at::Tensor rotate(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
  const at::Tensor out = at::empty(x.sizes(), x.options());
  routines_for(x).pointwise.rope(out, x.stride(-1) == 1 ? x : x.contiguous(), cos.contiguous(), sin.contiguous(), sign);
  return out;
}

/// A rotation is orthogonal: its transpose, and so its backward pass, is the rotation by the opposite angle.
struct RopeFunction : AutogradFunction<RopeFunction> {
  static at::Tensor turn(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
    static const auto op = find_operator<Rotate>("tessera::rope");
    return op.call(x, cos, sin, sign);
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin, double sign) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({cos, sin});
    context->saved_data["sign"] = sign;
    return turn(x, cos, sin, sign);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    const auto saved = context->get_saved_variables();
    return {apply(grads[0], saved[0], saved[1], -context->saved_data["sign"].toDouble()), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) { m.def("rope(Tensor x, Tensor cos, Tensor sin, float sign) -> Tensor"); }
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) { m.impl("rope", rotate); }

at::Tensor rope(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
  require(x.dim() == 4 && x.size(3) % 2 == 0, "rope: x ", x.sizes(), " must be [batch, tokens, heads, features] with an even number of features");
  const bool per_sample = cos.dim() == 3;
  require(cos.sizes() == sin.sizes() && (cos.dim() == 2 || (per_sample && cos.size(0) == x.size(0))) && cos.size(-2) == x.size(1) &&
              cos.size(-1) == x.size(3) / 2 && cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat,
          "rope: tables ", cos.sizes(), " and ", sin.sizes(), " must be fp32 [", x.size(1), ", ", x.size(3) / 2, "], or one such table per sample, for x ",
          x.sizes());
  if (is_emulated_half(x)) return rope(x.to(at::kFloat), cos, sin).to(at::kHalf);
  if (takes_reference(Kernel::rope)) return reference::rope(x, cos, sin);
  require_supported("rope", x);
  return RopeFunction::apply(x, cos, sin, 1);
}

}  // namespace tessera::kernels
