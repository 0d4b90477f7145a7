#include "tessera/nn/sample_scope.h"

#include <mutex>
#include <tuple>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>

#include "tessera/core/ambient.h"
#include "tessera/core/error.h"
#include "tessera/kernels/dropout.h"

namespace tessera::nn {

namespace {
const Ambient<SampleScope*> innermost;
const Ambient<MaskKeys::Replay*> replayed;
const Ambient<std::vector<std::weak_ptr<MaskKeys::Drawn>>> records;

uint64_t draw_from_libtorch() {
  auto* const generator = at::get_generator_or_default<at::CPUGeneratorImpl>(std::nullopt, at::detail::getDefaultCPUGenerator());
  const std::lock_guard lock(generator->mutex_);
  return generator->random64();
}

at::Tensor make_rows(const SampleContext& context, int64_t batch, int64_t columns, at::Device device) {
  const at::Tensor samples = consecutive(context.first_sample, batch, device);
  if (context.positions.defined()) return kernels::dropout_rows(samples, context.positions.narrow(0, context.first_column, columns), context.seq_len);
  const int64_t seq_len = context.seq_len > 0 ? context.seq_len : context.first_column + columns;
  return kernels::dropout_rows(samples, context.first_column, columns, seq_len);
}
}  // namespace

bool SampleContext::operator==(const SampleContext& other) const {
  const auto numbers = [](const SampleContext& context) {
    return std::tie(context.seed, context.step, context.first_sample, context.first_column, context.seq_len, context.expected_gradient);
  };
  return numbers(*this) == numbers(other) && positions.is_same(other.positions);
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

uint64_t MaskKeys::next() {
  Replay* const replay = *replayed;
  const bool again = replay != nullptr && replay->used_ < replay->drawn_->size();
  const uint64_t key = again ? (*replay->drawn_)[replay->used_++] : draw_from_libtorch();
  std::erase_if(*records, [&](const auto& weak) {
    const auto record = weak.lock();
    if (record) record->push_back(key);
    return record == nullptr;
  });
  return key;
}

MaskKeys::Record::Record() : drawn_(std::make_shared<Drawn>()) { records->emplace_back(drawn_); }

void MaskKeys::Record::end() {
  std::erase_if(*records, [&](const auto& weak) { return weak.expired() || weak.lock() == drawn_; });
}

MaskKeys::Replay::Replay(const Record& record) : drawn_(record.drawn_), outer_(std::exchange(*replayed, this)), outer_records_(std::exchange(*records, {})) {}

MaskKeys::Replay::~Replay() {
  *replayed = outer_;
  *records = std::move(outer_records_);
}

at::Tensor consecutive(int64_t first, int64_t count, at::Device device) {
  at::Tensor out = at::empty({count}, at::TensorOptions(at::kLong).device(device));
  return at::arange_out(out, first, first + count, 1);
}

}  // namespace tessera::nn
