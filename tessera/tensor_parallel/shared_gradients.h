#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tessera/comm/group.h"
#include "tessera/nn/parameter.h"

/// Gradients of which several ranks of a tensor-parallel group hold a term each: norms and biases under sequence parallelism, keys and values that ranks share.
namespace tessera::tensor_parallel {

/// Ranks of the group that hold the same elements of a parameter: `holders` of them from `first` on, the set number `set` of `sets`.
struct Holders {
  int first = 0, holders = 1, set = 0, sets = 1;
  std::vector<int64_t> shape = {};  ///< of the logical parameter
};
using SharedParameters = std::map<std::string, Holders>;  // by logical name

/// Sums the gradients of those `updated` that are shared over `group`, in place, in one all-reduce a dtype: 2 (n-1)/n of their elements sent, of those with
/// several sets all sets'. What sharding made of a parameter has to be the same part of it on every rank of `group`.
void sum_aligned(const comm::Group& group, const SharedParameters& shared, const std::vector<nn::NamedParameter>& updated);

/// The same where the ranks' parts are different ones. `everyone`: the group together with the ranks over which sharding cut; of each element, a rank of each
/// of its holders' has one term. Each rank puts its terms at their place in the logical tensors: 2 (n-1)/n of their elements sent, n the size of `everyone`,
/// and as many held for the while, in fp32 (or double where a parameter is).
void sum_by_place(const comm::Group& everyone, const SharedParameters& shared, const std::vector<nn::NamedParameter>& updated);

}  // namespace tessera::tensor_parallel
