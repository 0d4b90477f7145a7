#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

namespace tessera::kernels::cpu {
namespace {

struct NoCopy {};

/// Values rounded to what lies in a copy, and back.
TESSERA_INLINE Halves rounded_as(const BFloat16*, Floats values) { return narrow_exactly(values); }
TESSERA_INLINE Halves rounded_as(const Half*, Floats values) { return narrow_fp16(values); }
TESSERA_INLINE Floats widened_as(const BFloat16*, Halves halves) { return widen(halves); }
TESSERA_INLINE Floats widened_as(const Half*, Halves halves) { return widen_fp16(halves); }

/// What the parameter is before its update: where it does not round to its copy, that was written since, and says.
template <class C>
TESSERA_INLINE Floats followed(const C* copy, Floats parameter, Floats shown) {
  return select(widened_as(copy, rounded_as(copy, parameter)) == shown, parameter, shown);
}

/// Full vectors and the rest go through one body, so that an element has the same bits wherever a part of a tensor begins or ends.
template <class G, class C>
void adamw_elements(const AdamW& args, int64_t begin, int64_t end) {
  constexpr bool kCopies = !__is_same(C, NoCopy);
  const auto* const gradient = static_cast<const G*>(args.gradient.data);
  auto* const copy = static_cast<C*>(args.copy.data);
  const auto update = [&](int64_t i, auto lanes) __attribute__((always_inline)) {
    const Floats g = load(gradient + i, lanes) * args.scale;
    const Floats average = multiply_add(set(args.beta1), load(args.exp_avg + i, lanes), args.rest1 * g);
    const Floats square = multiply_add(set(args.beta2), load(args.exp_avg_sq + i, lanes), args.rest2 * g * g);
    Floats parameter = load(args.parameter + i, lanes);
    if constexpr (kCopies) parameter = followed(copy, parameter, load(copy + i, lanes));
    const Floats change = args.step_size * average / multiply_add(root(square), set(args.inverse_root), set(args.eps));
    const Floats updated = multiply_add(set(args.kept), parameter, -change);
    store(args.exp_avg + i, average, lanes);
    store(args.exp_avg_sq + i, square, lanes);
    store(args.parameter + i, updated, lanes);
    if constexpr (kCopies) store_halves(copy + i, rounded_as(copy, updated), lanes);
  };
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) update(i, AllLanes{});
  if (i < end) update(i, FirstLanes{static_cast<int>(end - i)});
}

}  // namespace
}  // namespace tessera::kernels::cpu
