#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

// NF4 is a table of 16 numbers: with AVX-512 one register, from which a permutation takes 16 at a time.

namespace tessera::kernels::cpu {
namespace {

template <class T>
TESSERA_INLINE void decode_one(const QuantizedRow& args, int64_t j, float scale) {
  const uint8_t code = args.is_nf4 ? args.codes[j / 2] : args.codes[j];
  const float number = !args.is_nf4 ? static_cast<float>(static_cast<int8_t>(code)) : args.numbers[j % 2 == 0 ? code >> 4 : code & 15];
  store_one(static_cast<T*>(args.out.data) + j, number * scale);
}

/// From element j on as many as whole vectors hold; returns where they end. j is even.
template <class T>
TESSERA_INLINE int64_t decode_nf4(const QuantizedRow& args, int64_t j, int64_t stop, float scale) {
#if defined(__AVX512F__)
  T* const out = static_cast<T*>(args.out.data);
  Floats numbers;
  std::memcpy(&numbers, args.numbers, sizeof(numbers));
  for (; j + kLanes <= stop; j += kLanes) {
    const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(args.codes + j / 2));
    const __m128i low_bits = _mm_set1_epi8(15);
    const __m128i codes = _mm_unpacklo_epi8(_mm_and_si128(_mm_srli_epi16(pairs, 4), low_bits), _mm_and_si128(pairs, low_bits));
    store(out + j, bits_as<Floats>(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(codes), bits_as<__m512>(numbers))) * scale, AllLanes{});
  }
#endif
  return j;
}

template <class T>
TESSERA_INLINE int64_t decode_int8(const QuantizedRow& args, int64_t j, int64_t stop, float scale) {
  typedef int8_t Bytes __attribute__((vector_size(kLanes)));
  T* const out = static_cast<T*>(args.out.data);
  for (; j + kLanes <= stop; j += kLanes) {
    Bytes codes;
    std::memcpy(&codes, args.codes + j, sizeof(codes));
    store(out + j, __builtin_convertvector(__builtin_convertvector(codes, Ints), Floats) * scale, AllLanes{});
  }
  return j;
}

template <class T>
void dequantize_row(const QuantizedRow& args) {
  for (int64_t j = 0, k = 0; j < args.columns; ++k) {
    const int64_t end = (k + 1) * args.block - args.offset, stop = end < args.columns ? end : args.columns;
    const float scale = args.is_nf4 ? args.scales[k] : args.scales[k] / 127;
    if (args.is_nf4 && j % 2 == 1 && j < stop) decode_one<T>(args, j++, scale);
    j = args.is_nf4 ? decode_nf4<T>(args, j, stop, scale) : decode_int8<T>(args, j, stop, scale);
    for (; j < stop; ++j) decode_one<T>(args, j, scale);
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu
