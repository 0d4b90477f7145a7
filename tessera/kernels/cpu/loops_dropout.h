#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

namespace tessera::kernels::cpu {
namespace {

struct PhiloxWords {
  Words w[4];
};

TESSERA_INLINE void multiply(Words a, uint32_t b, Words& high, Words& low) {
  typedef uint64_t Longs __attribute__((vector_size(TESSERA_VECTOR_BYTES * 2)));
  const Longs product = __builtin_convertvector(a, Longs) * uint64_t{b};
  high = __builtin_convertvector(product >> 32, Words);
  low = a * b;
}

/// Philox 4x32-10 (Salmon et al., SC'11) of kLanes consecutive counters, the same numbers as tessera::CounterRng of this key.
TESSERA_INLINE PhiloxWords philox(uint64_t first_counter, uint64_t key) {
  Words low, high;
  for (int lane = 0; lane < kLanes; ++lane) {
    low[lane] = static_cast<uint32_t>(first_counter + lane);
    high[lane] = static_cast<uint32_t>((first_counter + lane) >> 32);
  }
  PhiloxWords c{{low, high, Words{}, Words{}}};
  auto k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
    Words high0, low0, high1, low1;
    multiply(c.w[0], 0xD2511F53u, high0, low0);
    multiply(c.w[2], 0xCD9E8D57u, high1, low1);
    c = {{high1 ^ c.w[1] ^ k0, low1, high0 ^ c.w[3] ^ k1, low0}};
  }
  return c;
}

/// Draws elements first, first + 1, ... of one row, kLanes counters (4 * kLanes elements) at a time. Element i is word i % 4 of counter i / 4, wherever the row
/// starts.
template <class T>
void dropout_rows(const Dropout& args, int64_t begin, int64_t end) {
  constexpr int64_t kBatch = 4 * kLanes;
  const float keep_scale = 1.0f / (1.0f - args.p);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(args.x.data) + row * args.dim;
    T* out = static_cast<T*>(args.out.data) + row * args.dim;
    const auto first = static_cast<uint64_t>(args.rows[row] * args.feature_total + args.feature_offset);
    float factor[kBatch];
    for (int64_t done = -static_cast<int64_t>(first % 4); done < args.dim; done += kBatch) {
      const PhiloxWords words = philox((first + done) / 4, args.key);
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int word = 0; word < 4; ++word) {
          const float uniform = static_cast<float>(static_cast<int32_t>(words.w[word][lane] >> 8)) * 0x1p-24f;
          factor[lane * 4 + word] = uniform >= args.p ? keep_scale : 0.0f;
        }
      }
      const int64_t from = done < 0 ? 0 : done;
      const int64_t to = done + kBatch < args.dim ? done + kBatch : args.dim;
      for_vectors(to - from, [&](int64_t i, auto lanes) { store(out + from + i, load(x + from + i, lanes) * load(factor + (from - done) + i, lanes), lanes); });
    }
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu
