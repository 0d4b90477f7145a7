#include <ATen/ATen.h>

#include "tessera/kernels/consecutive.h"
#include "tessera/kernels/reference.h"

namespace tessera::kernels::reference {

at::Tensor choose_experts(const at::Tensor& scores, int64_t k) {
  return std::get<1>(at::sort(scores, /*stable=*/true, /*dim=*/-1, /*descending=*/true)).narrow(-1, 0, k).contiguous();
}

Dispatch dispatch(const at::Tensor& chosen, int64_t experts, int64_t capacity, int64_t places) {
  const int64_t tokens = chosen.size(0), choices = chosen.size(1);
  // First choices of all tokens, then second ones: how many of the same expert come before says who is dropped.
  const at::Tensor ranked = chosen.t().reshape({-1});
  const at::Tensor taken = (ranked.unsqueeze(1) == consecutive(0, experts, chosen.device())).to(at::kLong);
  const at::Tensor before = (taken.cumsum(0) * taken).sum(1) - 1;
  const at::Tensor kept = ranked.ge(0).bitwise_and(before < capacity).view({choices, tokens}).t();
  const at::Tensor expert = at::where(kept, chosen, at::full({}, experts, chosen.options())).reshape({-1});
  const at::Tensor sorted = std::get<1>(at::sort(expert, /*stable=*/true, /*dim=*/0, /*descending=*/false));
  const at::Tensor counts = (expert.unsqueeze(1) == consecutive(0, experts, chosen.device())).sum(0);
  const at::Tensor used = consecutive(0, tokens * choices, chosen.device()) < counts.sum();
  at::Tensor order = at::full({places}, -1, chosen.options());
  const int64_t common = std::min(places, tokens * choices);
  order.narrow(0, 0, common).copy_(at::where(used, sorted, at::full({}, -1, chosen.options())).narrow(0, 0, common));
  at::Tensor slots = at::empty({tokens * choices}, chosen.options());
  slots.scatter_(0, sorted, at::where(used, consecutive(0, tokens * choices, chosen.device()), at::full({}, -1, chosen.options())));
  return {slots.view({tokens, choices}), order, counts};
}

namespace {

/// Rows of x. libtorch's gradient of index_select looks at the first row of what was selected, and a rank, or an expert, may have none.
at::Tensor selected(const at::Tensor& x, const at::Tensor& rows) { return rows.size(0) > 0 ? x.index_select(0, rows) : x.index({rows}); }

}  // namespace

at::Tensor gather_rows(const at::Tensor& x, const Dispatch& where) {
  const at::Tensor tokens = where.order.clamp_min(0).div(where.slots.size(1), "floor");
  return selected(x, tokens) * where.order.ge(0).unsqueeze(1).to(x.scalar_type());
}

at::Tensor combine_rows(const at::Tensor& rows, const at::Tensor& weights, const Dispatch& where) {
  const at::ScalarType wide = rows.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  // A row of zeros behind the others is what was dropped. Without rows backward asks for the same saved tensors as with them, for that is when a recomputation
  // begins, and its collectives have to meet those of ranks that have rows.
  const at::Tensor padded = at::constant_pad_nd(rows, {0, 0, 0, 1});
  const at::Tensor places = where.slots.masked_fill(where.slots.lt(0), rows.size(0)).reshape({-1});
  const at::Tensor of_token = selected(padded, places).view({weights.size(0), weights.size(1), rows.size(1)});
  const at::Tensor used = weights.to(wide) * where.slots.ge(0).to(wide);
  return (of_token.to(wide) * used.unsqueeze(-1)).sum(1).to(rows.scalar_type());
}

}  // namespace tessera::kernels::reference
