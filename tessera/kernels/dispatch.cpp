#include "tessera/kernels/dispatch.h"

#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/sort.h>
#include <torch/library.h>

#include "tessera/core/autograd_function.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/kernels/half.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"

// Both directions of an exchange are gathers: a place knows its choice, a choice its place. So nothing is scattered, no two threads write one row, and sums
// have one order. (A scatter-add of the experts' outputs would need atomics, or give other bits with other threads.)

namespace tessera::kernels {

namespace {

using Choose = at::Tensor(const at::Tensor&, int64_t);
using Plan = std::tuple<at::Tensor, at::Tensor, at::Tensor>(const at::Tensor&, int64_t, int64_t, int64_t);
using Gather = at::Tensor(const at::Tensor&, const at::Tensor&, int64_t, const std::optional<at::Tensor>&);
using Combine = at::Tensor(const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&);
using Weigh = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&);

at::Tensor choose(const at::Tensor& scores, int64_t k) {
  const at::Tensor chosen = at::empty({scores.size(0), k}, scores.options().dtype(at::kLong));
  if (chosen.numel() > 0) routines_for(scores).dispatch.choose(chosen, scores.contiguous());
  return chosen;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> plan(const at::Tensor& chosen, int64_t experts, int64_t capacity, int64_t places) {
  const at::Tensor slots = at::empty(chosen.sizes(), chosen.options()), order = at::empty({places}, chosen.options());
  const at::Tensor counts = at::empty({experts}, chosen.options());
  routines_for(chosen).dispatch.plan(slots, order, counts, chosen.contiguous(), capacity);
  return {slots, order, counts};
}

/// out[n] = weights[order[n]] * x[order[n] / k]
at::Tensor gather(const at::Tensor& x, const at::Tensor& order, int64_t k, const std::optional<at::Tensor>& weights) {
  const at::Tensor out = at::empty({order.size(0), x.size(1)}, x.options());
  if (out.numel() > 0) routines_for(x).dispatch.gather(out, as_rows(x), order, k, weights.value_or(at::Tensor()));
  return out;
}

/// out[t] = sum over k of weights[t, k] * rows[slots[t, k]]
at::Tensor combine(const at::Tensor& rows, const at::Tensor& slots, const std::optional<at::Tensor>& weights) {
  const at::Tensor out = at::empty({slots.size(0), rows.size(1)}, rows.options());
  if (out.numel() > 0) routines_for(rows).dispatch.combine(out, as_rows(rows), slots, weights.value_or(at::Tensor()));
  return out;
}

/// result[t, k] = rows[slots[t, k]] . grad[t]
at::Tensor weigh(const at::Tensor& rows, const at::Tensor& grad, const at::Tensor& slots) {
  const at::Tensor out = at::empty(slots.sizes(), rows.options().dtype(at::kFloat));
  if (out.numel() > 0) routines_for(rows).dispatch.weigh(out, as_rows(rows), as_rows(grad), slots);
  return out;
}

struct GatherRows : AutogradFunction<GatherRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& slots, const at::Tensor& order) {
    static const auto op = find_operator<Gather>("tessera::gather_rows");
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({slots});
    return op.call(x, order, slots.size(1), std::nullopt);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto op = find_operator<Combine>("tessera::combine_rows");
    const auto saved = context->get_saved_variables();
    return first_derivative("gather_rows", grads, {op.call(grads[0], saved[0], std::nullopt), at::Tensor(), at::Tensor()});
  }
};

struct CombineRows : AutogradFunction<CombineRows> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& rows, const at::Tensor& weights, const at::Tensor& slots,
                            const at::Tensor& order) {
    static const auto op = find_operator<Combine>("tessera::combine_rows");
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({rows, weights, slots, order});
    return op.call(rows, slots, weights);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    static const auto copies = find_operator<Gather>("tessera::gather_rows");
    static const auto products = find_operator<Weigh>("tessera::weigh_rows");
    const auto saved = context->get_saved_variables();
    const at::Tensor &rows = saved[0], &weights = saved[1], &slots = saved[2], &order = saved[3];
    at::Tensor d_rows, d_weights;
    if (context->needs_input_grad(0)) d_rows = copies.call(grads[0], order, slots.size(1), weights);
    if (context->needs_input_grad(1)) d_weights = products.call(rows, grads[0], slots);
    return first_derivative("combine_rows", grads, {d_rows, d_weights, at::Tensor(), at::Tensor()});
  }
};

void require_rows(const char* name, const at::Tensor& rows, int64_t expected) {
  require(rows.dim() == 2 && rows.size(0) == expected, name, ": rows of shape ", rows.sizes(), " do not fit a dispatch with ", expected);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("choose_experts(Tensor scores, int k) -> Tensor");
  m.def("plan_dispatch(Tensor chosen, int experts, int capacity, int places) -> (Tensor slots, Tensor order, Tensor counts)");
  m.def("gather_rows(Tensor x, Tensor order, int k, Tensor? weights) -> Tensor");
  m.def("combine_rows(Tensor rows, Tensor slots, Tensor? weights) -> Tensor");
  m.def("weigh_rows(Tensor rows, Tensor grad, Tensor slots) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("choose_experts", choose);
  m.impl("plan_dispatch", plan);
  m.impl("gather_rows", gather);
  m.impl("combine_rows", combine);
  m.impl("weigh_rows", weigh);
}

at::Tensor choose_experts(const at::Tensor& scores, int64_t k) {
  require(scores.dim() == 2 && scores.scalar_type() == at::kFloat, "choose_experts: scores must be fp32 [T, E], not ", scores.scalar_type(), " ",
          scores.sizes());
  require(k >= 1 && k <= scores.size(1), "choose_experts: k = ", k, " of ", scores.size(1), " experts; expected 1 to that");
  const at::Tensor values = scores.detach();
  if (takes_reference(Kernel::choose_experts)) return reference::choose_experts(values, k);
  static const auto op = find_operator<Choose>("tessera::choose_experts");
  return op.call(values, k);
}

at::Tensor choose_tokens(const at::Tensor& scores, int64_t tokens_each) {
  require(scores.dim() == 2, "choose_tokens: scores must be [T, E], not ", scores.sizes());
  const int64_t tokens = scores.size(0), experts = scores.size(1);
  const auto options = scores.options().dtype(at::kLong);
  const at::Tensor chosen = at::full({tokens, experts}, -1, options);
  if (tokens == 0) return chosen;
  require(tokens_each >= 1 && tokens_each <= tokens, "choose_tokens: tokens_each = ", tokens_each, " of ", tokens, " tokens; expected 1 to that");
  const at::Tensor sorted = std::get<1>(at::sort(scores.detach(), /*stable=*/true, /*dim=*/0, /*descending=*/true));
  const at::Tensor names = consecutive(0, experts, scores.device());
  return chosen.scatter_(0, sorted.narrow(0, 0, tokens_each), names.expand({tokens_each, experts}));
}

Dispatch dispatch(const at::Tensor& chosen, int64_t experts, const DispatchLimits& limits) {
  require(chosen.dim() == 2 && chosen.scalar_type() == at::kLong, "dispatch: chosen must be int64 [T, K], not ", chosen.scalar_type(), " ", chosen.sizes());
  require(!limits.capacity || *limits.capacity >= 1, "dispatch: a capacity of ", limits.capacity.value_or(0), " would drop every token; expected at least 1");
  const int64_t choices = chosen.numel(), capacity = limits.capacity.value_or(choices);
  const int64_t most = capacity < choices / std::max<int64_t>(experts, 1) + 1 ? std::min(choices, experts * capacity) : choices;
  const int64_t places = limits.places.value_or(most);
  if (takes_reference(Kernel::dispatch)) return reference::dispatch(chosen, experts, capacity, places);
  static const auto op = find_operator<Plan>("tessera::plan_dispatch");
  auto [slots, order, counts] = op.call(chosen, experts, capacity, places);
  return {slots, order, counts};
}

at::Tensor gather_rows(const at::Tensor& x, const Dispatch& where) {
  require_rows("gather_rows", x, where.slots.size(0));
  if (is_emulated_half(x)) return gather_rows(x.to(at::kFloat), where).to(at::kHalf);
  if (takes_reference(Kernel::gather_rows)) return reference::gather_rows(x, where);
  require_supported("gather_rows", x);
  return GatherRows::apply(x, where.slots, where.order);
}

at::Tensor combine_rows(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& where) {
  require_rows("combine_rows", rows, where.order.size(0));
  require(weights.sizes() == where.slots.sizes() && (weights.scalar_type() == at::kFloat || weights.scalar_type() == at::kDouble), "combine_rows: weights ",
          weights.scalar_type(), " ", weights.sizes(), " must be fp32 ", where.slots.sizes());
  if (is_emulated_half(rows)) return combine_rows(rows.to(at::kFloat), weights, where).to(at::kHalf);
  if (takes_reference(Kernel::combine_rows)) return reference::combine_rows(rows, weights, where);
  require_supported("combine_rows", rows);
  return CombineRows::apply(rows, weights.contiguous(), where.slots, where.order);
}

}  // namespace tessera::kernels
