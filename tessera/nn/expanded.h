#pragma once

#include <ATen/core/Tensor.h>

/// Not part of the public surface.
namespace tessera::nn {

/// Of `tensor`, which has the shape of `like`, what is written when `like` is: the elements of an expanded one are the same memory many times.
at::Tensor written_once(at::Tensor tensor, const at::Tensor& like);

}  // namespace tessera::nn
