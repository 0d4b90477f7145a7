#include "tessera/nn/sample_scope.h"

#include <mutex>
#include <tuple>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include "tessera/core/ambient.h"
#include "tessera/core/error.h"
#include "tessera/kernels/consecutive.h"
#include "tessera/kernels/dropout.h"
#include "tessera/nn/not_repeated.h"

namespace tessera::nn {

namespace {
const Ambient<SampleScope*> innermost;

uint64_t draw_from_libtorch() {
  auto* const generator = at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard lock(generator->mutex_);
  return generator->random64();
}

at::Tensor make_rows(const SampleContext& context, int64_t batch, int64_t columns, at::Device device) {
  const NotRepeated shared;  // the first of a scope who asks makes them, which need not be who is computed again
  const at::Tensor samples = kernels::consecutive(context.first_sample, batch, device);
  if (context.positions.defined()) return kernels::dropout_rows(samples, context.positions.narrow(0, context.first_column, columns), context.seq_len);
  const int64_t seq_len = context.seq_len > 0 ? context.seq_len : context.first_column + columns;
  return kernels::dropout_rows(samples, context.first_column, columns, seq_len);
}
}  // namespace

bool SampleContext::operator==(const SampleContext& other) const {
  const auto numbers = [](const SampleContext& context) {
    return std::tie(context.seed, context.step, context.first_sample, context.first_column, context.columns, context.seq_len, context.part,
                    context.first_feature, context.features, context.expected_gradient, context.valid_tokens, context.padding_size);
  };
  return numbers(*this) == numbers(other) && positions.is_same(other.positions) && padding.is_same(other.padding);
}

SampleScope::SampleScope(const SampleContext& context) : context_(context), outer_(std::exchange(*innermost, this)) {}

SampleScope::~SampleScope() { *innermost = outer_; }

const SampleContext& SampleScope::current() {
  static const SampleContext none;
  return *innermost ? (*innermost)->context_ : none;
}

at::Tensor SampleScope::token_rows(int64_t batch, int64_t columns, at::Device device) {
  if (*innermost == nullptr) return make_rows(SampleContext{}, batch, columns, device);
  SampleScope& scope = **innermost;
  if (!scope.rows_.defined() || scope.columns_ != columns || scope.rows_.numel() != batch * columns || scope.rows_.device() != device) {
    scope.rows_ = make_rows(scope.context_, batch, columns, device);
    scope.columns_ = columns;
  }
  return scope.rows_;
}

SampleScope::Padding SampleScope::padding(int64_t tokens) {
  const SampleContext& context = current();
  if (!context.padding.defined()) return {.rows = {}, .size = 0};
  require(context.padding.dim() == 2, "SampleContext::padding: expected bool [rows, columns], not a tensor of shape ", context.padding.sizes());
  const int64_t rows = context.padding.size(0), whole = context.padding.size(1), columns = context.columns.value_or(whole);
  require(tokens == rows * columns, "SampleContext::padding: of shape ", context.padding.sizes(), context.columns ? ", of which this is a part," : "",
          " it is that of ", rows * columns, " tokens, and here are ", tokens,
          "; open a SampleScope around each forward pass, with the padding of the rows that it is given");
  if (columns == whole && context.first_column == 0) return {.rows = context.padding.reshape({tokens}), .size = context.padding_size};
  invariant(context.first_column + columns <= whole, columns, " columns from ", context.first_column, " on, of a micro-batch of shape ",
            context.padding.sizes());
  return {.rows = context.padding.narrow(1, context.first_column, columns).reshape({tokens}), .size = std::nullopt, .part = true};
}

int64_t SampleScope::Padding::on_host(const char* who) const {
  if (!any() || part) return 0;
  require(size.has_value(), "SampleContext::padding_size: ", who,
          " is a share of the tokens that there are, so the host has to know how many of SampleContext::padding are none; set it");
  return *size;
}

uint64_t MaskKeys::next() { return Noted::next(draw_from_libtorch); }

}  // namespace tessera::nn
