#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

namespace tessera::kernels::cpu {
namespace {

// A row of logits (128 KiB for 32,000 fp32 entries) fits the second-level cache, so passes after the first cost arithmetic only.
// Four accumulators hide the latency of the additions and keep the error of long sums small: each lane adds n / (4 * kLanes) numbers.
constexpr int kAccumulators = 4;

template <class T>
float row_maximum(const T* x, int64_t n) {
  constexpr float kLowest = -__builtin_inff();
  Floats most[kAccumulators];
  for (auto& m : most) m = set(kLowest);
  int64_t i = 0;
  for (; i + kAccumulators * kLanes <= n; i += kAccumulators * kLanes) {
    for (int a = 0; a < kAccumulators; ++a) most[a] = maximum(load(x + i + a * kLanes, AllLanes{}), most[a]);
  }
  for_vectors(n - i, [&](int64_t j, auto lanes) { most[0] = maximum(fill_missing(load(x + i + j, lanes), lanes, kLowest), most[0]); });
  return maximum(maximum(maximum(most[0], most[1]), maximum(most[2], most[3])));
}

/// Sum of f(x - shift); f(missing) is 0.
template <class T, class F>
double row_sum_of(const T* x, int64_t n, float shift, float missing, F&& f) {
  Floats total[kAccumulators] = {};
  int64_t i = 0;
  for (; i + kAccumulators * kLanes <= n; i += kAccumulators * kLanes) {
    for (int a = 0; a < kAccumulators; ++a) total[a] += f(load(x + i + a * kLanes, AllLanes{}) - shift);
  }
  for_vectors(n - i, [&](int64_t j, auto lanes) { total[0] += f(fill_missing(load(x + i + j, lanes) - shift, lanes, missing)); });
  return (sum(total[0]) + sum(total[1])) + (sum(total[2]) + sum(total[3]));
}

template <class T>
double row_sum_of_exp(const T* x, int64_t n, float shift) {
  return row_sum_of(x, n, shift, -__builtin_inff(), [](Floats values) { return exp(values); });
}

template <class T>
double row_sum(const T* x, int64_t n, float shift) {
  return row_sum_of(x, n, shift, 0.0f, [](Floats values) { return values; });
}

/// The logit that a target expects, minus `shift` for each logit; `label` below 0: it is not among these.
template <class T>
double expected_logit(const T* x, int64_t n, int64_t label, float shift, const LossTerms& terms) {
  const double at_label = label < 0 ? 0 : terms.label * (static_cast<double>(load_one(x + label)) - shift);
  return terms.each == 0 ? at_label : at_label + terms.each * row_sum(x, n, shift);
}

/// out = exp(x - shift) * factor - each, and `at_label` less at the label.
struct GradientOfRow {
  float shift, factor, each, at_label;
  /// `sum` of exp(x - shift)
  GradientOfRow(float shift, double sum, float scale, double lse, const LossTerms& terms)
      : shift(shift),
        factor(static_cast<float>(scale * (1 + 2 * terms.z * lse) / sum)),
        each(static_cast<float>(scale * terms.each)),
        at_label(static_cast<float>(scale * terms.label)) {}

  /// `label` below 0: it is not among these.
  template <class T>
  void write(const T* x, T* out, int64_t n, int64_t label) const {
    const float its_logit = label < 0 ? 0.0f : load_one(x + label);  // x may be out
    for_vectors(n, [&](int64_t i, auto lanes) { store(out + i, exp(load(x + i, lanes) - shift) * factor - each, lanes); });
    if (label >= 0) store_one(out + label, exp(set(its_logit - shift))[0] * factor - (at_label + each));
  }
};

template <class T>
void cross_entropy_rows(const CrossEntropy& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.logits.data) + row * args.vocabulary;
    const int64_t label = args.labels[row];
    if (label < 0) {
      args.loss[row] = args.lse[row] = 0.0f;
      continue;
    }
    const float most = row_maximum(x, args.vocabulary);
    const double log_sum = __builtin_log(row_sum_of_exp(x, args.vocabulary, most)), lse = log_sum + most;
    args.loss[row] = static_cast<float>(log_sum - expected_logit(x, args.vocabulary, label, most, args.terms) + args.terms.z * lse * lse);
    args.lse[row] = static_cast<float>(lse);
  }
}

template <class T>
void cross_entropy_gradient_rows(const CrossEntropyGradient& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.logits.data) + row * args.vocabulary;
    T* out = static_cast<T*>(args.d_logits.data) + row * args.vocabulary;
    if (args.labels[row] < 0) {
      std::memset(out, 0, sizeof(T) * args.vocabulary);
    } else {
      const float lse = args.lse[row];
      GradientOfRow(lse, 1, args.scale, lse, args.terms).write(x, out, args.vocabulary, args.labels[row]);
    }
  }
}

/// The row's label as a column of this part, or -1.
template <class Part>
int64_t label_here(const Part& part, int64_t row) {
  const int64_t label = part.labels[row] - part.first;
  return label >= 0 && label < part.vocabulary ? label : -1;
}

template <class T>
void cross_entropy_part_rows(const CrossEntropyPart& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.logits.data) + row * args.vocabulary;
    args.most[row] = row_maximum(x, args.vocabulary);
    args.sum[row] = static_cast<float>(row_sum_of_exp(x, args.vocabulary, args.most[row]));
    args.target[row] = static_cast<float>(expected_logit(x, args.vocabulary, label_here(args, row), 0, args.terms));
  }
}

template <class T>
void cross_entropy_part_gradient_rows(const CrossEntropyPartGradient& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* x = static_cast<T*>(args.logits.data) + row * args.vocabulary;
    if (args.labels[row] < 0) {
      std::memset(x, 0, sizeof(T) * args.vocabulary);
    } else {
      const float lse = args.lse[row];
      GradientOfRow(lse, 1, args.scale, lse, args.terms).write(x, x, args.vocabulary, label_here(args, row));
    }
  }
}

template <class T>
void cross_entropy_in_place_rows(const CrossEntropyInPlace& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* x = static_cast<T*>(args.logits.data) + row * args.vocabulary;
    const int64_t label = args.labels[row];
    if (label < 0) {
      args.loss[row] = 0.0f;
      std::memset(x, 0, sizeof(T) * args.vocabulary);
      continue;
    }
    const float most = row_maximum(x, args.vocabulary);
    const double total = row_sum_of_exp(x, args.vocabulary, most), log_sum = __builtin_log(total), lse = log_sum + most;
    args.loss[row] = static_cast<float>(log_sum - expected_logit(x, args.vocabulary, label, most, args.terms) + args.terms.z * lse * lse);
    GradientOfRow(most, total, args.scale, lse, args.terms).write(x, x, args.vocabulary, label);
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu
