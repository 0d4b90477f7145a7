#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace tessera {

/// Of a tensor's values, row by row and wherever it lies: equal for equal bits, whatever the strides. In pieces that all threads read, about memory speed; a
/// tensor of a device, or with other strides, is copied. Not for files: its pieces are no part of any format.
uint64_t hash_of_values(const at::Tensor& tensor);

}  // namespace tessera
