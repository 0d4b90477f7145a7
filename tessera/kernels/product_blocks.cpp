#include "tessera/kernels/product_blocks.h"

#include <algorithm>
#include <array>
#include <numeric>

#include <ATen/Context.h>
#include <torch/library.h>

#include "tessera/core/parallel.h"
#include "tessera/kernels/block_product.h"
#include "tessera/kernels/cpu/loops.h"
#include "tessera/kernels/operator.h"
#include "tessera/kernels/processor.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/on_host.h"

// A task is 64 columns of one group's result (of a weight's gradient: 64 rows). Its part of the weight is put into the products' order once, for all rows of
// the group; blocks follow one another down the rows, and the inner dimension goes in pieces that a cache holds beside them. Tasks are dealt with groups as the
// faster index, so that each thread has its share of every group, the busiest one too.

namespace tessera::kernels {

namespace {

constexpr int64_t kNarrowest = 16;

struct Group {
  int64_t index, first, rows;
};

std::vector<Group> groups_with_rows(at::IntArrayRef sizes) {
  std::vector<Group> groups;
  int64_t first = 0;
  for (size_t group = 0; group < sizes.size(); first += sizes[group++]) {
    if (sizes[group] > 0) groups.push_back({static_cast<int64_t>(group), first, sizes[group]});
  }
  return groups;
}

/// Asks for the memory of a block's result, which then comes while the block is multiplied.
template <class T>
void expect_rows(T* to, int64_t stride, int64_t rows, int64_t columns) {
  constexpr int64_t kLine = 64 / static_cast<int64_t>(sizeof(T));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; column += kLine) __builtin_prefetch(to + row * stride + column, /*rw=*/1);
  }
}

/// How many columns a task packs together: more read memory in longer runs, fewer leave each thread its share, and a cache room.
int64_t columns_together(int64_t columns, int64_t inner, int64_t groups) {
  int64_t together = 4 * kBlock;
  while (together > kBlock && (together * inner > int64_t{1} << 18 || groups * (columns / together) < 2 * at::get_num_threads())) together /= 2;
  return together;
}

template <class T>
void multiply_groups_in(const at::Tensor& out, const at::Tensor& rows, const at::Tensor& weight, bool transposed, at::IntArrayRef sizes, int64_t together,
                        const Scratch& scratch) {
  const int64_t columns = out.size(1), length = rows.size(1), inner = whole_words<T>(length);
  const auto groups = groups_with_rows(sizes);
  const auto count = static_cast<int64_t>(groups.size());
  const cpu::Type type = type_of(out);
  const auto task = [&](const Group& group, int64_t first) {
    const int64_t end = std::min(first + together, columns);
    auto* sums = reinterpret_cast<float*>(scratch.data());
    T* panels = reinterpret_cast<T*>(sums + kBlock * kBlock);
    T* filled_up = panels + inner * together;
    const T* from = static_cast<const T*>(weight.const_data_ptr()) + group.index * weight.stride(0) + first * (transposed ? weight.stride(1) : 1);
    const cpu::Panel args{.from = {from, type}, .stride = weight.stride(1), .inner = length, .outer = end - first, .to = panels};
    transposed ? cpu::loops().panel_of_columns(args) : cpu::loops().panel_of_rows(args);
    for (int64_t row = group.first, last = group.first + group.rows; row < last; row += kBlock) {
      const int64_t high = std::min(kBlock, last - row);
      const T* left = static_cast<const T*>(rows.const_data_ptr()) + row * length;
      if (inner != length) {  // half a word would be the next row's
        for (int64_t i = 0; i < high; ++i) *std::copy_n(left + i * length, length, filled_up + i * inner) = T(0);
        left = filled_up;
      }
      for (int64_t column = first; column < end; column += kBlock) {
        const int64_t width = cpu::panel_width(end - column);
        T* to = static_cast<T*>(out.data_ptr()) + row * columns + column;
        expect_rows(to, columns, high, std::min(kBlock, end - column));
        multiply_block<T>(left, inner, panels + (column - first) * inner, {sums, width}, high, inner, width);
        cpu::loops().round_rows({sums, width, {to, type}, columns, high, std::min(kBlock, end - column)});
      }
    }
  };
  parallel_for(0, count * ((columns + together - 1) / together), task_grain(rows.size(0) * length * together / std::max<int64_t>(1, count)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) task(groups[static_cast<size_t>(i % count)], i / count * together);
                 at::native::cpublas::brgemm_release(sizeof(T) == 2);
               });
}

template <class T>
void multiply_within_in(const at::Tensor& out, const at::Tensor& left, const at::Tensor& right, const at::Tensor& panels, at::IntArrayRef sizes,
                        const Scratch& scratch) {
  const int64_t high = left.size(1), wide = right.size(1);
  const auto groups = groups_with_rows(sizes);
  const auto count = static_cast<int64_t>(groups.size());
  const cpu::Type type = type_of(out);
  // Panels of a group begin behind what those before can have, in whole words.
  const auto panel_of = [&](const Group& group, int64_t column) {
    return static_cast<T*>(panels.data_ptr()) + (group.first + group.index) * panels.size(1) + column * whole_words<T>(group.rows);
  };
  const int64_t together = columns_together(wide, 1, count);
  parallel_for(0, count * ((wide + together - 1) / together), task_grain(left.size(0) * together), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Group& group = groups[static_cast<size_t>(i % count)];
      const int64_t column = i / count * together;
      const T* from = static_cast<const T*>(right.const_data_ptr()) + group.first * wide + column;
      cpu::loops().panel_of_rows(
          {.from = {from, type}, .stride = wide, .inner = group.rows, .outer = std::min(together, wide - column), .to = panel_of(group, column)});
    }
  });
  const auto task = [&](const Group& group, int64_t row) {
    const int64_t inner = whole_words<T>(group.rows), here = std::min(kBlock, high - row);
    auto* sums = reinterpret_cast<float*>(scratch.data());
    T* rows = reinterpret_cast<T*>(sums + kBlock * kBlock);
    const T* from = static_cast<const T*>(left.const_data_ptr()) + group.first * high + row;
    cpu::loops().rows_of_columns({.from = {from, type}, .stride = high, .inner = group.rows, .outer = here, .to = rows});
    for (int64_t column = 0; column < wide; column += kBlock) {
      const int64_t width = cpu::panel_width(wide - column);
      T* to = static_cast<T*>(out.data_ptr()) + (group.index * high + row) * wide + column;
      expect_rows(to, wide, here, std::min(kBlock, wide - column));
      multiply_block<T>(rows, inner, panel_of(group, column), {sums, width}, here, inner, width);
      cpu::loops().round_rows({sums, width, {to, type}, wide, here, std::min(kBlock, wide - column)});
    }
  };
  parallel_for(0, count * ((high + kBlock - 1) / kBlock), task_grain(left.size(0) * wide * kBlock / std::max<int64_t>(1, count)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) task(groups[static_cast<size_t>(i % count)], i / count * kBlock);
                 at::native::cpublas::brgemm_release(sizeof(T) == 2);
               });
}

using Product = at::Tensor(const at::Tensor&, const at::Tensor&, bool, at::IntArrayRef);
using Within = at::Tensor(const at::Tensor&, const at::Tensor&, at::IntArrayRef);

bool is_filled_up(const at::Tensor& rows) { return rows.element_size() == 2 && rows.size(1) % 2 == 1; }

at::Tensor product(const at::Tensor& rows_, const at::Tensor& weight_, bool transposed, at::IntArrayRef sizes) {
  const at::Tensor rows = rows_.contiguous(), weight = weight_.contiguous();
  const int64_t used = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
  const at::Tensor out = at::empty({rows.size(0), weight.size(transposed ? 1 : 2)}, rows.options());
  const int64_t together = columns_together(out.size(1), rows.size(1), weight.size(0));
  const Scratch scratch(kBlock * kBlock * 4 + (together + (is_filled_up(rows) ? kBlock : 0)) * (rows.size(1) + 1) * rows.element_size(), rows);
  if (rows.is_meta()) return out;
  if (used < rows.size(0)) out.narrow(0, used, rows.size(0) - used).zero_();
  if (rows.size(1) == 0) return out.zero_();
  with_type_of(out, [&](auto type) { multiply_groups_in<decltype(type)>(out, rows, weight, transposed, sizes, together, scratch); });
  return out;
}

at::Tensor within(const at::Tensor& left_, const at::Tensor& right_, at::IntArrayRef sizes) {
  const at::Tensor left = left_.contiguous(), right = right_.contiguous();
  const auto groups = static_cast<int64_t>(sizes.size());
  const at::Tensor out = at::empty({groups, left.size(1), right.size(1)}, left.options());
  const at::Tensor panels = at::empty({left.size(0) + groups, up_to(right.size(1), kBlock)}, left.options());
  const Scratch scratch(kBlock * kBlock * 4 + kBlock * (left.size(0) + 1) * left.element_size(), left);
  if (left.is_meta()) return out;
  for (size_t group = 0; group < sizes.size(); ++group) {
    if (sizes[group] == 0) out.select(0, static_cast<int64_t>(group)).zero_();
  }
  with_type_of(out, [&](auto type) { multiply_within_in<decltype(type)>(out, left, right, panels, sizes, scratch); });
  return out;
}

/// Whether oneDNN was built with, and allowed, what it takes: libtorch says so by throwing.
bool multiplies_bf16_blocks() {
  static const bool multiplies = [] {
    const std::array<at::BFloat16, 2> left{};
    std::array<at::BFloat16, 2 * kNarrowest> panel{};
    std::array<float, kNarrowest> sums{};
    try {
      at::native::cpublas::brgemm(1, kNarrowest, 2, 2, kNarrowest, kNarrowest, false, left.data(), panel.data(), sums.data(), true);
      at::native::cpublas::brgemm_release(true);
    } catch (const c10::Error&) {
      return false;
    }
    return true;
  }();
  return multiplies;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("grouped_product(Tensor rows, Tensor weight, bool transposed, int[] sizes) -> Tensor");
  m.def("grouped_product_within(Tensor left, Tensor right, int[] sizes) -> Tensor");
}
TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("grouped_product", product);
  m.impl("grouped_product_within", within);
}

bool multiplies_blocks(const at::Tensor& tensor) {
  if (!is_on_host(tensor)) return false;
  static const bool avx512 = processor_has("avx512_f");
  if (!avx512 || !is_supported(tensor.scalar_type()) || is_widened(tensor)) return false;
  return tensor.scalar_type() == at::kFloat || (at::globalContext().userEnabledMkldnn() && multiplies_bf16_blocks());
}

at::Tensor multiply_groups(const at::Tensor& rows, const at::Tensor& weight, bool transposed, const std::vector<int64_t>& sizes) {
  static const auto op = find_operator<Product>("tessera::grouped_product");
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(rows, weight, transposed, sizes);
}

at::Tensor multiply_within_groups(const at::Tensor& left, const at::Tensor& right, const std::vector<int64_t>& sizes) {
  static const auto op = find_operator<Within>("tessera::grouped_product_within");
  const at::AutoDispatchBelowADInplaceOrView below;
  return op.call(left, right, sizes);
}

}  // namespace tessera::kernels
