#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::nn {

/// Says of a parameter whose memory is kept (keep_memory) that it lies on the host beside the device that computes with it, or does so no more.
void keep_beside(const at::Tensor& parameter, bool beside = true);
bool is_kept_beside(const at::Tensor& parameter);

}  // namespace tessera::nn
