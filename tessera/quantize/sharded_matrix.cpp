#include "tessera/quantize/sharded_matrix.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "tessera/memory/memory.h"
#include "tessera/nn/not_repeated.h"
#include "tessera/nn/operator_watch.h"

// A row is a record: its codes, and behind them its scales. So one collective brings both, whole rows lie where they are read without a copy, and since a row
// knows its blocks by its place in the whole (kernels/quantized_linear.cpp), what is gathered has the very numbers that one device has.

namespace tessera::quantize {
namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/// What is gathered is no part of a pass that is computed again, and nobody's parameters.
struct Gathering {
  at::NoGradGuard no_grad;
  nn::NotRepeated not_repeated;
  nn::Unwatched unwatched;
};

}  // namespace

ShardedMatrix::ShardedMatrix(const kernels::QuantizedMatrix& whole, const comm::Group& group)
    : group_(group),
      frame_{.form = whole.form, .part = whole.part, .codes = {}, .scales = {}, .outer = whole.outer, .mean = whole.mean},
      code_bytes_(whole.codes.size(1)),
      code_room_(round_up(code_bytes_, whole.scales.element_size())),
      scales_(whole.scales.size(1)),
      share_(round_up(whole.part.rows, group.size()) / group.size()) {
  const Gathering quietly;
  const auto bytes = whole.codes.options().dtype(at::kByte);
  {
    const MemoryScope scope(MemoryCategory::Parameters);
    records_ = comm::empty(group, {share_, code_room_ + scales_ * whole.scales.element_size()}, bytes);
  }
  if (records_.is_meta()) return;
  records_.zero_();
  const int64_t first = std::min(group.rank() * share_, whole.part.rows), count = rows();
  const kernels::QuantizedMatrix own = over(records_.narrow(0, 0, count));
  own.codes.copy_(whole.codes.narrow(0, first, count));
  own.scales.copy_(whole.scales.narrow(0, first, count));
}

kernels::QuantizedMatrix ShardedMatrix::over(const at::Tensor& records) const {
  const bool coded = frame_.form.double_scales;
  const auto codes = frame_.form.format == kernels::WeightFormat::Nf4 ? at::kByte : at::kChar;
  kernels::QuantizedMatrix matrix = frame_;
  matrix.codes = records.narrow(1, 0, code_bytes_).view(codes);
  matrix.scales = records.narrow(1, code_room_, records.size(1) - code_room_).view(coded ? at::kByte : at::kFloat);
  return matrix;
}

ShardedMatrix::Gathered ShardedMatrix::gather() const {
  const Gathering quietly;
  at::Tensor records;
  {
    const MemoryScope scope(MemoryCategory::Comm);
    records = at::empty({group_.size() * share_, records_.size(1)}, records_.options());
  }
  comm::Pending arrived = comm::all_gather_async(group_, records, records_);
  return {std::make_shared<kernels::QuantizedMatrix>(over(records.narrow(0, 0, frame_.part.rows))), std::move(arrived)};
}

int64_t ShardedMatrix::rows() const { return std::clamp<int64_t>(frame_.part.rows - group_.rank() * share_, 0, share_); }

int64_t ShardedMatrix::bytes() const { return static_cast<int64_t>(records_.nbytes() + (frame_.outer.defined() ? frame_.outer.nbytes() : 0)); }

}  // namespace tessera::quantize
