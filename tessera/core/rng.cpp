// Compiled without contraction of a * b + c and without errno from sqrt (CMakeLists.txt): the first keeps the bits the same on every machine, the second lets
// the loops below become vector code.
#include "tessera/core/rng.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include <xxhash.h>

#include "tessera/core/parallel.h"

#if defined(__has_feature)
#define TESSERA_HAS_FEATURE(name) __has_feature(name)
#else
#define TESSERA_HAS_FEATURE(name) 0
#endif
// Clones are chosen while the loader relocates, before a sanitizer's runtime is ready: not under sanitizers.
#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && !TESSERA_HAS_FEATURE(address_sanitizer) && \
    !TESSERA_HAS_FEATURE(thread_sanitizer)
#define TESSERA_VECTOR_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define TESSERA_VECTOR_CLONES
#endif
#define TESSERA_INLINE inline __attribute__((always_inline))

// The hard part is not the random bits, which are integers, but normals with the same bits everywhere: logarithms and sines of math libraries differ by version
// and by vector width. Those here are short polynomials after an exact reduction, accurate to what single precision shows, without branches, so that a loop
// over blocks becomes vector code. Ends of a fill that share a block with what lies beside it are computed as whole blocks: the bits do not depend on where a
// fill begins.

namespace tessera {
namespace {

struct Block {
  uint32_t word[4];
};

/// Philox 4x32-10: ten rounds of two widening products, the key advanced by Weyl constants in between.
TESSERA_INLINE Block philox_block(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c0;
    const uint64_t b = uint64_t{0xCD9E8D57} * c2;
    const uint32_t n0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    const uint32_t n2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c0 = n0;
    c1 = static_cast<uint32_t>(b);
    c2 = n2;
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return {{c0, c1, c2, c3}};
}

TESSERA_INLINE Block block_of(uint64_t key, uint64_t block) {
  return philox_block(static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0, static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

TESSERA_INLINE float to_uniform(uint32_t word) { return static_cast<float>(static_cast<int32_t>(word >> 8)) * 0x1p-24f; }

/// -2 ln(u) for u in [2^-32, 1]: ln(2^e m) = e ln 2 + 2 atanh((m - 1) / (m + 1)) with m near 1, and five terms of the series of atanh.
TESSERA_INLINE float minus_two_log(float u) {
  // Subtracting the bits of sqrt(1/2) before the exponent is cut off leaves m in [sqrt(1/2), sqrt(2)).
  const int32_t bits = std::bit_cast<int32_t>(u);
  const int32_t exponent = (bits - 0x3f3504f3) >> 23;
  const float m = std::bit_cast<float>(bits - exponent * (1 << 23));
  const float s = (m - 1.0f) / (m + 1.0f);
  const float s2 = s * s;
  const float series = 1.0f + s2 * (1.0f / 3 + s2 * (1.0f / 5 + s2 * (1.0f / 7 + s2 * (1.0f / 9))));
  return -2.0f * (static_cast<float>(exponent) * 0.693147181f + 2.0f * s * series);
}

/// Cosine and sine of `turn` / 2^32 turns. The nearest quarter turn is taken off in integers, exactly; Taylor polynomials do the rest, in [-pi/4, pi/4).
TESSERA_INLINE void cos_sin(uint32_t turn, float& cosine, float& sine) {
  const uint32_t quarter = (turn + 0x20000000u) >> 30;
  const float x = static_cast<float>(static_cast<int32_t>(turn - (quarter << 30))) * 1.46291807927e-9f;  // 2 pi / 2^32
  const float x2 = x * x;
  const float s = x * (1.0f + x2 * (-1.0f / 6 + x2 * (1.0f / 120 + x2 * (-1.0f / 5040 + x2 * (1.0f / 362880)))));
  const float c = 1.0f + x2 * (-0.5f + x2 * (1.0f / 24 + x2 * (-1.0f / 720 + x2 * (1.0f / 40320))));
  const bool odd = quarter & 1;
  const float c_abs = odd ? s : c, s_abs = odd ? c : s;
  cosine = ((quarter + 1) & 2) ? -c_abs : c_abs;
  sine = (quarter & 2) ? -s_abs : s_abs;
}

/// Two independent normals from two words (Box and Muller, 1958).
TESSERA_INLINE void to_normals(uint32_t radius_word, uint32_t turn, float& first, float& second) {
  // The middle of each of 2^31 cells: never 0, and small enough to reach 6.6 standard deviations.
  const float u = (static_cast<float>(static_cast<int32_t>(radius_word >> 1)) + 0.5f) * 0x1p-31f;
  const float radius = std::sqrt(std::max(minus_two_log(u), 0.0f));
  float cosine, sine;
  cos_sin(turn, cosine, sine);
  first = radius * cosine;
  second = radius * sine;
}

TESSERA_INLINE void normals_of(const Block& block, float (&z)[4]) {
  to_normals(block.word[0], block.word[1], z[0], z[1]);
  to_normals(block.word[2], block.word[3], z[2], z[3]);
}

TESSERA_VECTOR_CLONES void normal_blocks(uint64_t key, uint64_t first, int64_t blocks, float* __restrict out, float mean, float std) {
  for (int64_t b = 0; b < blocks; ++b) {
    float z[4];
    normals_of(block_of(key, first + b), z);
    for (int i = 0; i < 4; ++i) out[4 * b + i] = mean + std * z[i];
  }
}

TESSERA_VECTOR_CLONES void uniform_blocks(uint64_t key, uint64_t first, int64_t blocks, float* __restrict out, float lo, float range) {
  for (int64_t b = 0; b < blocks; ++b) {
    const Block block = block_of(key, first + b);
    for (int i = 0; i < 4; ++i) out[4 * b + i] = lo + range * to_uniform(block.word[i]);
  }
}

TESSERA_VECTOR_CLONES void bit_blocks(uint64_t key, uint64_t first, int64_t blocks, uint32_t* __restrict out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const Block block = block_of(key, first + b);
    for (int i = 0; i < 4; ++i) out[4 * b + i] = block.word[i];
  }
}

/// Splits [first, first + n) into whole blocks, which `blocks(first block, number, out)` writes in parallel, and the partial blocks at both ends.
template <class T, class Blocks>
void fill(uint64_t first, int64_t n, T* out, const Blocks& blocks) {
  const auto partial = [&](uint64_t index, int64_t count, T* to) {
    T whole[4];
    blocks(index / 4, 1, whole);
    std::copy_n(whole + index % 4, count, to);
  };
  const int64_t head = std::min<int64_t>(n, (4 - first % 4) % 4);
  if (head > 0) partial(first, head, out);
  const uint64_t first_block = (first + head) / 4;
  const int64_t whole_blocks = (n - head) / 4;
  constexpr int64_t grain = 2048;  // blocks: some ten microseconds of work
  parallel_for(0, whole_blocks, grain, [&](int64_t begin, int64_t end) { blocks(first_block + begin, end - begin, out + head + 4 * begin); });
  const int64_t done = head + 4 * whole_blocks;
  if (done < n) partial(first + done, n - done, out + done);
}

}  // namespace

CounterRng::CounterRng(uint64_t seed, std::string_view stream) : key_(XXH64(stream.data(), stream.size(), seed)) {}

uint32_t CounterRng::bits(uint64_t index) const { return block_of(key_, index / 4).word[index % 4]; }

float CounterRng::uniform(uint64_t index) const { return to_uniform(bits(index)); }

float CounterRng::normal(uint64_t index) const {
  float z[4];
  normals_of(block_of(key_, index / 4), z);
  return z[index % 4];
}

void CounterRng::fill_uniform(float* out, uint64_t first, int64_t n, float lo, float hi) const {
  fill(first, n, out, [&](uint64_t block, int64_t count, float* to) { uniform_blocks(key_, block, count, to, lo, hi - lo); });
}

void CounterRng::fill_normal(float* out, uint64_t first, int64_t n, float mean, float std) const {
  fill(first, n, out, [&](uint64_t block, int64_t count, float* to) { normal_blocks(key_, block, count, to, mean, std); });
}

void CounterRng::fill_bits(uint32_t* out, uint64_t first, int64_t n) const {
  fill(first, n, out, [&](uint64_t block, int64_t count, uint32_t* to) { bit_blocks(key_, block, count, to); });
}

std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  const Block block = philox_block(counter[0], counter[1], counter[2], counter[3], key[0], key[1]);
  return {block.word[0], block.word[1], block.word[2], block.word[3]};
}

}  // namespace tessera
