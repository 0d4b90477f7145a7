#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "tessera/comm/group.h"

/// torch::save of one rank's cut model keeps its parts; torch::load of that file on every rank fits wherever cuts are even, and is another model. Such a file
/// replaces all parts, and nothing but their bits tells: where one differs between ranks, or was not given, those that are alike may be so on purpose.
namespace tessera::nn {

/// A number of a part's bits; of constants, such as zeros, which may be all ranks', 0. Reads it on the host.
int64_t bits_of(const at::Tensor& part);

/// A number of a part's bits where a program has given it (was_given), and nothing where not; of constants, such as zeros, which may be all ranks', 0 in either
/// case. Reads it on the host.
std::optional<int64_t> bits_given(const at::Tensor& part);

/// A number above zero of the first values of each part: ranks on which it differs hold other parts. Costs less than the bits of all.
int64_t beginnings_of(const std::vector<at::Tensor>& parts);

/// What a rank tells the others of its parts, of which these are the bits: one number above zero; 0 where there is nothing to compare.
int64_t told_together(const std::vector<int64_t>& bits);
/// Of parts at hand: 0 also where one was not given.
int64_t told_of_given(const std::vector<at::Tensor>& parts);

/// What each rank of the group tells: `own` of this one. A message where `parameter`'s small ones live. Collective.
std::vector<int64_t> tell_ranks(const comm::Group& group, const at::Tensor& parameter, int64_t own);

/// Whether all ranks were given the same, of what each has told.
bool were_given_alike(const std::vector<int64_t>& told);

/// What an optimizer's state of sizes `state` may be, and the way out, where this rank has a part of other sizes of a parameter of sizes `whole`.
/// `another_ranks`: some other rank's part has those of the state. `wrapper`: what the optimizer was to be made behind.
std::string whose_state(at::IntArrayRef state, at::IntArrayRef whole, bool another_ranks, const std::string& wrapper);

}  // namespace tessera::nn
