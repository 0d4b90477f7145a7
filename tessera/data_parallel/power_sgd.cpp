#include "tessera/data_parallel/power_sgd.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>

#include "tessera/core/error.h"
#include "tessera/core/events.h"
#include "tessera/core/rng.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/flat_gradients.h"
#include "tessera/nn/sharing.h"

// The two all-reduces of a bucket depend on each other: Q is computed from the sum of P. So a reduction is a small machine: P leaves while backward runs, the
// first `advance` sends Q, the second decompresses, and the buckets take turns. What has to come out with the same bits on all ranks, Gram-Schmidt, is a
// function of the sums alone, in an order that no number of threads and no BLAS changes. Of a gradient that nobody used nothing is applied: all of it stays
// owed. BLAS rounds by where its operands begin, and what is owed carries a last bit on until it is none: so products are computed in memory of their own, one
// matrix at a time, which begins alike in every bucket.

namespace tessera {
namespace {

/// Rows and columns of `gradient` as it lies in memory: its outermost dimension by the rest. Nothing for what has fewer than two dimensions, or no elements.
std::optional<std::pair<int64_t, int64_t>> matrix_shape(const at::Tensor& gradient) {
  if (gradient.dim() < 2 || gradient.numel() == 0) return std::nullopt;
  int64_t outermost = 0;
  for (int64_t d = 1; d < gradient.dim(); ++d) {
    const bool wider = gradient.size(d) > 1 && (gradient.size(outermost) == 1 || gradient.stride(d) > gradient.stride(outermost));
    if (wider) outermost = d;
  }
  const int64_t rows = gradient.size(outermost);
  return std::pair{rows, gradient.numel() / rows};
}

/// Whether ranks that compute one model together each have all of its gradient: these must stay one, and what is owed would part them, a last bit first.
bool is_held_alike(const at::Tensor& parameter) {
  return std::ranges::any_of(nn::sharings_of(parameter), [](const nn::Sharing& sharing) { return sharing.holders > 1 && !sharing.is_term; });
}

/// The same bits on every rank that draws them.
void draw(const at::Tensor& q, uint64_t seed, const std::string& name) {
  if (q.is_meta()) return;
  const bool in_place = q.is_cpu() && q.scalar_type() == at::kFloat;
  at::Tensor values = in_place ? q : at::empty(q.sizes(), at::device(at::kCPU).dtype(at::kFloat));
  CounterRng(seed, "powersgd.q." + name).fill_normal(values.data_ptr<float>(), 0, values.numel(), 0, 1);
  if (!in_place) at::Tensor(q).copy_(values);
}

/// Rows of zeros become what they were at first.
void revive(const at::Tensor& q, const at::Tensor& first) {
  const at::Tensor dead = at::linalg_vector_norm(q, 2, at::IntArrayRef{1}, /*keepdim=*/true).eq(0);
  at::Tensor(q).add_(first * dead);
}

/// Eight sums side by side, in fp64: the order depends on the length alone.
template <class T>
double dot(const T* x, const T* y, int64_t n) {
  constexpr int64_t lanes = 8;
  double sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int64_t j = 0; j < lanes; ++j) sums[j] += static_cast<double>(x[i + j]) * static_cast<double>(y[i + j]);
  }
  for (int64_t j = 0; i + j < n; ++j) sums[j] += static_cast<double>(x[i + j]) * static_cast<double>(y[i + j]);
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

/// Scales the row to length 1, and returns the length that it had.
template <class T>
double normalize(T* row, int64_t n) {
  const double norm = std::sqrt(dot(row, row, n)), scale = norm > 0 ? 1 / norm : 0;
  for (int64_t k = 0; k < n; ++k) row[k] = static_cast<T>(scale * static_cast<double>(row[k]));
  return norm;
}

/// A row that depends on those before leaves the first pass as noise of rounding, in any direction. What the second leaves of that is orthogonal to the others,
/// unless there is no such direction: where all rows are zero in most columns. Then it is noise again, mostly along the others, and counting it would apply
/// parts of the gradient twice: zeros it is.
template <class T>
void gram_schmidt(T* p, int64_t rows, int64_t n) {
  for (int64_t i = 0; i < rows; ++i) {
    T* const row = p + i * n;
    normalize(row, n);
    for (int pass = 0; pass < 2; ++pass) {  // the second takes out what rounding left of the first
      for (int64_t j = 0; j < i; ++j) {
        const T* const before = p + j * n;
        const T share = static_cast<T>(dot(before, row, n));
        for (int64_t k = 0; k < n; ++k) row[k] -= share * before[k];
      }
      if (normalize(row, n) < 0.5 && pass == 1) std::fill_n(row, n, T(0));
    }
  }
}

/// One bucket of which some gradients are compressed.
class Compressed final : public BucketReduction {
 public:
  Compressed(GradientBucket& bucket, GradientChannel& channel, std::map<std::string, PowerSgd::Matrix>& matrices) : bucket_(bucket), channel_(channel) {
    const MemoryScope scratch(MemoryCategory::Comm);
    const BesidePasses compressing;
    lay_out(matrices);
    first_ = at::empty({first_numel_}, bucket_.flat.options());
    for (Part& part : parts_) {
      const at::Tensor sent = first_.narrow(0, part.first_offset, part.first_numel());
      if (!part.matrix) {
        sent.copy_(part.gradient);
        continue;
      }
      part.gradient.add_(part.matrix->error.view_as(part.gradient));
      part.p = sent.view({part.matrix->r, part.matrix->n});
      part.p.copy_(at::mm(part.matrix->q, part.gradient.clone().t()));
    }
    pending_ = channel_.all_reduce(first_);
  }

  bool advance() override {
    const MemoryScope scratch(MemoryCategory::Comm);
    const BesidePasses compressing;
    pending_.wait();
    if (second_.defined()) {
      decompress();
      return true;
    }
    send_q();
    return false;
  }

 private:
  /// A gradient of the bucket: a matrix, or one that crosses whole.
  struct Part {
    at::Tensor gradient;         ///< [n, m] or [numel], in the bucket
    PowerSgd::Matrix* matrix;    ///< null: whole
    const BucketGradient* told;  ///< what the step says of it
    int64_t first_offset = 0, second_offset = 0;
    at::Tensor p = {};  ///< [r, n], in first_

    int64_t first_numel() const { return matrix ? matrix->r * matrix->n : gradient.numel(); }
  };

  void lay_out(std::map<std::string, PowerSgd::Matrix>& matrices) {
    int64_t offset = 0;
    for (const BucketGradient& gradient : bucket_.gradients) {
      const at::Tensor flat = bucket_.flat.narrow(0, offset, gradient.tensor.numel());
      offset += flat.numel();
      const auto found = matrices.find(gradient.name);
      PowerSgd::Matrix* const matrix = found == matrices.end() ? nullptr : &found->second;
      parts_.push_back({.gradient = matrix ? flat.view({matrix->n, matrix->m}) : flat,
                        .matrix = matrix,
                        .told = &gradient,
                        .first_offset = first_numel_,
                        .second_offset = second_numel_});
      first_numel_ += parts_.back().first_numel();
      if (matrix) second_numel_ += matrix->r * matrix->m;
    }
  }

  void send_q() {
    second_ = at::empty({second_numel_}, bucket_.flat.options());
    for (const Part& part : parts_) {
      if (!part.matrix) {
        at::Tensor(part.gradient).copy_(first_.narrow(0, part.first_offset, part.first_numel()));
        continue;
      }
      orthonormalize_rows(part.p);
      q_of(part).copy_(at::mm(part.p.clone(), part.gradient.clone()));
    }
    pending_ = channel_.all_reduce(second_);
  }

  void decompress() {
    for (Part& part : parts_) {
      if (!part.matrix) continue;
      PowerSgd::Matrix& matrix = *part.matrix;
      const at::Tensor q = q_of(part);
      at::Tensor error = matrix.error.view({matrix.n, matrix.m});
      // A gradient that is not finite on one rank makes Q so on all. It is handed on, for the step to be skipped; to owe it would spoil all steps to come.
      const at::Tensor finite = q.abs().max().isfinite();
      const bool on_host = finite.is_cpu();
      if (on_host && !finite.item<bool>()) {
        part.gradient.copy_(at::mm(part.p.clone().t(), q.clone()));
        continue;
      }
      const auto if_finite = [&](const at::Tensor& value, const auto& otherwise) { return on_host ? value : at::where(finite, value, otherwise); };
      error.copy_(if_finite(part.gradient, error));
      if (part.told->used) {
        part.gradient.copy_(at::mm(part.p.clone().t(), q.clone()));
        error.sub_(if_finite(part.gradient, 0), 1.0 / channel_.group().size());
      } else {
        part.gradient.zero_();  // nobody will apply it, so all of it stays owed
      }
      matrix.q.copy_(if_finite(q, matrix.q));
      revive(matrix.q, matrix.first_q);
    }
    parts_.clear();
    release_scratch(first_);  // before the other buckets are done
    release_scratch(second_);
  }

  at::Tensor q_of(const Part& part) const {
    return second_.narrow(0, part.second_offset, part.matrix->r * part.matrix->m).view({part.matrix->r, part.matrix->m});
  }

  GradientBucket& bucket_;
  GradientChannel& channel_;
  std::vector<Part> parts_;
  int64_t first_numel_ = 0, second_numel_ = 0;
  at::Tensor first_;   ///< P of each matrix, and what crosses whole
  at::Tensor second_;  ///< Q of each matrix
  comm::Pending pending_;
};

}  // namespace

PowerSgd::PowerSgd(PowerSgdOptions options) : options_(options), steps_done_(options.steps_done) {
  require(options.rank >= 1, "comm.powersgd_rank = ", options.rank, ": expected at least 1; set comm.powersgd_rank, such as 4");
  require(options.start >= 0, "comm.powersgd_start = ", options.start, ": expected a number of steps; set comm.powersgd_start, such as 10");
  require(options.min_compression >= 0, "min_compression = ", options.min_compression, ": expected 0 (compress every matrix) or more; the default is 2");
}

void PowerSgd::prepare(const std::vector<nn::NamedParameter>& parameters, const std::vector<at::ScalarType>& dtypes, const comm::Group&) {
  const MemoryScope scope(MemoryCategory::Comm);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, tensor, aliases] = parameters[i];
    require(!matrices_.contains(name), "PowerSGD: the hook has the state of '", name,
            "' for another DistributedDataParallel, and serves one; make one for each");
    const auto shape = matrix_shape(tensor);
    if (!shape || tensor.is_complex() || is_held_alike(tensor)) continue;
    const auto [n, m] = *shape;
    const int64_t r = std::min({options_.rank, n, m});
    if (static_cast<double>((n + m) * r) * options_.min_compression >= static_cast<double>(n * m)) continue;
    require(dtypes[i] == at::kFloat || dtypes[i] == at::kDouble, "PowerSGD: the gradient of '", name, "' is reduced in ", dtypes[i],
            ": it needs fp32 or fp64 to orthogonalize in; set reduce_dtype to fp32, or use another hook");
    const at::TensorOptions held = tensor.options().dtype(dtypes[i]).requires_grad(false);
    Matrix matrix{.n = n, .m = m, .r = r, .error = at::zeros({n * m}, held), .q = at::empty({r, m}, held), .first_q = at::empty({r, m}, held)};
    draw(matrix.first_q, options_.seed, name);
    matrix.q.copy_(matrix.first_q);
    matrix.shaped = gradient_view(matrix.error, 0, tensor.sizes(), gradient_strides(tensor));
    matrix.slice = nn::slice_of(tensor);
    names_.push_back(name);
    matrices_.emplace(name, std::move(matrix));
  }
}

void PowerSgd::complete_step() { ++steps_done_; }

std::unique_ptr<BucketReduction> PowerSgd::start(GradientBucket& bucket, GradientChannel& channel) {
  const bool compresses = std::ranges::any_of(bucket.gradients, [&](const BucketGradient& gradient) { return matrices_.contains(gradient.name); });
  if (steps_done_ < options_.start || !compresses) return AllReduceHook().start(bucket, channel);
  return std::make_unique<Compressed>(bucket, channel, matrices_);
}

std::vector<HookTensor> PowerSgd::state() const {
  std::vector<HookTensor> tensors;
  for (const std::string& name : names_) {
    const Matrix& matrix = matrices_.at(name);
    HookTensor error{.name = "powersgd.error." + name,
                     .tensor = matrix.shaped,
                     .slice = matrix.slice,
                     .across = average_ ? HookTensor::Across::Mean : HookTensor::Across::Sum};
    HookTensor q{.name = "powersgd.q." + name, .tensor = matrix.q, .slice = {}};
    error.slice.name = error.name;
    q.slice = Slice::whole(q.name, matrix.q.sizes().vec());
    tensors.push_back(std::move(error));
    tensors.push_back(std::move(q));
  }
  return tensors;
}

void orthonormalize_rows(const at::Tensor& p) {
  if (p.is_meta()) return;
  invariant(p.dim() == 2 && p.is_contiguous(), "orthonormalize_rows expects a contiguous matrix, got ", p.sizes(), " with strides ", p.strides());
  if (!p.is_cpu()) {
    at::Tensor(p).copy_(std::get<0>(at::linalg_qr(p.t())).t());
    return;
  }
  AT_DISPATCH_FLOATING_TYPES(p.scalar_type(), "orthonormalize_rows", [&] { gram_schmidt(p.data_ptr<scalar_t>(), p.size(0), p.size(1)); });
}

}  // namespace tessera
