#include "tessera/fsdp/unit_layout.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "tessera/core/error.h"

// Equal parts that cut no row are searched for. A cut falls between rows if a gap moves the parameter there, and if the part is whole rows of every parameter
// that several cuts go through. So candidates for the part are multiples of rows, from the smallest that can hold the unit, and in a few orders of the
// parameters they are placed one behind the other, greedily: the first fit is the smallest part. Rows stay whole because a slice has to be a tensor:
// optimizers, checkpoints and initialization know nothing of flat buffers. A pure function, so ranks need not tell each other.

namespace tessera {
namespace {

constexpr int64_t kAlignment = 16;       // elements: a cache line of fp32
constexpr int64_t kAlignedFrom = 16384;  // elements; the gap is at most a thousandth of such a parameter

using Entry = UnitLayout::Entry;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t value, int64_t step) { return ceil_div(value, step) * step; }

/// Elements of one row, at least 1: so a parameter without elements needs no care.
int64_t row_size(const Entry& entry) {
  const int64_t rows = entry.shape.empty() ? 1 : entry.shape[0];
  return rows > 0 ? std::max<int64_t>(1, entry.numel / rows) : 1;
}

int64_t start_at(int64_t end, const Entry& entry) { return entry.numel >= kAlignedFrom ? round_up(end, kAlignment) : end; }

std::vector<Entry> entries_of(const std::vector<std::vector<int64_t>>& shapes) {
  std::vector<Entry> entries;
  for (const auto& shape : shapes) {
    const int64_t numel = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
    entries.push_back({.shape = shape, .numel = numel});
  }
  return entries;
}

using Order = std::vector<size_t>;

/// Places the entries in `order` so that no multiple of `part` lies inside a row, and returns where they end. Nothing where a row is longer than that, or a
/// parameter that is cut more than once has rows that do not divide `part`.
std::optional<int64_t> place(std::vector<Entry>& entries, const Order& order, int64_t part) {
  int64_t end = 0;
  for (const size_t index : order) {
    Entry& entry = entries[index];
    const int64_t row = row_size(entry);
    if (row > part) return std::nullopt;
    int64_t begin = start_at(end, entry);
    for (;;) {
      const int64_t cut = (begin / part + 1) * part;
      if (cut >= begin + entry.numel) break;
      const int64_t gap = (cut - begin) % row;
      if (gap == 0) {
        if (cut + part < begin + entry.numel && part % row != 0) return std::nullopt;
        break;
      }
      // Now that cut falls on a row; but the parameter ends later, and may meet another one.
      begin += gap;
    }
    entry.offset = begin;
    end = begin + entry.numel;
  }
  return end;
}

/// Which parameters are cut, and where, depends on their order: that of registration, by size, and rotations are tried.
std::vector<Order> orders_of(const std::vector<Entry>& entries) {
  constexpr size_t kMostRotations = 16;
  Order order(entries.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::vector<Order> orders{order};
  Order by_size = order;
  std::ranges::stable_sort(by_size, [&](size_t a, size_t b) { return entries[a].numel > entries[b].numel; });
  orders.push_back(by_size);
  orders.emplace_back(by_size.rbegin(), by_size.rend());
  for (size_t i = 1; i < std::min(entries.size(), kMostRotations); ++i) {
    std::ranges::rotate(order, order.begin() + 1);
    orders.push_back(order);
  }
  return orders;
}

/// Parts worth a try, ascending: whole rows of some parameter, from the smallest possible on.
std::set<int64_t> parts_of(const std::vector<Entry>& entries, int ranks) {
  constexpr int64_t kMostTries = 64;  // of each row size
  int64_t total = 0, largest_row = 1;
  for (const Entry& entry : entries) {
    total += entry.numel;
    largest_row = std::max(largest_row, row_size(entry));
  }
  const int64_t smallest = std::max<int64_t>(1, ceil_div(total, ranks)), most = smallest + std::max(smallest / 64, largest_row);
  int64_t common = 1;
  std::set<int64_t> steps{1};
  for (const Entry& entry : entries) {
    steps.insert(row_size(entry));
    if (common <= total) common = std::lcm(common, row_size(entry));
  }
  steps.insert(common);
  std::set<int64_t> parts;
  for (const int64_t step : steps) {
    for (int64_t part = round_up(smallest, step), i = 0; part <= most && i < kMostTries; part += step, ++i) parts.insert(part);
  }
  return parts;
}

/// The smallest part that needs no copies, if one is near the smallest possible; the entries are placed for it.
std::optional<int64_t> even_part(std::vector<Entry>& entries, int ranks) {
  const std::vector<Order> orders = orders_of(entries);
  for (const int64_t part : parts_of(entries, ranks)) {
    for (const Order& order : orders) {
      const auto end = place(entries, order, part);
      if (end && *end <= part * ranks) return part;
    }
  }
  return std::nullopt;
}

/// Entries without gaps, cuts at the row nearest to equal parts.
void cut_unevenly(UnitLayout& layout) {
  int64_t end = 0;
  for (Entry& entry : layout.parameters) {
    entry.offset = end;
    end += entry.numel;
  }
  layout.size = end;
  layout.begin = {0};
  for (int rank = 1; rank < layout.ranks; ++rank) {
    int64_t cut = end * rank / layout.ranks;
    for (const Entry& entry : layout.parameters) {
      if (cut <= entry.offset || cut >= entry.offset + entry.numel) continue;
      const int64_t row = row_size(entry);
      cut = entry.offset + (cut - entry.offset + row / 2) / row * row;
      break;
    }
    layout.begin.push_back(std::max(cut, layout.begin.back()));
  }
  layout.begin.push_back(end);
  for (int rank = 0; rank < layout.ranks; ++rank) layout.part = std::max(layout.part, layout.begin[rank + 1] - layout.begin[rank]);
}

}  // namespace

int64_t UnitLayout::numel() const {
  int64_t sum = 0;
  for (const Entry& entry : parameters) sum += entry.numel;
  return sum;
}

UnitLayout make_unit_layout(const std::vector<std::vector<int64_t>>& shapes, int ranks) {
  invariant(ranks >= 1, "a unit cannot be dealt over ", ranks, " ranks");
  UnitLayout layout{.ranks = ranks, .parameters = entries_of(shapes)};
  if (const auto part = even_part(layout.parameters, ranks)) {
    layout.part = *part;
    layout.size = *part * ranks;
    for (int rank = 0; rank <= ranks; ++rank) layout.begin.push_back(rank * *part);
  } else {
    layout.even = false;
    cut_unevenly(layout);
  }
  return layout;
}

std::pair<int64_t, int64_t> rows_of(const UnitLayout& layout, size_t index, int rank) {
  const Entry& entry = layout.parameters.at(index);
  const int64_t begin = std::max(entry.offset, layout.begin[rank]), end = std::min(entry.offset + entry.numel, layout.begin[rank + 1]);
  if (begin >= end) return {0, 0};
  const int64_t row = row_size(entry);
  return {(begin - entry.offset) / row, (end - begin) / row};
}

bool same_rows(const UnitLayout& a, size_t a_index, const UnitLayout& b, size_t b_index) {
  if (a.ranks != b.ranks) return false;
  for (int rank = 0; rank < a.ranks; ++rank) {
    if (rows_of(a, a_index, rank) != rows_of(b, b_index, rank)) return false;
  }
  return true;
}

int64_t elements_of(const UnitLayout& layout, size_t index, int rank) {
  const auto [first, count] = rows_of(layout, index, rank);
  return count * row_size(layout.parameters[index]);
}

Slice cut_rows(const Slice& slice, int64_t first, int64_t count) {
  Slice cut = slice;
  cut.boxes.clear();
  if (slice.shape.empty()) {
    if (count > 0) cut.boxes = slice.boxes;
    return cut;
  }
  const int64_t dim = slice.concat_dim();
  invariant(dim >= 0, "'", slice.name, "' is held in flattened boxes: it has no rows that could be cut");
  int64_t begin = 0;  // of the box at hand, in rows of the local tensor; boxes side by side share their rows
  for (Box box : slice.boxes) {
    const int64_t from = std::max(first, begin), to = std::min(first + count, begin + box.size[0]);
    if (dim == 0) begin += box.size[0];
    if (from >= to) continue;
    box.offset[0] += from - (dim == 0 ? begin - box.size[0] : 0);
    box.size[0] = to - from;
    cut.boxes.push_back(std::move(box));
  }
  if (!cut.boxes.empty() || slice.local_shape() == slice.shape) return cut;
  // No rows of a part of the columns: without boxes it would be no rows of all of them.
  for (Box box : slice.boxes) {
    box.size[0] = 0;
    cut.boxes.push_back(std::move(box));
  }
  return cut;
}

}  // namespace tessera
