#pragma once

#include <ATen/core/Tensor.h>

/// What data-parallel techniques share. Not part of the public surface.
namespace tessera {

/// A sum over ranks whose terms cross the network in fewer bits than they are kept in: rounded to `dtype`, summed by whatever collective, brought back. In bf16
/// a term errs by 2^-9 of itself. In fp16 a sum may overflow where its terms do not, so they are divided by the number of ranks first: an element errs by 2^-12
/// of itself above 6e-5 n, and is lost below 3e-8 n.
/// Memory: `dtype`'s bytes an element, as MemoryCategory::Comm, from construction to release.
class NarrowSum {
 public:
  /// Rounds `terms`, which it leaves divided (fp16).
  NarrowSum(const at::Tensor& terms, at::ScalarType dtype, int ranks);

  const at::Tensor& crossing() const { return crossing_; }  ///< [terms], to be reduced in place

  /// target <- the sum that now lies in `part`, a view of crossing(); `add`: added to what target holds.
  void store(const at::Tensor& part, const at::Tensor& target, bool add) const;

  /// Gives the memory back now, whoever else still holds the tensor.
  void release();

 private:
  double divisor_;
  at::Tensor crossing_;
};

}  // namespace tessera
