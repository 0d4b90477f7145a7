#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera {

/// Stable 64-bit hash of a string (XXH64, seed 0): the same on every machine and in every version.
uint64_t hash_string(std::string_view text);

/// Random numbers without state: the value of element i is a pure function of (seed, stream, i), so that any rank can draw any part of a tensor and
/// all layouts, thread counts and starting points agree bit for bit. Philox 4x32-10 (Salmon et al., SC'11); `stream` is the tensor's logical name.
///
/// Element i uses word i % 4 of counter block i / 4. Normals come in pairs (2k, 2k+1) by the Box-Muller transform from words of one block. All arithmetic is
/// basic IEEE single precision without contraction, with our own logarithm, sine and cosine: the bits do not depend on the machine's vector
/// width or its math library.
class CounterRng {
 public:
  CounterRng(uint64_t seed, std::string_view stream);

  uint32_t bits(uint64_t index) const;  ///< 32 random bits
  float uniform(uint64_t index) const;  ///< in [0, 1), a multiple of 2^-24
  float normal(uint64_t index) const;   ///< mean 0, standard deviation 1, |value| < 6.7

  /// out[k] = lo + (hi - lo) * uniform(first + k), computed in float, for k in [0, n). Parallel.
  void fill_uniform(float* out, uint64_t first, int64_t n, float lo, float hi) const;
  /// out[k] = mean + std * normal(first + k), computed in float, for k in [0, n). Parallel; 3 to 10 ns an element and core.
  void fill_normal(float* out, uint64_t first, int64_t n, float mean, float std) const;
  /// out[k] = bits(first + k). Parallel.
  void fill_bits(uint32_t* out, uint64_t first, int64_t n) const;

  uint64_t key() const { return key_; }  ///< what seed and stream were mixed into; CounterRng::from_key() makes an equal generator
  static CounterRng from_key(uint64_t key) { return CounterRng(key); }

 private:
  explicit CounterRng(uint64_t key) : key_(key) {}
  uint64_t key_;
};

/// One Philox 4x32-10 block: counter and key as in the Random123 paper. Used by kernels that draw in place.
std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

}  // namespace tessera
