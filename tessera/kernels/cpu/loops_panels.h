#pragma once

#include <utility>

#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/cpu/simd.h"

// Matrices in the order in which bf16 products read them: two neighbours of the inner dimension lie in one word. So all moves are of words of 32 bits, and a
// matrix that lies the other way round is transposed word by word, in registers.

namespace tessera::kernels::cpu {
namespace {

/// Lane `lane` of the first (or second) of two rows after they have exchanged the halves of each 2 * step lanes; lanes from kLanes on are the second row's.
constexpr int exchanged(int lane, int step, bool second) {
  const bool low = (lane & step) == 0;
  if (second) return low ? lane + step : kLanes + lane;
  return low ? lane : kLanes + lane - step;
}

template <int step, int... lane>
TESSERA_INLINE void exchange(Words& a, Words& b, std::integer_sequence<int, lane...>) {
  const Words first = __builtin_shufflevector(a, b, exchanged(lane, step, false)...);
  b = __builtin_shufflevector(a, b, exchanged(lane, step, true)...);
  a = first;
}

/// The square of kLanes rows, transposed: its quarters change places, then the quarters of these.
template <int step = kLanes / 2>
TESSERA_INLINE void transpose(Words (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int row = 0; row < kLanes; ++row) {
    if ((row & step) == 0) exchange<step>(rows[row], rows[row + step], std::make_integer_sequence<int, kLanes>());
  }
  if constexpr (step > 1) transpose<step / 2>(rows);
}

/// Words of a row from column `first` on, zero where the row ends: `count` elements, of which a word holds one or two.
TESSERA_INLINE Words load_words(const float* row, int64_t first, int64_t count) {
  const int64_t left = count - first;
  return bits_as<Words>(left >= kLanes ? load(row + first, AllLanes{}) : left > 0 ? load(row + first, FirstLanes{static_cast<int>(left)}) : Floats{});
}
TESSERA_INLINE Words load_words(const BFloat16* row, int64_t first, int64_t count) {
  Words words = {};
  const int64_t left = count - 2 * first;
  if (left >= 2 * kLanes) {
    std::memcpy(&words, row + 2 * first, sizeof(words));
  } else if (left > 0) {
    std::memcpy(&words, row + 2 * first, sizeof(BFloat16) * static_cast<size_t>(left));
  }
  return words;
}

TESSERA_INLINE void store_words(uint32_t* to, Words words, int64_t count) {
  if (count >= kLanes) {
    std::memcpy(to, &words, sizeof(words));
  } else {
    std::memcpy(to, &words, sizeof(uint32_t) * static_cast<size_t>(count));
  }
}

/// to[word][row] <- from[row][word], for rows of `count` elements and `words` words (behind the last element: zero). load(row, word) gives kLanes of them.
template <class Load>
TESSERA_INLINE void transpose_words(int64_t rows, int64_t words, uint32_t* to, int64_t width, Load&& load_row) {
  for (int64_t row = 0; row < rows; row += kLanes) {
    for (int64_t word = 0; word < words; word += kLanes) {
      Words square[kLanes];
      for (int i = 0; i < kLanes; ++i) square[i] = row + i < rows ? load_row(row + i, word) : Words{};
      transpose(square);
      for (int i = 0; i < kLanes && word + i < words; ++i) store_words(to + (word + i) * width + row, square[i], rows - row);
    }
  }
}

/// The word of column `column` on, of one row of the inner dimension or of two.
TESSERA_INLINE Words pair_words(const float* row, const float*, int64_t column, int64_t columns) { return load_words(row, column, columns); }
TESSERA_INLINE Words pair_words(const BFloat16* row, const BFloat16* next, int64_t column, int64_t columns) {
  const int64_t left = columns - column;
  const auto of = [&](const BFloat16* from) {
    if (from == nullptr || left <= 0) return Words{};
    return bits_as<Words>(left >= kLanes ? load(from + column, AllLanes{}) : load(from + column, FirstLanes{static_cast<int>(left)}));
  };
  return of(row) >> 16 | of(next);
}

template <class T>
constexpr int64_t kPerWord = sizeof(uint32_t) / sizeof(T);

/// Word `word` of the inner dimension, from column `column` on, of a matrix whose rows are the inner dimension.
template <class T>
TESSERA_INLINE Words inner_words(const Panel& args, int64_t word, int64_t column) {
  const T* row = static_cast<const T*>(args.from.data) + word * kPerWord<T> * args.stride;
  return pair_words(row, word * kPerWord<T> + 1 < args.inner ? row + args.stride : nullptr, column, args.outer);
}

template <class T>
int64_t inner_word_count(const Panel& args) {
  return (args.inner + kPerWord<T> - 1) / kPerWord<T>;
}

/// Row by row of all columns, as they lie in memory; rows ahead are asked for, since what follows the columns is not the next row.
template <class T>
void panel_of_rows(const Panel& args) {
  constexpr int64_t kAhead = 16, kLine = 64 / static_cast<int64_t>(sizeof(T));
  const int64_t words = inner_word_count<T>(args);
  for (int64_t word = 0; word < words; ++word) {
    const T* ahead = static_cast<const T*>(args.from.data) + (word * kPerWord<T> + kAhead) * args.stride;
    for (int64_t first = 0; first < args.outer; first += kPanelColumns) {
      const int64_t width = panel_width(args.outer - first);
      for (int64_t row = 0; row < kPerWord<T>; ++row) {
        for (int64_t column = 0; column < width; column += kLine) __builtin_prefetch(ahead + row * args.stride + first + column);
      }
      uint32_t* to = static_cast<uint32_t*>(args.to) + words * first + word * width;
      for (int64_t column = 0; column < width; column += kLanes) store_words(to + column, inner_words<T>(args, word, first + column), kLanes);
    }
  }
}

template <class T>
void panel_of_columns(const Panel& args) {
  const int64_t words = inner_word_count<T>(args);
  for (int64_t first = 0; first < args.outer; first += kPanelColumns) {
    const int64_t width = panel_width(args.outer - first);
    const T* from = static_cast<const T*>(args.from.data) + first * args.stride;
    transpose_words(width, words, static_cast<uint32_t*>(args.to) + words * first, width, [&](int64_t column, int64_t word) {
      __builtin_prefetch(from + (column + kLanes) * args.stride + word * kPerWord<T>);
      return first + column < args.outer ? load_words(from + column * args.stride, word, args.inner) : Words{};
    });
  }
}

template <class T>
void rows_of_columns(const Panel& args) {
  const int64_t words = inner_word_count<T>(args);
  transpose_words(words, args.outer, static_cast<uint32_t*>(args.to), words, [&](int64_t word, int64_t column) { return inner_words<T>(args, word, column); });
}

/// Rows of sums, rounded to where they go.
template <class T>
void round_rows(const RoundRows& args) {
  for (int64_t row = 0; row < args.rows; ++row) {
    const float* from = args.from + row * args.from_stride;
    T* to = static_cast<T*>(args.to.data) + row * args.to_stride;
    for_vectors(args.columns, [&](int64_t i, auto lanes) { store(to + i, load(from + i, lanes), lanes); });
  }
}

}  // namespace
}  // namespace tessera::kernels::cpu
