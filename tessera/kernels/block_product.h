#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/empty.h>

#include "tessera/kernels/cpu/loops.h"

/// One block of a product on a CPU, out of panels (cpu::Panel): what product_blocks.cpp and attention_blocks.cpp are made of. It is multiplied by oneDNN, as
/// libtorch offers it (at::native::cpublas::brgemm), whose program for a shape is made once.
namespace tessera::kernels {

inline constexpr int64_t kBlock = cpu::kPanelColumns;

inline int64_t up_to(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// An inner dimension without half a word.
template <class T>
int64_t whole_words(int64_t inner) {
  return up_to(inner, static_cast<int64_t>(sizeof(float) / sizeof(T)));
}

inline cpu::Type type_of(const at::Tensor& tensor) { return tensor.scalar_type() == at::kFloat ? cpu::Type::Float : cpu::Type::BFloat16; }

/// f(float) or f(at::BFloat16): a value of the type.
template <class F>
void with_type_of(const at::Tensor& tensor, F&& f) {
  tensor.scalar_type() == at::kFloat ? f(float()) : f(at::BFloat16());
}

/// Rows of fp32 sums, and how many floats lie between the beginnings of two.
struct Sums {
  float* data;
  int64_t stride;
};

/// sums [rows, width] <- left [rows, inner] (`stride` elements from row to row) times a panel of `inner` by `width` words; or sums += it. libtorch keeps a
/// program for each shape and thread for good, of some 0.1 to 0.5 MB: what varies from call to call is to have few.
template <class T>
void multiply_block(const T* left, int64_t stride, const T* panel, Sums sums, int64_t rows, int64_t inner, int64_t width, bool add = false) {
  constexpr int64_t kPiece = 1024;  // of the inner dimension: what a cache holds beside the block
  for (int64_t begin = 0; begin < inner; begin += kPiece) {
    at::native::cpublas::brgemm(rows, width, std::min(kPiece, inner - begin), stride, width, sums.stride, add || begin > 0, left + begin, panel + begin * width,
                                sums.data, /*is_vnni=*/sizeof(T) == 2);
  }
}

/// Tasks that a thread is worth, where each multiplies so many pairs of numbers.
inline int64_t task_grain(int64_t products) { return std::max<int64_t>(1, (int64_t{1} << 20) / std::max<int64_t>(1, products)); }

/// Bytes of one thread each, as multiples of a cache line; the calling thread's by data(). No more threads work than there are `parts` of the work.
class Scratch {
 public:
  Scratch(int64_t bytes, const at::Tensor& like, int64_t parts = std::numeric_limits<int64_t>::max())
      : each_(up_to(bytes, 64)), memory_(at::empty({std::clamp<int64_t>(parts, 1, at::get_num_threads()), each_}, like.options().dtype(at::kByte))) {}
  char* data() const { return static_cast<char*>(memory_.data_ptr()) + at::get_thread_num() % memory_.size(0) * each_; }

 private:
  int64_t each_;
  at::Tensor memory_;
};

}  // namespace tessera::kernels
