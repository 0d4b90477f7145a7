#pragma once

#include <torch/csrc/autograd/function.h>

#include "tessera/comm/group.h"

namespace tessera::comm::differentiable {

/// Whether what this node of a graph gave is the same on every rank of `group`: of an all_reduce, all_gather or broadcast over its ranks, or over more.
bool gives_the_same_on(const Group& group, const torch::autograd::Node& node);

/// Whether each rank of `group` has its own part, or copy, of it: of any other collective of these, over its ranks or over more.
bool gives_its_own_on(const Group& group, const torch::autograd::Node& node);

}  // namespace tessera::comm::differentiable
