#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include "tessera/comm/group.h"

/// An all-to-all in two halves, in both passes, between which a rank may compute.
namespace tessera::experts {

struct InFlight {
  at::Tensor rows;  ///< not to be read yet
  c10::intrusive_ptr<c10::intrusive_ptr_target> message;
};

/// Rows of x set out: as comm::differentiable::all_to_all, `in` of x to each rank and `out` from each. Traffic: that of one all-to-all, and in backward
/// another.
///
/// Two nodes of autograd, which visits the later ones first. So what is computed between begin and end going forward lies between the two going backward:
/// there the end sends gradients out, and the begin waits for them.
InFlight begin_all_to_all(const comm::Group& group, const at::Tensor& x, const std::vector<int64_t>& out, const std::vector<int64_t>& in);

/// Waits for the rows.
at::Tensor end_all_to_all(const InFlight& coming);

}  // namespace tessera::experts
