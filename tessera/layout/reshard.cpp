#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

// What is still wanted of a target is a list of boxes; each source box takes away what it has and leaves at most two boxes a dimension. So every element is
// taken once, from the first who has it, and replicas among the sources do no harm; whatever is left in the end is what nobody holds. Where a side is
// flattened, a piece must be one run of it, and boxes are cut until they are.
//
// A weight that is cut by columns has blocks (of 8-bit Adam's scales) by the row: thousands of intervals of one dimension on either side. So boxes that meet
// are looked up by their first dimension in place of compared with all.

namespace tessera {
namespace {

/// What is left of `box` without `hole`: at most two boxes per dimension.
void subtract(const Box& box, const Box& hole, std::vector<Box>& left) {
  const Box both = intersect(box, hole);
  if (both.empty()) {
    left.push_back(box);
    return;
  }
  Box rest = box;
  for (size_t d = 0; d < box.size.size(); ++d) {
    const int64_t begin = rest.offset[d], end = begin + rest.size[d];
    const int64_t hole_begin = both.offset[d], hole_end = hole_begin + both.size[d];
    if (begin < hole_begin) {
      left.push_back(rest);
      left.back().size[d] = hole_begin - begin;
    }
    if (hole_end < end) {
      left.push_back(rest);
      left.back().offset[d] = hole_end;
      left.back().size[d] = end - hole_end;
    }
    rest.offset[d] = hole_begin;
    rest.size[d] = hole_end - hole_begin;
  }
}

/// One box of a slice, and where it lies in the local tensor.
struct Placed {
  const Box& box;
  Box local;
  bool flat;
  int source = 0;  ///< whose slice it is of

  /// `part` of the box in indices of the local tensor. Flat: `part` must be one run of the box.
  Box to_local(const Box& part) const {
    if (flat) {
      int64_t first = 0;
      for (size_t d = 0; d < box.size.size(); ++d) first = first * box.size[d] + (part.offset[d] - box.offset[d]);
      return {{local.offset[0] + first}, {part.numel()}};
    }
    Box out = part;
    for (size_t d = 0; d < box.size.size(); ++d) out.offset[d] += local.offset[d] - box.offset[d];
    return out;
  }

  /// The dimensions after this one are taken whole by `part`, so that fixing those before it leaves one run.
  int64_t split_dim(const Box& part) const {
    int64_t split = static_cast<int64_t>(box.size.size()) - 1;
    while (split > 0 && part.size[split] == box.size[split]) --split;
    return split;
  }
};

/// The boxes of `slice` in their order: Slice::local_box of each, in one pass.
void place(const Slice& slice, int source, std::vector<Placed>& out) {
  const int64_t dim = slice.concat_dim();
  int64_t at = 0;
  for (const Box& box : slice.boxes) {
    Box local = dim < 0 ? Box{{at}, {box.numel()}} : Box::whole(box.size);
    if (dim >= 0 && !box.size.empty()) local.offset[dim] = at;
    at += dim < 0 ? local.size[0] : box.size.empty() ? 1 : box.size[dim];
    out.push_back({box, std::move(local), dim < 0, source});
  }
}

int64_t begin_of(const Box& box) { return box.offset.empty() ? 0 : box.offset[0]; }
int64_t end_of(const Box& box) { return box.offset.empty() ? 1 : box.offset[0] + box.size[0]; }

/// Finds boxes by where they lie in the first dimension.
class BoxesByRow {
 public:
  explicit BoxesByRow(const std::vector<Placed>& boxes) : boxes_(boxes), order_(boxes.size()) {
    std::iota(order_.begin(), order_.end(), size_t{0});
    std::ranges::stable_sort(order_, {}, [&](size_t i) { return begin_of(boxes[i].box); });
    int64_t end = std::numeric_limits<int64_t>::min();
    for (const size_t i : order_) ends_.push_back(end = std::max(end, end_of(boxes[i].box)));
  }

  /// Those that may meet `box`, in their order.
  std::vector<size_t> near(const Box& box) const {
    const auto first = std::ranges::upper_bound(ends_, begin_of(box)) - ends_.begin();
    const auto last = std::ranges::lower_bound(order_, end_of(box), {}, [&](size_t i) { return begin_of(boxes_[i].box); });
    std::vector<size_t> found;
    if (order_.begin() + first < last) found.assign(order_.begin() + first, last);
    std::ranges::sort(found);
    return found;
  }

 private:
  const std::vector<Placed>& boxes_;
  std::vector<size_t> order_;  ///< by where they begin
  std::vector<int64_t> ends_;  ///< the furthest end so far, so that it grows
};

/// Of what is still wanted, those that may meet `box`: all, but of one dimension, where they lie in order and apart.
std::pair<size_t, size_t> wanted_near(const std::vector<Box>& wanted, const Box& box) {
  if (box.size.size() != 1) return {0, wanted.size()};
  const auto first = std::ranges::upper_bound(wanted, begin_of(box), {}, end_of), last = std::ranges::lower_bound(wanted, end_of(box), {}, begin_of);
  return {first - wanted.begin(), std::max(first, last) - wanted.begin()};
}

/// Cuts `part` into boxes that are contiguous runs in both; one box where neither is flat.
void for_each_copyable(const Box& part, const Placed& source, const Placed& target, const std::function<void(const Box&)>& visit) {
  int64_t split = 0;
  if (source.flat) split = std::max(split, source.split_dim(part));
  if (target.flat) split = std::max(split, target.split_dim(part));
  Box run = part;
  std::fill_n(run.size.begin(), split, 1);
  while (true) {
    visit(run);
    int64_t d = split - 1;
    for (; d >= 0; --d) {
      if (++run.offset[d] < part.offset[d] + part.size[d]) break;
      run.offset[d] = part.offset[d];
    }
    if (d < 0) return;
  }
}

at::Tensor view_of(const at::Tensor& tensor, const Box& box) {
  invariant(tensor.dim() == static_cast<int64_t>(box.size.size()), "a piece ", to_string(box), " of a local tensor of shape ", tensor.sizes());
  at::Tensor view = tensor;
  for (size_t d = 0; d < box.size.size(); ++d) view = view.narrow(static_cast<int64_t>(d), box.offset[d], box.size[d]);
  return view;
}

}  // namespace

std::vector<Piece> reshard(const std::vector<Slice>& sources, const Slice& target) {
  for (const auto& source : sources) {
    require(source.name == target.name && source.shape == target.shape, "tensor ", target.name, " ", to_string(Box::whole(target.shape)), ": the source is ",
            source.name, " ", to_string(Box::whole(source.shape)), "; name and shape must agree");
  }
  std::vector<Placed> held, targets;
  for (size_t s = 0; s < sources.size(); ++s) place(sources[s], static_cast<int>(s), held);
  place(target, 0, targets);
  const BoxesByRow by_row(held);
  std::vector<Piece> pieces;
  for (const Placed& to : targets) {
    std::vector<Box> wanted;
    if (!to.box.empty()) wanted.push_back(to.box);
    for (const size_t h : by_row.near(to.box)) {
      if (wanted.empty()) break;
      const Placed& from = held[h];
      const auto [first, last] = wanted_near(wanted, from.box);
      std::vector<Box> left;
      for (size_t w = first; w < last; ++w) {
        const Box both = intersect(wanted[w], from.box);
        subtract(wanted[w], from.box, left);
        if (both.empty()) continue;
        for_each_copyable(both, from, to, [&](const Box& run) { pieces.push_back({from.source, run, from.to_local(run), to.to_local(run)}); });
      }
      const auto rest = wanted.erase(wanted.begin() + static_cast<int64_t>(first), wanted.begin() + static_cast<int64_t>(last));
      wanted.insert(rest, std::make_move_iterator(left.begin()), std::make_move_iterator(left.end()));
    }
    if (wanted.empty()) continue;
    require(false, "tensor ", target.name, ": no source holds ", to_string(wanted.front()), " of ", to_string(Box::whole(target.shape)),
            "; the checkpoint or the group that should hold it is incomplete");
  }
  return pieces;
}

void copy_piece(const Piece& piece, const at::Tensor& source, at::Tensor& target) {
  // Values are moved: who watches a parameter for its use in a forward need not wonder.
  const at::Tensor from = view_of(source.detach(), piece.source_local);
  at::Tensor to = view_of(target.detach(), piece.target_local);
  // A flat side is one contiguous run, so it can take the other side's shape.
  if (from.dim() >= to.dim()) {
    to.view(from.sizes()).copy_(from);
  } else {
    to.copy_(from.view(to.sizes()));
  }
}

void copy_slices(const std::vector<Slice>& sources, const std::vector<at::Tensor>& source_tensors, const Slice& target, at::Tensor& target_local) {
  invariant(sources.size() == source_tensors.size(), target.name, ": ", sources.size(), " slices with ", source_tensors.size(), " tensors");
  for (const auto& piece : reshard(sources, target)) copy_piece(piece, source_tensors[piece.source], target_local);
}

at::Tensor take(const at::Tensor& whole, const Slice& slice) {
  invariant(whole.sizes() == at::IntArrayRef(slice.shape), slice.name, ": a tensor of shape ", whole.sizes(), " is not the whole ",
            to_string(Box::whole(slice.shape)));
  if (slice.boxes.empty()) return at::empty(slice.local_shape(), whole.options());
  const int64_t dim = slice.concat_dim();
  std::vector<at::Tensor> parts;
  for (const auto& box : slice.boxes) {
    at::Tensor part = view_of(whole, box);
    parts.push_back(dim < 0 ? part.reshape({-1}) : part);
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts, std::max<int64_t>(dim, 0));
}

}  // namespace tessera
