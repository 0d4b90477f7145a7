#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/nn/saved_tensors.h"
#include "tessera/tensor_parallel/convert.h"

namespace tessera::tensor_parallel {

/// Keeps, of a tensor that was gathered along the sequence, this rank's part from forward to backward: layers that save the whole get a handle, and the first
/// whose backward asks gathers it again, for all of them. Memory: S/n in place of S elements; traffic: one more all-gather, (n-1)/n S elements sent per rank
/// (arXiv:2205.05198).
///   whole = all_gather(part);  SavedTensorScope scope(regather(context, part, whole));  ...layers that take `whole`...
std::shared_ptr<nn::SavedTensorHooks> regather(std::shared_ptr<Context> context, const at::Tensor& part, const at::Tensor& whole);

}  // namespace tessera::tensor_parallel
