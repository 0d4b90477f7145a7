#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

namespace tessera::kernels::cpu {
namespace {

/// An activation x s(u(x)) with the sigmoid s (kernels/activation.h): u, and its derivative.
struct SiluGate {
  static TESSERA_INLINE Floats u(Floats x) { return x; }
  static TESSERA_INLINE Floats slope(Floats) { return set(1.0f); }
};
struct GeluGate {
  static constexpr float kScale = 1.5957691216f, kCubic = 0.044715f;  // 2 sqrt(2 / pi)
  static TESSERA_INLINE Floats u(Floats x) { return x * kScale * (1.0f + kCubic * (x * x)); }
  static TESSERA_INLINE Floats slope(Floats x) { return kScale * (1.0f + 3.0f * kCubic * (x * x)); }
};

template <class T, class Gate>
void swiglu_rows(const SwiGlu& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.gate.data) + row * args.gate_stride;
    const T* up = static_cast<const T*>(args.up.data) + row * args.up_stride;
    T* out = static_cast<T*>(args.out.data) + row * args.dim;
    for_vectors(args.dim, [&](int64_t i, auto lanes) {
      const Floats g = load(gate + i, lanes);
      store(out + i, g * sigmoid(Gate::u(g)) * load(up + i, lanes), lanes);
    });
  }
}

/// With s = sigmoid(u(g)):  d_up = grad * g * s,  d_gate = grad * up * s * (1 + g * (1 - s) * u'(g)).
template <class T, class Gate>
void swiglu_backward_rows(const SwiGluBackward& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* grad = static_cast<const T*>(args.grad.data) + row * args.dim;
    const T* gate = static_cast<const T*>(args.gate.data) + row * args.gate_stride;
    const T* up = static_cast<const T*>(args.up.data) + row * args.up_stride;
    T* d_gate = static_cast<T*>(args.d_gate.data) + row * args.dim;
    T* d_up = static_cast<T*>(args.d_up.data) + row * args.dim;
    for_vectors(args.dim, [&](int64_t i, auto lanes) {
      const Floats g = load(gate + i, lanes);
      const Floats s = sigmoid(Gate::u(g));
      const Floats scaled = load(grad + i, lanes) * s;
      store(d_up + i, scaled * g, lanes);
      store(d_gate + i, scaled * load(up + i, lanes) * (1.0f + g * (1.0f - s) * Gate::slope(g)), lanes);
    });
  }
}

/// A bias that has no data is none, and then nobody asks for its gradient's partial sums.
template <class X, class B, class Gate>
void bias_activation_rows(const BiasActivation& args, int64_t begin, int64_t end) {
  const auto* const bias = static_cast<const B*>(args.bias.data);
  for (int64_t row = begin; row < end; ++row) {
    const X* x = static_cast<const X*>(args.x.data) + row * args.dim;
    X* out = static_cast<X*>(args.out.data) + row * args.dim;
    for_vectors(args.dim, [&](int64_t i, auto lanes) {
      Floats value = load(x + i, lanes);
      if (bias != nullptr) value += load(bias + i, lanes);
      store(out + i, value * sigmoid(Gate::u(value)), lanes);
    });
  }
}

template <class X, class B, class Gate>
void bias_activation_backward_blocks(const BiasActivationBackward& args, int64_t begin, int64_t end) {
  const auto* const bias = static_cast<const B*>(args.bias.data);
  const int64_t dim = args.dim;
  for (int64_t block = begin; block < end; ++block) {
    float* const partial = bias == nullptr ? nullptr : args.partial + block * dim;
    if (partial != nullptr) std::memset(partial, 0, sizeof(float) * dim);
    const int64_t last = (block + 1) * args.block < args.rows ? (block + 1) * args.block : args.rows;
    for (int64_t row = block * args.block; row < last; ++row) {
      const X* grad = static_cast<const X*>(args.grad.data) + row * dim;
      const X* x = static_cast<const X*>(args.x.data) + row * dim;
      X* dx = static_cast<X*>(args.dx.data) + row * dim;
      for_vectors(dim, [&](int64_t i, auto lanes) {
        Floats value = load(x + i, lanes);
        if (bias != nullptr) value += load(bias + i, lanes);
        const Floats s = sigmoid(Gate::u(value));
        const Floats slope = load(grad + i, lanes) * s * (1.0f + value * (1.0f - s) * Gate::slope(value));
        store(dx + i, slope, lanes);
        if (partial != nullptr) store(partial + i, load(partial + i, lanes) + slope, lanes);
      });
    }
  }
}

/// All tokens of an id are added up in fp32 before a sum in fewer bits is rounded, once.
template <class T, class Sum>
void embedding_gradient_columns(const EmbeddingGradient& args, int64_t begin, int64_t end) {
  const T* const rows = static_cast<const T*>(args.rows.data) + begin;
  for (int64_t first = 0, last = 0; first < args.count; first = last) {
    const int64_t id = args.ids[args.order[first]];
    while (last < args.count && args.ids[args.order[last]] == id) ++last;
    Sum* const to = static_cast<Sum*>(args.sum.data) + id * args.dim + begin;
    for_vectors(end - begin, [&](int64_t i, auto lanes) {
      Floats sum = load(to + i, lanes);
      for (int64_t n = first; n < last; ++n) sum += load(rows + args.order[n] * args.dim + i, lanes);
      store(to + i, sum, lanes);
    });
  }
}

template <class T>
void rope_tokens(const Rope& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t batch = token / args.tokens, position = token % args.tokens;
    const float* cos = args.cos + batch * args.table_batch_stride + position * args.half;
    const float* sin = args.sin + batch * args.table_batch_stride + position * args.half;
    for (int64_t head = 0; head < args.heads; ++head) {
      const T* x = static_cast<const T*>(args.x.data) + batch * args.batch_stride + position * args.token_stride + head * args.head_stride;
      T* out = static_cast<T*>(args.out.data) + (token * args.heads + head) * 2 * args.half;
      for_vectors(args.half, [&](int64_t i, auto lanes) {
        const Floats c = load(cos + i, lanes), s = load(sin + i, lanes) * args.sign;
        const Floats x1 = load(x + i, lanes), x2 = load(x + args.half + i, lanes);
        store(out + i, x1 * c - x2 * s, lanes);
        store(out + args.half + i, x2 * c + x1 * s, lanes);
      });
    }
  }
}

template <class T>
void accumulate_elements(float* sum, const void* term, bool first, int64_t begin, int64_t end) {
  const T* from = static_cast<const T*>(term) + begin;
  float* to = sum + begin;
  if (first) {
    for_vectors(end - begin, [&](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
  } else {
    for_vectors(end - begin, [&](int64_t i, auto lanes) { store(to + i, load(to + i, lanes) + load(from + i, lanes), lanes); });
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu
