#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

namespace tessera::kernels::cpu {
namespace {

template <class T>
void swiglu_rows(const SwiGlu& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* gate = static_cast<const T*>(args.gate.data) + row * args.gate_stride;
    const T* up = static_cast<const T*>(args.up.data) + row * args.up_stride;
    T* out = static_cast<T*>(args.out.data) + row * args.dim;
    for_vectors(args.dim, [&](int64_t i, auto lanes) {
      const Floats g = load(gate + i, lanes);
      store(out + i, g * sigmoid(g) * load(up + i, lanes), lanes);
    });
  }
}

/// With s = sigmoid(g):  d_up = grad * g * s,  d_gate = grad * up * s * (1 + g * (1 - s)).
template <class T>
void swiglu_backward_rows(const SwiGluBackward& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* grad = static_cast<const T*>(args.grad.data) + row * args.dim;
    const T* gate = static_cast<const T*>(args.gate.data) + row * args.gate_stride;
    const T* up = static_cast<const T*>(args.up.data) + row * args.up_stride;
    T* d_gate = static_cast<T*>(args.d_gate.data) + row * args.dim;
    T* d_up = static_cast<T*>(args.d_up.data) + row * args.dim;
    for_vectors(args.dim, [&](int64_t i, auto lanes) {
      const Floats g = load(gate + i, lanes);
      const Floats s = sigmoid(g);
      const Floats scaled = load(grad + i, lanes) * s;
      store(d_up + i, scaled * g, lanes);
      store(d_gate + i, scaled * load(up + i, lanes) * (1.0f + g * (1.0f - s)), lanes);
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
