#include <algorithm>

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include "tessera/core/error.h"
#include "tessera/layout/slice.h"

// What is still wanted of a target is a list of boxes; each source box takes away what it has and leaves at most two boxes a dimension. So every element is
// taken once, from the first who has it, and replicas among the sources do no harm; whatever is left in the end is what nobody holds. Where a side is
// flattened, a piece must be one run of it, and boxes are cut until they are.

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

  Placed(const Slice& slice, size_t index) : box(slice.boxes[index]), local(slice.local_box(index)), flat(slice.concat_dim() < 0) {}

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
  std::vector<Piece> pieces;
  for (size_t t = 0; t < target.boxes.size(); ++t) {
    const Placed to(target, t);
    std::vector<Box> wanted;
    if (!to.box.empty()) wanted.push_back(to.box);
    for (size_t s = 0; s < sources.size() && !wanted.empty(); ++s) {
      for (size_t b = 0; b < sources[s].boxes.size() && !wanted.empty(); ++b) {
        const Placed from(sources[s], b);
        std::vector<Box> left;
        for (const Box& want : wanted) {
          const Box both = intersect(want, from.box);
          subtract(want, from.box, left);
          if (both.empty()) continue;
          for_each_copyable(both, from, to, [&](const Box& run) { pieces.push_back({static_cast<int>(s), run, from.to_local(run), to.to_local(run)}); });
        }
        wanted = std::move(left);
      }
    }
    require(wanted.empty(), "tensor ", target.name, ": no source holds ", wanted.empty() ? "" : to_string(wanted.front()), " of ",
            to_string(Box::whole(target.shape)), "; the checkpoint or the group that should hold it is incomplete");
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
