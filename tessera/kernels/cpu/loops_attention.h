#pragma once

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/loops_panels.h"

// What attention does between its products, on a block of scores that lies transposed, a key a row: what belongs to a query (its log-sum-exp, its delta) is a
// vector then, and the block is what the next products read from the left, as it is.

namespace tessera::kernels::cpu {
namespace {

TESSERA_INLINE Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

/// Which of the queries from `query` on see a key that query `first` is the first to see.
TESSERA_INLINE Ints sees(int64_t query, int64_t first) {
  const int64_t behind = first - query;
  return lane_numbers() >= Ints{} + static_cast<int32_t>(behind < 0 ? 0 : behind > kLanes ? kLanes : behind);
}

/// Two rows of bf16, or one of fp32, as a product reads them.
TESSERA_INLINE void store_pair(uint32_t* to, const Floats (&rows)[2], BFloat16) {
  const Words words = __builtin_convertvector(narrow(rows[1]), Words) << 16 | __builtin_convertvector(narrow(rows[0]), Words);
  std::memcpy(to, &words, sizeof(words));
}
TESSERA_INLINE void store_pair(uint32_t* to, const Floats (&rows)[1], float) { std::memcpy(to, &rows[0], sizeof(rows[0])); }

template <class T>
void attention_gradient_block(const AttentionGradient& args) {
  constexpr int64_t kRows = kPerWord<T>;
  T* probabilities = static_cast<T*>(args.probabilities);
  T* gradient = static_cast<T*>(args.gradient);
  for (int64_t key = 0; key < args.rows; key += kRows) {
    uint32_t* words = static_cast<uint32_t*>(args.words) + key / kRows * args.width;
    for (int64_t query = 0; query < args.width; query += kLanes) {
      const Floats lse = load(args.log_sum_exp + query, AllLanes{}), delta = load(args.delta + query, AllLanes{});
      Floats pair[kRows] = {};
      for (int64_t row = 0; row < kRows; ++row) {
        const int64_t at = (key + row) * args.width + query;
        Floats p = {};
        if (key + row < args.keys) {
          const Ints seen = sees(query, args.first + key + row);
          p = select(seen, exp(load(args.scores + at, AllLanes{}) * args.scale - lse), Floats{});
          pair[row] = select(seen, p * (load(args.d_probabilities + at, AllLanes{}) - delta) * args.scale, Floats{});
        }
        store(probabilities + at, p, AllLanes{});
        if (sizeof(T) == 2) store(gradient + at, pair[row], AllLanes{});
      }
      store_pair(words + query, pair, T{});
    }
  }
}

/// out[row] = the product of two rows.
template <class T>
void dot_rows(const DotRows& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const T* left = static_cast<const T*>(args.left.data) + row * args.left_stride;
    const T* right = static_cast<const T*>(args.right.data) + row * args.right_stride;
    Floats sums = {};
    for_vectors(args.dim, [&](int64_t i, auto lanes) { sums += load(left + i, lanes) * load(right + i, lanes); });
    args.out[row] = static_cast<float>(sum(sums));
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu
