#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/layout/slice.h"
#include "tessera/nn/parameter.h"

namespace tessera::optim {

/// Gradients that are spread over ranks in the same way, and how their sums of squares meet: `reduce` adds an fp64 tensor up, element by element, over the
/// ranks that hold the other slices (an all-reduce over the axes that shard these parameters; never over axes that replicate them, which would count twice).
struct NormGroup {
  std::vector<nn::NamedParameter> parameters;   ///< tied parameters once (nn::unique_parameters)
  std::function<void(at::Tensor&)> reduce;      ///< empty where every rank holds the whole
  std::vector<nn::NamedParameter> elsewhere{};  ///< of which another rank counts the same elements: clipped as the others
};

enum class NormOrder {
  Fast,       ///< each rank adds its rows up, then ranks exchange one number a group
  FixedTree,  ///< rows of all ranks meet first and are added in one tree over their logical index: the same bits however dimension 0 is cut
};

/// Global 2-norm of the gradients of all groups: an fp64 scalar on the gradients' device, never read on the host. Parameters without a gradient count as zero.
/// Each row (index of dimension 0 of the logical tensor) is summed in fp64 in an order that depends on nothing but its length, so no number of threads shows.
/// Memory: 8 bytes a local row (Fast) or a logical row (FixedTree). Traffic: 4 bytes an fp32 element, one pass; `reduce` once a group, of 1 element (Fast) or
/// of all logical rows (FixedTree). Throws InternalError where a gradient does not fit its slice.
at::Tensor global_norm(const std::vector<NormGroup>& groups, NormOrder order = NormOrder::Fast);

/// The same for parameters that every rank holds whole.
at::Tensor global_norm(const std::vector<nn::NamedParameter>& parameters);

/// Multiplies every gradient by min(1, max_norm / (norm + 1e-6)), as torch.nn.utils.clip_grad_norm_ does; fp64 gradients by a factor of fp64, others by one of
/// fp32. Works on meta. Traffic: none on a CPU where the factor is 1, else 8 bytes an fp32 element. A norm that is not finite gives gradients that are not
/// finite.
void clip_gradients(const std::vector<nn::NamedParameter>& parameters, const at::Tensor& norm, double max_norm);

/// The same of all groups, and of what is counted elsewhere.
void clip_gradients(const std::vector<NormGroup>& groups, const at::Tensor& norm, double max_norm);

/// The factor by which clip_gradients multiplies: fp64 [], 1 where it leaves gradients as they are.
at::Tensor clip_factor(const at::Tensor& norm, double max_norm);

/// Multiplies every gradient by the scalar tensor `factor`, in place.
void scale_gradients(const std::vector<nn::NamedParameter>& parameters, const at::Tensor& factor);

}  // namespace tessera::optim
