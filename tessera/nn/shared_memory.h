#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/nn/parameter.h"

/// What techniques that move parameters share. Not part of the public surface.
namespace tessera::nn {

/// Between which bytes of its storage a tensor that has one, and elements, lies; with the gaps between its elements.
std::pair<int64_t, int64_t> bytes_of(const at::Tensor& tensor);

/// Throws ConfigError, by both names, where two of `parameters`, or one of them and a buffer of `module`, lie in the same memory without being one tensor: a
/// write to one is seen by the other, and would not be once `technique` has given each parameter memory of its own.
void refuse_shared_memory(const std::string& technique, const torch::nn::Module& module, const std::vector<NamedParameter>& parameters);

/// Where parameters lie before `technique` moves them. A module may keep views of them as plain members (a head that is tied by `embedding->weight.t()`), which
/// stay behind with the values of then.
class FormerMemory {
 public:
  FormerMemory(std::string technique, const std::vector<NamedParameter>& parameters);
  ~FormerMemory();
  FormerMemory(const FormerMemory&) = delete;
  FormerMemory& operator=(const FormerMemory&) = delete;

  /// They have moved. From here on an operator that this thread calls outside of backward passes throws ConfigError, by the parameter's name, where it is given
  /// what lies there while the parameter requires a gradient. That somebody holds such a view is not refused: the graph of an earlier forward does. Costs
  /// nothing where nobody does, and holds no memory.
  void refuse_use();

 private:
  class Watcher;
  std::shared_ptr<Watcher> watcher_;
};

}  // namespace tessera::nn
