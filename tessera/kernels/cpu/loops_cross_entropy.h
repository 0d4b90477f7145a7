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

template <class T>
double row_sum_of_exp(const T* x, int64_t n, float shift) {
  Floats total[kAccumulators] = {};
  int64_t i = 0;
  for (; i + kAccumulators * kLanes <= n; i += kAccumulators * kLanes) {
    for (int a = 0; a < kAccumulators; ++a) total[a] += exp(load(x + i + a * kLanes, AllLanes{}) - shift);
  }
  for_vectors(n - i, [&](int64_t j, auto lanes) { total[0] += exp(fill_missing(load(x + i + j, lanes) - shift, lanes, -__builtin_inff())); });
  return (sum(total[0]) + sum(total[1])) + (sum(total[2]) + sum(total[3]));
}

template <class T>
void row_softmax(const T* x, T* out, int64_t n, float shift, float factor) {
  for_vectors(n, [&](int64_t i, auto lanes) { store(out + i, exp(load(x + i, lanes) - shift) * factor, lanes); });
}

/// out = exp(x - shift) * factor, minus `scale` at the label.
template <class T>
void row_gradient(const T* x, T* out, int64_t n, float shift, float factor, int64_t label, float scale) {
  const float at_label = load_one(x + label);  // x may be out
  row_softmax(x, out, n, shift, factor);
  store_one(out + label, exp(set(at_label - shift))[0] * factor - scale);
}

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
    const double log_sum = __builtin_log(row_sum_of_exp(x, args.vocabulary, most));
    args.loss[row] = static_cast<float>(log_sum + (static_cast<double>(most) - load_one(x + label)));
    args.lse[row] = static_cast<float>(log_sum + most);
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
      row_gradient(x, out, args.vocabulary, args.lse[row], args.scale, args.labels[row], args.scale);
    }
  }
}

template <class T>
void cross_entropy_part_rows(const CrossEntropyPart& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.logits.data) + row * args.vocabulary;
    const int64_t label = args.labels[row] - args.first;
    args.most[row] = row_maximum(x, args.vocabulary);
    args.sum[row] = static_cast<float>(row_sum_of_exp(x, args.vocabulary, args.most[row]));
    args.target[row] = label >= 0 && label < args.vocabulary ? load_one(x + label) : 0.0f;
  }
}

template <class T>
void cross_entropy_part_gradient_rows(const CrossEntropyPartGradient& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    T* x = static_cast<T*>(args.logits.data) + row * args.vocabulary;
    const int64_t label = args.labels[row] - args.first;
    if (label >= 0 && label < args.vocabulary) {
      row_gradient(x, x, args.vocabulary, args.lse[row], args.scale, label, args.scale);
    } else {
      row_softmax(x, x, args.vocabulary, args.lse[row], args.scale);
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
    const double total = row_sum_of_exp(x, args.vocabulary, most);
    args.loss[row] = static_cast<float>(__builtin_log(total) + (static_cast<double>(most) - load_one(x + label)));
    row_gradient(x, x, args.vocabulary, most, static_cast<float>(args.scale / total), label, args.scale);
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu
