#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

/// Which part of a logical (whole-model) tensor a rank holds, and the arithmetic of moving between two such descriptions. Knows no
/// processes and no models.
namespace tessera {

/// A rectangle of a tensor's index space: offset[d] .. offset[d] + size[d] in each dimension d. No dimensions: a scalar.
struct Box {
  std::vector<int64_t> offset, size;

  static Box whole(const std::vector<int64_t>& shape);
  int64_t numel() const;  ///< 1 for a scalar, 0 where a size is 0
  bool empty() const { return numel() == 0; }
  bool contains(const Box& other) const;
  bool operator==(const Box&) const = default;
};

/// The elements in both; sizes are 0 where they do not meet.
Box intersect(const Box& a, const Box& b);
std::string to_string(const Box& box);  ///< "[0:4, 2:8]"

/// The part of the logical tensor `name` (shape `shape`) that one rank holds: the union of `boxes`, which do not overlap. No boxes: nothing.
/// The rank-local tensor is the boxes one after the other along the one dimension in which they differ (`concat_dim()`; zig-zag and fused layouts), or, where
/// they differ in more than one, their elements flattened one box after the other.
struct Slice {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<Box> boxes;

  static Slice whole(std::string name, std::vector<int64_t> shape);
  /// Rows (or, with `dim`, another dimension) `begin` .. `begin + size` of the whole.
  static Slice along(std::string name, std::vector<int64_t> shape, int64_t dim, int64_t begin, int64_t size);

  int64_t numel() const;          ///< elements this rank holds
  int64_t logical_numel() const;  ///< elements of the whole tensor
  bool is_whole() const;          ///< one box that is everything
  /// Dimension along which the boxes are laid one after the other; 0 for one box or none; -1 where they are flattened.
  int64_t concat_dim() const;
  std::vector<int64_t> local_shape() const;  ///< shape of the rank-local tensor; without boxes, `shape` with 0 rows ({0} for a scalar)
  /// Where box `index` lies inside the rank-local tensor (rank 1 where the boxes are flattened).
  Box local_box(size_t index) const;
  /// Throws InternalError naming the tensor when a box leaves the shape, has other dimensions, or overlaps another.
  void check() const;
  bool operator==(const Slice&) const = default;
};

/// The part of `held` that is the elements `begin` .. `begin + size` of its local tensor, row-major: a shard of a shard. A run needs up to 2d - 1 boxes of d
/// dimensions, and its local tensor is the run. Throws InternalError for a run that leaves the tensor, and where boxes lie side by side (concat_dim() > 0),
/// so that a run is no union of few boxes.
Slice elements(const Slice& held, int64_t begin, int64_t size);

/// A rectangle that travels whole: `box` in logical indices, and where it lies in the local tensor of source number `source` and of the target. Where a local
/// tensor is flattened (concat_dim() = -1), its local rectangle is rank 1 and the piece is one contiguous run of it.
struct Piece {
  int source;
  Box box;
  Box source_local, target_local;
  bool operator==(const Piece&) const = default;
};

/// Which pieces of which sources make up `target`. Each element of the target is taken exactly once, from the first source that holds it; so sources may
/// overlap (replicas). Pieces are in the order of the target's boxes, then of the sources. Throws ConfigError naming the tensor and a missing box where
/// the sources do not cover the target, or where their shapes differ from the target's.
std::vector<Piece> reshard(const std::vector<Slice>& sources, const Slice& target);

/// Copies one piece between local tensors (converting dtype as copy_ does). Memory: none beyond the two tensors.
void copy_piece(const Piece& piece, const at::Tensor& source, at::Tensor& target);

/// reshard() and copy_piece() in one: fills `target_local` from the sources' local tensors.
void copy_slices(const std::vector<Slice>& sources, const std::vector<at::Tensor>& source_tensors, const Slice& target, at::Tensor& target_local);

/// The rank-local tensor of `slice`, cut out of the whole one (a view where it is one box, else a new tensor).
at::Tensor take(const at::Tensor& whole, const Slice& slice);

/// The dealing rule used everywhere (rows, micro-batches, layers): {begin, size} of part `index` when `total` things are dealt over `parts` in contiguous runs
/// that differ by at most one; the first total % parts runs get one more. Throws InternalError unless 0 <= index < parts and total >= 0.
std::pair<int64_t, int64_t> chunk(int64_t total, int parts, int index);

/// Visits the contiguous runs of `box` inside a row-major tensor of `shape`, in row-major order: visit(first linear index, number of elements). This is how a
/// slice draws its own random numbers or reads a file: runs * size elements, nothing in between.
void for_each_run(const std::vector<int64_t>& shape, const Box& box, const std::function<void(int64_t first, int64_t count)>& visit);

}  // namespace tessera
