#include "tessera/layout/slice.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "tessera/core/error.h"

// A run of elements is no box, but few: the end of a row, whole rows, the beginning of a row, and the same again inside of the two rows that are cut. Sharding
// a shard thus stays within the language of boxes, and whoever reads slices needs no second case.

namespace tessera {
namespace {

int64_t product(const std::vector<int64_t>& values) { return std::accumulate(values.begin(), values.end(), int64_t{1}, std::multiplies<>()); }

std::string to_string(const std::vector<int64_t>& shape) {
  std::string text;
  for (const int64_t size : shape) text += (text.empty() ? "" : ", ") + std::to_string(size);
  return "[" + text + "]";
}

/// Elements `begin` .. `end` of `box`, row-major, as boxes in that order; dimensions before `dim` have size 1 already.
void cut_run(const Box& box, size_t dim, int64_t begin, int64_t end, std::vector<Box>& out) {
  if (begin >= end) return;
  const int64_t all = box.numel();
  if (begin == 0 && end == all) {
    out.push_back(box);
    return;
  }
  const int64_t row = all / box.size[dim];
  const auto rows = [&](int64_t first, int64_t count) {
    Box part = box;
    part.offset[dim] += first;
    part.size[dim] = count;
    return part;
  };
  const int64_t first = begin / row, last = end / row;  // rows that are cut: the first one inside, the last one at its end
  if (first == last) return cut_run(rows(first, 1), dim + 1, begin - first * row, end - first * row, out);
  const int64_t first_whole = (begin + row - 1) / row;
  if (first < first_whole) cut_run(rows(first, 1), dim + 1, begin - first * row, row, out);
  if (first_whole < last) out.push_back(rows(first_whole, last - first_whole));
  if (last * row < end) cut_run(rows(last, 1), dim + 1, 0, end - last * row, out);
}

}  // namespace

Box Box::whole(const std::vector<int64_t>& shape) { return {std::vector<int64_t>(shape.size(), 0), shape}; }

int64_t Box::numel() const { return product(size); }

bool Box::contains(const Box& other) const { return other.empty() || intersect(*this, other) == other; }

Box intersect(const Box& a, const Box& b) {
  invariant(a.size.size() == b.size.size(), "boxes of different dimensions: ", to_string(a), " and ", to_string(b));
  Box both = a;
  for (size_t d = 0; d < a.size.size(); ++d) {
    both.offset[d] = std::max(a.offset[d], b.offset[d]);
    both.size[d] = std::max<int64_t>(0, std::min(a.offset[d] + a.size[d], b.offset[d] + b.size[d]) - both.offset[d]);
  }
  return both;
}

std::string to_string(const Box& box) {
  std::string text;
  for (size_t d = 0; d < box.size.size(); ++d) {
    text += (d ? ", " : "") + std::to_string(box.offset[d]) + ":" + std::to_string(box.offset[d] + box.size[d]);
  }
  return "[" + text + "]";
}

Slice Slice::whole(std::string name, std::vector<int64_t> shape) {
  Box box = Box::whole(shape);
  return {std::move(name), std::move(shape), {std::move(box)}};
}

Slice Slice::along(std::string name, std::vector<int64_t> shape, int64_t dim, int64_t begin, int64_t size) {
  Slice slice = whole(std::move(name), std::move(shape));
  invariant(dim >= 0 && dim < static_cast<int64_t>(slice.shape.size()), slice.name, " ", to_string(slice.shape), " has no dimension ", dim);
  slice.boxes[0].offset[dim] = begin;
  slice.boxes[0].size[dim] = size;
  slice.check();
  return slice;
}

int64_t Slice::numel() const {
  int64_t total = 0;
  for (const auto& box : boxes) total += box.numel();
  return total;
}

int64_t Slice::logical_numel() const { return product(shape); }

bool Slice::is_whole() const { return boxes.size() == 1 && boxes[0] == Box::whole(shape); }

int64_t Slice::concat_dim() const {
  int64_t differs = -1;
  for (size_t b = 1; b < boxes.size(); ++b) {
    for (size_t d = 0; d < shape.size(); ++d) {
      if (boxes[b].offset[d] == boxes[0].offset[d] && boxes[b].size[d] == boxes[0].size[d]) continue;
      if (differs >= 0 && differs != static_cast<int64_t>(d)) return -1;
      differs = static_cast<int64_t>(d);
    }
  }
  return std::max<int64_t>(differs, 0);
}

std::vector<int64_t> Slice::local_shape() const {
  if (boxes.empty()) {
    auto none = shape.empty() ? std::vector<int64_t>{0} : shape;
    none[0] = 0;
    return none;
  }
  const int64_t dim = concat_dim();
  if (dim < 0) return {numel()};
  auto local = boxes[0].size;
  for (size_t b = 1; b < boxes.size(); ++b) local[dim] += boxes[b].size[dim];
  return local;
}

Box Slice::local_box(size_t index) const {
  invariant(index < boxes.size(), name, ": no box ", index);
  const int64_t dim = concat_dim();
  if (dim < 0) {
    int64_t begin = 0;
    for (size_t b = 0; b < index; ++b) begin += boxes[b].numel();
    return {{begin}, {boxes[index].numel()}};
  }
  Box local = Box::whole(boxes[index].size);
  for (size_t b = 0; b < index; ++b) local.offset[dim] += boxes[b].size[dim];
  return local;
}

/// Which overlap is found by where boxes begin: those of thousands of rows are compared with their neighbours alone.
void Slice::check() const {
  for (const Box& box : boxes) {
    if (box.size.size() != shape.size() || box.offset.size() != shape.size()) {
      invariant(false, name, ": ", to_string(box), " is no box of a tensor of shape ", to_string(shape));
    }
    for (size_t d = 0; d < shape.size(); ++d) {
      if (box.offset[d] >= 0 && box.size[d] >= 0 && box.offset[d] + box.size[d] <= shape[d]) continue;
      invariant(false, name, ": ", to_string(box), " leaves the shape ", to_string(shape));
    }
  }
  const auto begin_of = [](const Box* box) { return box->offset.empty() ? 0 : box->offset[0]; };
  const auto end_of = [](const Box* box) { return box->offset.empty() ? 1 : box->offset[0] + box->size[0]; };
  std::vector<const Box*> sorted;
  for (const Box& box : boxes) {
    if (!box.empty()) sorted.push_back(&box);
  }
  std::ranges::sort(sorted, {}, begin_of);
  std::vector<const Box*> open;  // those that reach the one at hand
  for (const Box* box : sorted) {
    std::erase_if(open, [&](const Box* other) { return end_of(other) <= begin_of(box); });
    for (const Box* other : open) {
      if (intersect(*box, *other).empty()) continue;
      invariant(false, name, ": ", to_string(*box), " and ", to_string(*other), " overlap");
    }
    open.push_back(box);
  }
}

Slice elements(const Slice& held, int64_t begin, int64_t size) {
  invariant(held.concat_dim() <= 0, held.name, ": its boxes lie side by side, so a run of its elements is no union of few boxes");
  invariant(begin >= 0 && size >= 0 && begin + size <= held.numel(), held.name, ": elements ", begin, " .. ", begin + size, " of ", held.numel());
  Slice part{held.name, held.shape, {}};
  int64_t at = 0;
  for (const Box& box : held.boxes) {
    const int64_t count = box.numel();
    cut_run(box, 0, std::clamp<int64_t>(begin - at, 0, count), std::clamp<int64_t>(begin + size - at, 0, count), part.boxes);
    at += count;
  }
  return part;
}

std::pair<int64_t, int64_t> chunk(int64_t total, int parts, int index) {
  invariant(total >= 0 && index >= 0 && index < parts, "chunk ", index, " of ", parts, " of ", total);
  const int64_t base = total / parts, extra = total % parts;
  return {index * base + std::min<int64_t>(index, extra), base + (index < extra ? 1 : 0)};
}

void for_each_run(const std::vector<int64_t>& shape, const Box& box, const std::function<void(int64_t first, int64_t count)>& visit) {
  if (box.empty()) return;
  // Dimensions after `split` are taken whole, so that a run covers them and all the box's indices of `split`.
  int64_t split = static_cast<int64_t>(shape.size()) - 1;
  int64_t stride = 1;
  while (split > 0 && box.size[split] == shape[split]) stride *= shape[split--];
  if (split < 0) return visit(0, 1);
  const int64_t count = box.size[split] * stride;
  std::vector<int64_t> index(box.offset.begin(), box.offset.begin() + split);
  const auto advance = [&] {
    for (int64_t d = split - 1; d >= 0; --d) {
      if (++index[d] < box.offset[d] + box.size[d]) return true;
      index[d] = box.offset[d];
    }
    return false;
  };
  do {
    int64_t row = 0;
    for (int64_t d = 0; d < split; ++d) row = row * shape[d] + index[d];
    visit((row * shape[split] + box.offset[split]) * stride, count);
  } while (advance());
}

}  // namespace tessera
