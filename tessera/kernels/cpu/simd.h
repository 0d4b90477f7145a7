#pragma once

// Portable vectors for the loops of this folder. Included only by loops_<isa>.cpp, which the build compiles with that ISA's flags, without precompiled
// header and without any library header that holds inline functions: such a function, compiled for AVX-512 here, could be the one copy that the linker keeps
// for everyone. For the same reason everything lives in an unnamed namespace.

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>  // its functions are always inlined, so none is left for a linker to keep
#endif
#if defined(__AVX512F__)
#define TESSERA_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define TESSERA_VECTOR_BYTES 32
#else
#define TESSERA_VECTOR_BYTES 16
#endif
#define TESSERA_INLINE inline __attribute__((always_inline))

namespace tessera::kernels::cpu {
namespace {

constexpr int kLanes = TESSERA_VECTOR_BYTES / 4;
typedef float Floats __attribute__((vector_size(TESSERA_VECTOR_BYTES)));
typedef int32_t Ints __attribute__((vector_size(TESSERA_VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(TESSERA_VECTOR_BYTES)));
typedef uint16_t Halves __attribute__((vector_size(TESSERA_VECTOR_BYTES / 2)));

/// A bfloat16 in memory: the upper half of a float.
struct BFloat16 {
  uint16_t bits;
};

/// An fp16 in memory.
struct Half {
  uint16_t bits;
};

template <class To, class From>
TESSERA_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

TESSERA_INLINE Floats set(float value) { return Floats{} + value; }
TESSERA_INLINE Floats select(Ints condition, Floats yes, Floats no) {
  return bits_as<Floats>((bits_as<Ints>(yes) & condition) | (bits_as<Ints>(no) & ~condition));
}
TESSERA_INLINE Floats maximum(Floats a, Floats b) { return select(a > b, a, b); }

/// a b + c, rounded once where there is an instruction for it. Of a sum of two products a compiler is free to round either first, and may do so otherwise in
/// each copy of a loop's body: where an element has to have the same bits in all of them, sums are said by this.
TESSERA_INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return bits_as<Floats>(_mm512_fmadd_ps(bits_as<__m512>(a), bits_as<__m512>(b), bits_as<__m512>(c)));
#elif defined(__FMA__)
  return bits_as<Floats>(_mm256_fmadd_ps(bits_as<__m256>(a), bits_as<__m256>(b), bits_as<__m256>(c)));
#else
  return a * b + c;
#endif
}

TESSERA_INLINE Floats widen(Halves halves) { return bits_as<Floats>(__builtin_convertvector(halves, Words) << 16); }
/// Round to nearest, ties to even; NaN stays NaN.
TESSERA_INLINE Halves narrow_exactly(Floats values) {
  const Words bits = bits_as<Words>(values);
  const Words rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  const Words is_nan = bits_as<Words>(values != values);
  return __builtin_convertvector(((rounded & ~is_nan) | (is_nan & 0x7fc00000u)) >> 16, Halves);
}
/// The same, by the instruction where there is one: it saves a third of a gated unit's time, and takes numbers below 1.2e-38 for zero.
TESSERA_INLINE Halves narrow(Floats values) {
#if defined(__AVX512BF16__)
  return bits_as<Halves>(_mm512_cvtneps_pbh(bits_as<__m512>(values)));
#else
  return narrow_exactly(values);
#endif
}

/// fp16, whose subnormal numbers fp32 has as normal ones: scaling by a power of two leaves the conversion to the multiplier.
TESSERA_INLINE Floats widen_fp16(Halves halves) {
#if defined(__AVX512F__)
  return bits_as<Floats>(_mm512_cvtph_ps(bits_as<__m256i>(halves)));
#else
  const Words bits = __builtin_convertvector(halves, Words), magnitude = bits & 0x7fffu;
  const Floats scaled = bits_as<Floats>(magnitude << 13) * 0x1p112f;
  const Words endless = bits_as<Words>(magnitude >= 0x7c00u) & 0x7f800000u;  // infinity and NaN keep their exponent
  return bits_as<Floats>(bits_as<Words>(scaled) | endless | ((bits & 0x8000u) << 16));
#endif
}
/// Round to nearest, ties to even, as libtorch does.
TESSERA_INLINE Halves narrow_fp16(Floats values) {
#if defined(__AVX512F__)
  return bits_as<Halves>(_mm512_cvtps_ph(bits_as<__m512>(values), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const Words bits = bits_as<Words>(values), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const Words normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;      // the exponent's offset less 112, and half of what is cut off
  const Words small = bits_as<Words>(bits_as<Floats>(magnitude) + 0.5f) - 0x3f000000u;  // the adder rounds to 2^-24
  const Words endless = (bits_as<Words>(magnitude > 0x7f800000u) & 0x0200u) + 0x7c00u;
  const Words is_small = bits_as<Words>(magnitude < 0x38800000u), is_large = bits_as<Words>(magnitude >= 0x47800000u);
  return __builtin_convertvector(sign | (small & is_small) | (endless & is_large) | (normal & ~is_small & ~is_large), Halves);
#endif
}

/// Which lanes exist: all, or the first `count` at the end of a row.
struct AllLanes {};
struct FirstLanes {
  int count;
};

TESSERA_INLINE Floats load(const float* from, AllLanes) {
  Floats values;
  std::memcpy(&values, from, sizeof(values));
  return values;
}
TESSERA_INLINE Floats load(const float* from, FirstLanes lanes) {
  Floats values = {};
  std::memcpy(&values, from, sizeof(float) * lanes.count);
  return values;
}

/// Numbers of 16 bits as they are.
template <class T>
TESSERA_INLINE Halves load_halves(const T* from, AllLanes) {
  static_assert(sizeof(T) == 2);
  Halves halves;
  std::memcpy(&halves, from, sizeof(halves));
  return halves;
}
template <class T>
TESSERA_INLINE Halves load_halves(const T* from, FirstLanes lanes) {
  Halves halves = {};
  std::memcpy(&halves, from, sizeof(T) * lanes.count);
  return halves;
}
template <class T>
TESSERA_INLINE void store_halves(T* to, Halves halves, AllLanes) {
  static_assert(sizeof(T) == 2);
  std::memcpy(to, &halves, sizeof(halves));
}
template <class T>
TESSERA_INLINE void store_halves(T* to, Halves halves, FirstLanes lanes) {
  std::memcpy(to, &halves, sizeof(T) * lanes.count);
}

template <class Lanes>
TESSERA_INLINE Floats load(const BFloat16* from, Lanes lanes) {
  return widen(load_halves(from, lanes));
}
template <class Lanes>
TESSERA_INLINE Floats load(const Half* from, Lanes lanes) {
  return widen_fp16(load_halves(from, lanes));
}
TESSERA_INLINE void store(float* to, Floats values, AllLanes) { std::memcpy(to, &values, sizeof(values)); }
TESSERA_INLINE void store(float* to, Floats values, FirstLanes lanes) { std::memcpy(to, &values, sizeof(float) * lanes.count); }
template <class Lanes>
TESSERA_INLINE void store(BFloat16* to, Floats values, Lanes lanes) {
  store_halves(to, narrow(values), lanes);
}

TESSERA_INLINE float load_one(const float* from) { return *from; }
TESSERA_INLINE float load_one(const BFloat16* from) { return bits_as<float>(uint32_t{from->bits} << 16); }
TESSERA_INLINE void store_one(float* to, float value) { *to = value; }
TESSERA_INLINE void store_one(BFloat16* to, float value) { store(to, set(value), FirstLanes{1}); }

/// body(i, lanes) for i = 0, kLanes, ... over n elements; the last call may have FirstLanes.
template <class Body>
TESSERA_INLINE void for_vectors(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, AllLanes{});
  if (i < n) body(i, FirstLanes{static_cast<int>(n - i)});
}

/// Lanes that do not exist become `value`.
TESSERA_INLINE Floats fill_missing(Floats values, AllLanes, float) { return values; }
TESSERA_INLINE Floats fill_missing(Floats values, FirstLanes lanes, float value) {
  for (int lane = lanes.count; lane < kLanes; ++lane) values[lane] = value;
  return values;
}

/// Sum and maximum over lanes, in lane order.
TESSERA_INLINE double sum(Floats values) {
  double total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += values[lane];
  return total;
}
TESSERA_INLINE float maximum(Floats values) {
  float most = values[0];
  for (int lane = 1; lane < kLanes; ++lane) most = values[lane] > most ? values[lane] : most;
  return most;
}

/// e^x for -87 <= x <= 88, as exp().
TESSERA_INLINE Floats exp_within(Floats x) {
  constexpr float kRound = 12583039.0f;  // 1.5 * 2^23 + 127: adding it leaves the rounded integer, as an exponent, in the low bits of the mantissa
  const Floats shifted = x * 1.44269504f + kRound;
  const Floats n = shifted - kRound;
  const Floats reduced = (x - n * 0.693359375f) + n * 2.12194440e-4f;  // ln 2 in two parts; n times the first is exact
  Floats p = reduced * (1.0f / 5040) + 1.0f / 720;
  p = p * reduced + 1.0f / 120;
  p = p * reduced + 1.0f / 24;
  p = p * reduced + 1.0f / 6;
  p = p * reduced + 0.5f;
  p = p * reduced + 1.0f;
  p = p * reduced + 1.0f;
  return p * bits_as<Floats>(bits_as<Words>(shifted) << 23);  // a product, so that every NaN stays one: exponents added to its bits may make a number of it
}

/// e^x within 1.5 units in the last place; 0 below -87, e^88 above 88, NaN for NaN. x = n ln 2 + r with |r| <= ln 2 / 2; Taylor's polynomial of degree 7 leaves
/// 5e-9.
TESSERA_INLINE Floats exp(Floats x) { return select(x < -87.0f, Floats{}, exp_within(select(x > 88.0f, set(88.0f), x))); }

TESSERA_INLINE Floats root(Floats x) {
  Floats roots;
  for (int lane = 0; lane < kLanes; ++lane) roots[lane] = __builtin_sqrtf(x[lane]);
  return roots;
}

TESSERA_INLINE Floats sigmoid(Floats x) {
  const Floats bounded = select(x < -87.0f, set(-87.0f), select(x > 87.0f, set(87.0f), x));  // NaN stays
  return 1.0f / (1.0f + exp_within(-bounded));
}

}  // namespace
}  // namespace tessera::kernels::cpu
