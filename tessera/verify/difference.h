#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/verify/verify.h"

namespace tessera {

/// Largest absolute entry, as a double; 0 of an empty tensor.
double largest_entry(const at::Tensor& tensor);

/// Largest |got - want|; infinity where an entry of either is not finite and the other's is not the same, or a NaN. Same shape, any dtypes.
double largest_difference(const at::Tensor& got, const at::Tensor& want);

/// Difference over scale: 0 where there is no difference, infinity where there is one and the scale is 0, or not finite, which says nothing of what is small.
double relative(double difference, double scale);

/// What is small for a tensor: the largest entry of a tensor, by name.
using Scales = std::map<std::string, double>;

/// Each tensor's own largest entry.
Scales own_scales(const std::vector<checkpoint::SlicedTensor>& reference);

/// Of a gradient that is zero in exact arithmetic, the module ("layers.0.attention.") whose gradients say how large its rounding is; empty for all others. A
/// key's bias adds one number to all of a query's scores, which the softmax takes out again; and where a query has one key, queries and keys say nothing.
std::string measure_of_zeros(const std::string& parameter, int64_t keys);

/// The same, but at least a tenth of the largest entry among the parameters of the same module. What is zero in exact arithmetic is rounding alone, and is
/// measured by what it is the rounding of: a key's bias by its weight's gradient, and queries and keys by their attention's, where `keys`, the most that a
/// query sees, is one.
Scales gradient_scales(const std::vector<checkpoint::SlicedTensor>& reference, int64_t keys);

/// The logical tensor of that name without rounding, as far as the comparison goes; asked for where one is beyond its bound.
using Exact = std::function<at::Tensor(const std::string& name)>;

/// Compares one kind of tensors step by step: every rank's slices with the same part of one device's logical tensors.
class TensorComparer {
 public:
  explicit TensorComparer(double bound) { list_.bound = bound; }

  /// `reference`: whole tensors; `ranks`: each rank's. An undefined tensor counts as zeros. Elements that no rank holds, and shapes that do not fit, are
  /// infinitely far apart. `floor`: by what an element may be off whatever its tensor's scale. With `exact`, what is beyond the bound is measured by how much
  /// farther from that a rank is than one device: where a sum cancels, both are off by rounding of its terms, which its result says nothing of.
  void compare(int64_t step, const std::vector<checkpoint::SlicedTensor>& reference, const std::vector<std::vector<checkpoint::SlicedTensor>>& ranks,
               const Scales& scales, double floor = 0, const Exact& exact = {});

  const DifferenceList& list() const { return list_; }

 private:
  Difference& entry(const std::string& name);

  DifferenceList list_;
};

/// Fills `target`, a whole tensor, with the logical tensor that the ranks' slices make up; leaves it as it is where they do not.
void follow(const checkpoint::SlicedTensor& target, const std::vector<std::vector<checkpoint::SlicedTensor>>& ranks);

}  // namespace tessera
