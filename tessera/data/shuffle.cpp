#include "tessera/data/shuffle.h"

#include <algorithm>
#include <bit>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

/// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): every input bit reaches every output bit.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

Permutation::Permutation(int64_t size, uint64_t seed, uint64_t epoch) : size_(size) {
  invariant(size >= 1, "a permutation of ", size, " elements");
  half_bits_ = std::max(1, (static_cast<int>(std::bit_width(static_cast<uint64_t>(size - 1))) + 1) / 2);
  mask_ = (uint64_t{1} << half_bits_) - 1;
  constexpr uint64_t golden = 0x9e3779b97f4a7c15;  // 2^64 / the golden ratio: SplitMix64's stride
  uint64_t state = mix(seed + golden) ^ mix(mix(epoch + golden) + golden);
  for (uint64_t& key : keys_) key = mix(state += golden);
}

int64_t Permutation::operator()(int64_t index) const {
  uint64_t x = static_cast<uint64_t>(index);
  do {
    uint64_t left = x >> half_bits_, right = x & mask_;
    for (uint64_t key : keys_) {
      const uint64_t swapped = left ^ (mix(right + key) & mask_);
      left = right;
      right = swapped;
    }
    x = left << half_bits_ | right;
  } while (x >= static_cast<uint64_t>(size_));
  return static_cast<int64_t>(x);
}

}  // namespace tessera::data
