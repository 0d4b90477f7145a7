#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

namespace tessera::kernels::cpu {
namespace {

template <class X, class W, class Y>
void rms_norm_rows(const RmsNorm& args, int64_t begin, int64_t end) {
  const auto* weight = static_cast<const W*>(args.weight.data);
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const X*>(args.x.data) + row * args.dim;
    auto* out = static_cast<Y*>(args.out.data) + row * args.dim;
    Floats squares = {};
    for_vectors(args.dim, [&](int64_t i, auto lanes) {
      const Floats value = load(x + i, lanes);
      squares += value * value;
    });
    const auto rstd = static_cast<float>(1.0 / __builtin_sqrt(sum(squares) / static_cast<double>(args.dim) + args.eps));
    args.rstd[row] = rstd;
    for_vectors(args.dim, [&](int64_t i, auto lanes) { store(out + i, load(x + i, lanes) * rstd * load(weight + i, lanes), lanes); });
  }
}

template <class Backward>
TESSERA_INLINE int64_t block_end(const Backward& args, int64_t first) {
  return first + args.block < args.rows ? first + args.block : args.rows;
}

/// With h = x * rstd and g = grad * weight:  dx = rstd * (g - h * mean(g * h)),  d_weight = sum over rows of grad * h.
template <class G, class X, class W>
void rms_norm_backward_blocks(const RmsNormBackward& args, int64_t begin, int64_t end) {
  const auto* weight = static_cast<const W*>(args.weight.data);
  const int64_t dim = args.dim;
  for (int64_t block = begin; block < end; ++block) {
    float* partial = args.partial + block * dim;
    std::memset(partial, 0, sizeof(float) * dim);
    const int64_t first = block * args.block;
    const int64_t last = block_end(args, first);
    for (int64_t row = first; row < last; ++row) {
      const auto* grad = static_cast<const G*>(args.grad.data) + row * dim;
      const auto* x = static_cast<const X*>(args.x.data) + row * dim;
      auto* dx = static_cast<X*>(args.dx.data) + row * dim;
      const float rstd = args.rstd[row];
      Floats dot = {};
      for_vectors(dim, [&](int64_t i, auto lanes) {
        const Floats scaled = load(grad + i, lanes) * (load(x + i, lanes) * rstd);
        dot += scaled * load(weight + i, lanes);
        store(partial + i, load(partial + i, lanes) + scaled, lanes);
      });
      const auto mean = static_cast<float>(sum(dot) / static_cast<double>(dim));
      for_vectors(dim, [&](int64_t i, auto lanes) {
        const Floats g = load(grad + i, lanes) * load(weight + i, lanes);
        store(dx + i, rstd * (g - load(x + i, lanes) * rstd * mean), lanes);
      });
    }
  }
}

template <class X, class W, class Y>
void layer_norm_rows(const LayerNorm& args, int64_t begin, int64_t end) {
  const auto* weight = static_cast<const W*>(args.weight.data);
  const auto* bias = static_cast<const W*>(args.bias.data);
  for (int64_t row = begin; row < end; ++row) {
    const auto* x = static_cast<const X*>(args.x.data) + row * args.dim;
    auto* out = static_cast<Y*>(args.out.data) + row * args.dim;
    Floats values = {}, squares = {};
    for_vectors(args.dim, [&](int64_t i, auto lanes) { values += load(x + i, lanes); });
    const auto mean = static_cast<float>(sum(values) / static_cast<double>(args.dim));
    for_vectors(args.dim, [&](int64_t i, auto lanes) {
      const Floats centered = fill_missing(load(x + i, lanes), lanes, mean) - mean;
      squares += centered * centered;
    });
    const auto rstd = static_cast<float>(1.0 / __builtin_sqrt(sum(squares) / static_cast<double>(args.dim) + args.eps));
    args.mean[row] = mean;
    args.rstd[row] = rstd;
    for_vectors(args.dim,
                [&](int64_t i, auto lanes) { store(out + i, (load(x + i, lanes) - mean) * rstd * load(weight + i, lanes) + load(bias + i, lanes), lanes); });
  }
}

/// With h = (x - mean) * rstd and g = grad * weight:  dx = rstd * (g - mean(g) - h * mean(g * h)),  d_weight = sum over rows of grad * h,  d_bias of grad.
template <class G, class X, class W>
void layer_norm_backward_blocks(const LayerNormBackward& args, int64_t begin, int64_t end) {
  const auto* weight = static_cast<const W*>(args.weight.data);
  const int64_t dim = args.dim;
  for (int64_t block = begin; block < end; ++block) {
    float *of_weight = args.partial + block * 2 * dim, *of_bias = of_weight + dim;
    std::memset(of_weight, 0, 2 * sizeof(float) * dim);
    const int64_t first = block * args.block;
    const int64_t last = block_end(args, first);
    for (int64_t row = first; row < last; ++row) {
      const auto* grad = static_cast<const G*>(args.grad.data) + row * dim;
      const auto* x = static_cast<const X*>(args.x.data) + row * dim;
      auto* dx = static_cast<X*>(args.dx.data) + row * dim;
      const float mean = args.mean[row], rstd = args.rstd[row];
      Floats dot = {}, total = {};
      for_vectors(dim, [&](int64_t i, auto lanes) {
        const Floats given = load(grad + i, lanes), w = load(weight + i, lanes);
        const Floats scaled = given * ((load(x + i, lanes) - mean) * rstd);
        dot += scaled * w;
        total += given * w;
        store(of_weight + i, load(of_weight + i, lanes) + scaled, lanes);
        store(of_bias + i, load(of_bias + i, lanes) + given, lanes);
      });
      const auto along = static_cast<float>(sum(dot) / static_cast<double>(dim)), shift = static_cast<float>(sum(total) / static_cast<double>(dim));
      for_vectors(dim, [&](int64_t i, auto lanes) {
        const Floats g = load(grad + i, lanes) * load(weight + i, lanes);
        store(dx + i, rstd * (g - shift - (load(x + i, lanes) - mean) * rstd * along), lanes);
      });
    }
  }
}

template <class X, class A>
void add_row_elements(const AddRows& args, int64_t begin, int64_t end) {
  const auto* x = static_cast<const X*>(args.x.data) + begin * args.dim;
  const auto* added = static_cast<const A*>(args.added.data) + begin * args.dim;
  auto* out = static_cast<X*>(args.out.data) + begin * args.dim;
  for_vectors((end - begin) * args.dim, [&](int64_t i, auto lanes) { store(out + i, load(x + i, lanes) + load(added + i, lanes), lanes); });
}

template <class Y>
void sum_rows_columns(const float* rows, int64_t num_rows, int64_t dim, void* out, int64_t begin, int64_t end) {
  auto* to = static_cast<Y*>(out) + begin;
  for_vectors(end - begin, [&](int64_t i, auto lanes) {
    Floats total = {};
    for (int64_t row = 0; row < num_rows; ++row) total += load(rows + row * dim + begin + i, lanes);
    store(to + i, total, lanes);
  });
}

typedef float EightFloats __attribute__((vector_size(8 * sizeof(float))));
typedef double EightDoubles __attribute__((vector_size(8 * sizeof(double))));

/// Eight sums side by side, then a tree over them. A product of two floats is exact in a double, so it makes no difference where a compiler fuses
/// multiplication and addition.
TESSERA_INLINE double sum_of_squares(const float* x, int64_t n) {
  constexpr int64_t lanes = 8;
  EightDoubles sums = {};
  for (int64_t i = 0; i < n; i += lanes) {
    EightFloats values = {};
    if (n - i >= lanes) {
      std::memcpy(&values, x + i, sizeof(values));
    } else {
      std::memcpy(&values, x + i, sizeof(float) * static_cast<uint64_t>(n - i));
    }
    const EightDoubles wide = __builtin_convertvector(values, EightDoubles);
    sums += wide * wide;
  }
  return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

}  // namespace
}  // namespace tessera::kernels::cpu
