#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/nn/parameter.h"

/// What techniques that move parameters share. Not part of the public surface.
namespace tessera::nn {

/// Throws ConfigError, by both names, where two of `parameters`, or one of them and a buffer of `module`, lie in the same memory without being one tensor: a
/// write to one is seen by the other, and would not be once `technique` has given each parameter memory of its own.
void refuse_shared_memory(const std::string& technique, const torch::nn::Module& module, const std::vector<NamedParameter>& parameters);

}  // namespace tessera::nn
