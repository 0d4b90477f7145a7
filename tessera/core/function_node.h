#pragma once

#include <string>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>

namespace tessera {

/// What the forward of an AutogradFunction has left in its saved_data under `key`, for backward; null of any other node. The node's.
const c10::IValue* saved_by(const torch::autograd::Node& node, const std::string& key);

}  // namespace tessera
