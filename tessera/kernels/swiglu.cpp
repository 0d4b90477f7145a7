#include "tessera/kernels/swiglu.h"

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

using Forward = at::Tensor(const at::Tensor&, const at::Tensor&);
using Backward = std::tuple<at::Tensor, at::Tensor>(const at::Tensor&, const at::Tensor&, const at::Tensor&);

template <Activation A>
at::Tensor forward(const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor out = at::empty(gate.sizes(), gate.options());
  if (out.numel() > 0) routines_for(gate).pointwise.swiglu(out, as_rows(gate), as_rows(up), A);
  return out;
}

template <Activation A>
std::tuple<at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& gate, const at::Tensor& up) {
  const at::Tensor d_gate = at::empty(gate.sizes(), gate.options());
  const at::Tensor d_up = at::empty(up.sizes(), up.options());
  if (d_gate.numel() > 0) routines_for(gate).pointwise.swiglu_backward(d_gate, d_up, grad.contiguous(), as_rows(gate), as_rows(up), A);
  return {d_gate, d_up};
}

constexpr const char* name_of(Activation activation) { return activation == Activation::Silu ? "swiglu" : "geglu"; }

template <Activation A>
struct GatedFunction : AutogradFunction<GatedFunction<A>> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& gate, const at::Tensor& up) {
    static const auto op = find_operator<Forward>(A == Activation::Silu ? "tessera::swiglu" : "tessera::geglu");
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({gate, up});
    return op.call(gate, up);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = find_operator<Backward>(A == Activation::Silu ? "tessera::swiglu_backward" : "tessera::geglu_backward");
    const auto saved = context->get_saved_variables();
    auto [d_gate, d_up] = op.call(grads[0], saved[0], saved[1]);
    return first_derivative(name_of(A), grads, {d_gate, d_up});
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("swiglu(Tensor gate, Tensor up) -> Tensor");
  m.def("swiglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor d_gate, Tensor d_up)");
  m.def("geglu(Tensor gate, Tensor up) -> Tensor");
  m.def("geglu_backward(Tensor grad, Tensor gate, Tensor up) -> (Tensor d_gate, Tensor d_up)");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("swiglu", forward<Activation::Silu>);
  m.impl("swiglu_backward", backward<Activation::Silu>);
  m.impl("geglu", forward<Activation::Gelu>);
  m.impl("geglu_backward", backward<Activation::Gelu>);
}

namespace {

template <Activation A>
at::Tensor gated(const at::Tensor& gate, const at::Tensor& up) {
  require(gate.dim() >= 1 && gate.sizes() == up.sizes() && gate.scalar_type() == up.scalar_type(), name_of(A), ": gate ", gate.sizes(), " ", gate.scalar_type(),
          " and up ", up.sizes(), " ", up.scalar_type(), " must have one shape and dtype");
  if (is_emulated_half(gate)) return gated<A>(gate.to(at::kFloat), up.to(at::kFloat)).to(at::kHalf);
  if (takes_reference(A == Activation::Silu ? Kernel::swiglu : Kernel::geglu))
    return A == Activation::Silu ? reference::swiglu(gate, up) : reference::geglu(gate, up);
  require_supported(name_of(A), gate);
  return GatedFunction<A>::apply(gate, up);
}

}  // namespace

at::Tensor swiglu(const at::Tensor& gate, const at::Tensor& up) { return gated<Activation::Silu>(gate, up); }
at::Tensor geglu(const at::Tensor& gate, const at::Tensor& up) { return gated<Activation::Gelu>(gate, up); }

}  // namespace tessera::kernels
