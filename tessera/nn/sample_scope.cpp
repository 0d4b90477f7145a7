#include "tessera/nn/sample_scope.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/kernels/dropout.h"

namespace tessera::nn {

namespace {
thread_local SampleScope* innermost = nullptr;

at::Tensor make_rows(const SampleContext& context, int64_t batch, int64_t columns, at::Device device) {
  const at::Tensor samples = consecutive(context.first_sample, batch, device);
  const int64_t seq_len = context.seq_len > 0 ? context.seq_len : context.first_position + columns;
  return kernels::dropout_rows(samples, context.first_position, columns, seq_len);
}
}  // namespace

SampleScope::SampleScope(const SampleContext& context) : context_(context), outer_(innermost) { innermost = this; }

SampleScope::~SampleScope() { innermost = outer_; }

const SampleContext& SampleScope::current() {
  static const SampleContext none;
  return innermost ? innermost->context_ : none;
}

at::Tensor SampleScope::token_rows(int64_t batch, int64_t columns, at::Device device) {
  if (!innermost) return make_rows(SampleContext{}, batch, columns, device);
  SampleScope& scope = *innermost;
  if (!scope.rows_.defined() || scope.columns_ != columns || scope.rows_.numel() != batch * columns || scope.rows_.device() != device) {
    scope.rows_ = make_rows(scope.context_, batch, columns, device);
    scope.columns_ = columns;
  }
  return scope.rows_;
}

at::Tensor consecutive(int64_t first, int64_t count, at::Device device) {
  at::Tensor out = at::empty({count}, at::TensorOptions(at::kLong).device(device));
  return at::arange_out(out, first, first + count, 1);
}

}  // namespace tessera::nn
