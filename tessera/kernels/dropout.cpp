#include "tessera/kernels/dropout.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>
#include <torch/library.h>

#include "tessera/core/autograd_function.h"
#include "tessera/kernels/choice.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/kernels/half.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/reference.h"
#include "tessera/kernels/routines.h"

namespace tessera::kernels {

namespace {

using Mask = at::Tensor(const at::Tensor&, double, int64_t, const at::Tensor&, int64_t, int64_t);

at::Tensor mask(const at::Tensor& x, double p, int64_t key, const at::Tensor& rows, int64_t feature_offset, int64_t feature_total) {
  const at::Tensor out = at::empty(x.sizes(), x.options());
  routines_for(x).pointwise.dropout(out, x.contiguous(), p, key, rows.contiguous(), feature_offset, feature_total);
  return out;
}

/// Linear in x with the mask as coefficients, so backward is the same operator on the gradient.
struct DropoutFunction : AutogradFunction<DropoutFunction> {
  static at::Tensor call(const at::Tensor& x, double p, int64_t key, const at::Tensor& rows, int64_t feature_offset, int64_t feature_total) {
    static const auto op = find_operator<Mask>("tessera::dropout");
    return op.call(x, p, key, rows, feature_offset, feature_total);
  }
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double p, int64_t key, const at::Tensor& rows,
                            int64_t feature_offset, int64_t feature_total) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({rows});
    context->saved_data["p"] = p;
    context->saved_data["key"] = key;
    context->saved_data["offset"] = feature_offset;
    context->saved_data["total"] = feature_total;
    return call(x, p, key, rows, feature_offset, feature_total);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, const torch::autograd::variable_list& grads) {
    auto& data = context->saved_data;
    return {apply(grads[0], data["p"].toDouble(), data["key"].toInt(), context->get_saved_variables()[0], data["offset"].toInt(), data["total"].toInt()),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) { m.def("dropout(Tensor x, float p, int key, Tensor rows, int feature_offset, int feature_total) -> Tensor"); }
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) { m.impl("dropout", mask); }

at::Tensor dropout_rows(const at::Tensor& sample_positions, int64_t sequence_offset, int64_t sequence_length, int64_t sequence_total) {
  return dropout_rows(sample_positions, consecutive(sequence_offset, sequence_length, sample_positions.device()), sequence_total);
}

at::Tensor dropout_rows(const at::Tensor& sample_positions, const at::Tensor& columns, int64_t sequence_total) {
  require(sample_positions.dim() == 1 && sample_positions.scalar_type() == at::kLong, "dropout_rows: sample_positions must be int64 of one dimension");
  return sample_positions.unsqueeze(1).mul(sequence_total).add(columns).flatten();
}

at::Tensor dropout(const at::Tensor& x, double p, uint64_t key, const at::Tensor& rows, FeatureBlock features) {
  require(p >= 0 && p < 1, "dropout: p = ", p, " must be at least 0 and less than 1");
  if (p == 0) return x;
  const int64_t dim = x.dim() == 0 ? 1 : x.size(-1);
  require(rows.dim() == 1 && rows.scalar_type() == at::kLong && rows.numel() * dim == x.numel(), "dropout: rows ", rows.sizes(),
          " must hold one int64 per row of x ", x.sizes());
  const FeatureBlock block{features.offset, features.total == 0 ? dim : features.total};
  require(block.offset >= 0 && block.offset + dim <= block.total, "dropout: features ", block.offset, " .. ", block.offset + dim,
          " do not lie in the whole tensor's ", block.total);
  if (is_emulated_half(x)) return dropout(x.to(at::kFloat), p, key, rows, block).to(at::kHalf);
  if (takes_reference(Kernel::dropout)) return reference::dropout(x, p, key, rows, block);
  require_supported("dropout", x);
  return DropoutFunction::apply(x, p, static_cast<int64_t>(key), rows, block.offset, block.total);
}

}  // namespace tessera::kernels
