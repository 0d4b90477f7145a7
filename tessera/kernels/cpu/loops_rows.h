#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

namespace tessera::kernels::cpu {
namespace {

/// Each place copies the row of its choice's token, times the choice's weight where there are weights.
template <class T>
void gather_places(const GatherRows& args, int64_t begin, int64_t end) {
  for (int64_t place = begin; place < end; ++place) {
    const int64_t choice = args.order[place];
    T* out = static_cast<T*>(args.out.data) + place * args.dim;
    if (choice < 0) {
      std::memset(out, 0, sizeof(T) * static_cast<size_t>(args.dim));
      continue;
    }
    const T* x = static_cast<const T*>(args.x.data) + choice / args.choices * args.stride;
    if (args.weights == nullptr) {
      std::memcpy(out, x, sizeof(T) * static_cast<size_t>(args.dim));
      continue;
    }
    const float weight = args.weights[choice];
    for_vectors(args.dim, [&](int64_t i, auto lanes) { store(out + i, load(x + i, lanes) * weight, lanes); });
  }
}

/// Each token adds its places up in the order of its choices.
template <class T>
void combine_tokens(const CombineRows& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t* slots = args.slots + token * args.choices;
    T* out = static_cast<T*>(args.out.data) + token * args.dim;
    for_vectors(args.dim, [&](int64_t i, auto lanes) {
      Floats sum = {};
      for (int64_t k = 0; k < args.choices; ++k) {
        if (slots[k] < 0) continue;
        const Floats row = load(static_cast<const T*>(args.rows.data) + slots[k] * args.stride + i, lanes);
        sum += args.weights == nullptr ? row : row * args.weights[token * args.choices + k];
      }
      store(out + i, sum, lanes);
    });
  }
}

/// The product of each place with the gradient of its token.
template <class T>
void weigh_tokens(const WeighRows& args, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const T* grad = static_cast<const T*>(args.grad.data) + token * args.grad_stride;
    for (int64_t k = 0; k < args.choices; ++k) {
      const int64_t slot = args.slots[token * args.choices + k];
      Floats products = {};
      if (slot >= 0) {
        const T* row = static_cast<const T*>(args.rows.data) + slot * args.stride;
        for_vectors(args.dim, [&](int64_t i, auto lanes) { products += load(row + i, lanes) * load(grad + i, lanes); });
      }
      args.out[token * args.choices + k] = static_cast<float>(sum(products));
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu
