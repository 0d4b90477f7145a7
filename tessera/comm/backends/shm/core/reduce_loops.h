#pragma once

// The loops of reduce.h, included by one file per instruction set; everything here has internal linkage, so that no file's code replaces another's.

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "tessera/comm/backends/shm/core/reduce.h"

namespace tessera::comm::shm {
namespace {

/// How a type lies in memory, and in what it is accumulated.
template <class T>
struct Plain {
  using Stored = T;
  using Wide = T;
  static Wide load(Stored value) { return value; }
  static Stored store(Wide value) { return value; }
};

struct Bools {
  using Stored = uint8_t;
  using Wide = uint8_t;
  static Wide load(Stored value) { return value != 0; }
  static Stored store(Wide value) { return value; }
};

struct BFloat16s {
  using Stored = uint16_t;
  using Wide = float;
  static Wide load(Stored value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }
  static Stored store(Wide value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
  }
};

struct Halves {
  using Stored = uint16_t;
  using Wide = float;
  // Exponent and mantissa move to fp32's place; the power of two makes up for the other bias, subnormals included.
  static Wide load(Stored value) {
    const uint32_t magnitude = static_cast<uint32_t>(value & 0x7fffu) << 13;
    const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
    const uint32_t special = magnitude | 0x7f800000u;  // infinity, NaN
    const uint32_t bits = magnitude >= (0x7c00u << 13) ? special : std::bit_cast<uint32_t>(scaled);
    return std::bit_cast<float>(bits | static_cast<uint32_t>(value & 0x8000u) << 16);
  }
  static Stored store(Wide value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu, sign = (bits >> 16) & 0x8000u;
    const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14 adding 0.5 leaves the subnormal's bits, rounded, at the end of the sum.
    const uint32_t subnormal = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
    uint32_t result = magnitude < (113u << 23) ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;  // 65520 and more
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return static_cast<uint16_t>(result | sign);
  }
};

template <class T>
T combine_sum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<std::make_unsigned_t<T>>(a) + static_cast<std::make_unsigned_t<T>>(b));  // wraps
  } else {
    return a + b;
  }
}

template <class T>
T combine_product(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  } else {
    return a * b;
  }
}

// Where `a` is a NaN it stays, and where `b` is one both comparisons are false.
template <class T>
T combine_min(T a, T b) {
  return (a < b || a != a) ? a : b;
}

template <class T>
T combine_max(T a, T b) {
  return (a > b || a != a) ? a : b;
}

template <class Format, Reduction kReduction>
typename Format::Wide combine(typename Format::Wide a, typename Format::Wide b) {
  if constexpr (kReduction == Reduction::Min) return combine_min(a, b);
  if constexpr (kReduction == Reduction::Max) return combine_max(a, b);
  if constexpr (std::is_same_v<Format, Bools>) {
    if constexpr (kReduction == Reduction::Sum) return a | b;
    return a & b;
  } else {
    if constexpr (kReduction == Reduction::Sum) return combine_sum(a, b);
    return combine_product(a, b);
  }
}

template <class Format, Reduction kReduction>
void reduce_two(typename Format::Stored* out, const typename Format::Stored* a, const typename Format::Stored* b, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = Format::store(combine<Format, kReduction>(Format::load(a[i]), Format::load(b[i])));
}

/// Sums of many sources wait in a block that stays in the first cache; only then may `out`, which can be a source, be written.
template <class Format, Reduction kReduction>
void reduce_many(typename Format::Stored* out, const void* const* sources, int n, size_t count) {
  using Stored = typename Format::Stored;
  constexpr size_t kBlock = 1024;
  typename Format::Wide sum[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t length = std::min(kBlock, count - begin);
    const auto* const first = static_cast<const Stored*>(sources[0]) + begin;
    const auto* const second = static_cast<const Stored*>(sources[1]) + begin;
    for (size_t i = 0; i < length; ++i) sum[i] = combine<Format, kReduction>(Format::load(first[i]), Format::load(second[i]));
    for (int source = 2; source < n; ++source) {
      const auto* const next = static_cast<const Stored*>(sources[source]) + begin;
      for (size_t i = 0; i < length; ++i) sum[i] = combine<Format, kReduction>(sum[i], Format::load(next[i]));
    }
    for (size_t i = 0; i < length; ++i) out[begin + i] = Format::store(sum[i]);
  }
}

template <class Format, Reduction kReduction>
void reduce(void* out, const void* const* sources, int n, size_t count) {
  using Stored = typename Format::Stored;
  if (n == 2) {
    reduce_two<Format, kReduction>(static_cast<Stored*>(out), static_cast<const Stored*>(sources[0]), static_cast<const Stored*>(sources[1]), count);
  } else {
    reduce_many<Format, kReduction>(static_cast<Stored*>(out), sources, n, count);
  }
}

template <class Format>
constexpr void fill(ReduceLoop (&row)[kReductions]) {
  row[static_cast<int>(Reduction::Sum)] = reduce<Format, Reduction::Sum>;
  row[static_cast<int>(Reduction::Product)] = reduce<Format, Reduction::Product>;
  row[static_cast<int>(Reduction::Min)] = reduce<Format, Reduction::Min>;
  row[static_cast<int>(Reduction::Max)] = reduce<Format, Reduction::Max>;
}

constexpr ReduceLoops make_reduce_loops() {
  ReduceLoops table{};
  const auto row = [&](Type type) -> ReduceLoop(&)[kReductions] { return table.loops[static_cast<int>(type)]; };
  fill<Plain<float>>(row(Type::Float));
  fill<Plain<double>>(row(Type::Double));
  fill<Halves>(row(Type::Half));
  fill<BFloat16s>(row(Type::BFloat16));
  fill<Plain<int8_t>>(row(Type::Int8));
  fill<Plain<int16_t>>(row(Type::Int16));
  fill<Plain<int32_t>>(row(Type::Int32));
  fill<Plain<int64_t>>(row(Type::Int64));
  fill<Plain<uint8_t>>(row(Type::UInt8));
  fill<Bools>(row(Type::Bool));
  return table;
}

}  // namespace
}  // namespace tessera::comm::shm
