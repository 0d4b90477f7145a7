#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

/// torch::save of one rank's cut model keeps its parts; torch::load of that file on every rank fits wherever cuts are even, and is another model. Such a file
/// replaces all parts, and nothing but their bits tells: where one differs between ranks, or was not given, those that are alike may be so on purpose.
namespace tessera::nn {

/// What a rank tells the others of its parts: a number of their bits, which a double holds, where a program has given each of them (was_given); 0 where one was
/// not, and where there is nothing to compare, all being constants, such as zeros, which may be all ranks'. Reads them on the host, once: forget_given.
int64_t bits_given(const std::vector<at::Tensor>& parts);

/// One number of several.
int64_t told_together(const std::vector<int64_t>& told);

/// Whether all ranks were given the same, of what each has told.
bool were_given_alike(const std::vector<int64_t>& told);

}  // namespace tessera::nn
