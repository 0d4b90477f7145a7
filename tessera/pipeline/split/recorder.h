#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "tessera/pipeline/split/graph.h"

namespace tessera::tape {

using Forward = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// The graph of `forward(inputs)`, a pass through `root` and what is in it: without memory, without arithmetic, and without a trace in the module, its buffers
/// and libtorch's generator. Operators are seen above autograd and autocast, as the program calls them. Modules that announce their calls (nn::Module) are
/// recorded as one node each, with their own operators and autograd Functions, unless `inside` says that what is in them has to be told apart.
///
/// Where an operator has no kernel for meta tensors, and under autocast, which knows none, it runs once on zeros on the CPU: memory and time of that operator.
/// Throws ConfigError, naming the operator, the module and the way out, for what a replay could not repeat: a host that reads a tensor, shapes that depend on
/// values, autograd Functions and hooks outside of our modules, requires_grad that is changed by hand, writes into what is neither parameter nor buffer.
/// Not seen, and wrong in a replay: a host that reads through data_ptr() (null here), and numbers and control flow that depend on anything but the inputs'
/// shapes (SplitModel records again, now and then, and compares).
///
/// `compared`: the graph of a pass with the same inputs and modes that this one's will be held against. A module that is one node there is not called again:
/// its results are such as they were; but one that changes what it is given, or gives numbers, is.
Graph record(torch::nn::Module& root, const Forward& forward, const std::vector<at::Tensor>& inputs, const std::function<bool(const std::string& path)>& inside,
             const Graph* compared = nullptr);

}  // namespace tessera::tape
