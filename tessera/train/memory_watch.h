#pragma once

#include <memory>
#include <optional>

#include "tessera/core/attachment.h"
#include "tessera/memory/memory.h"
#include "tessera/nn/operators.h"
#include "tessera/train/compose.h"

namespace tessera {

/// While alive, tells `tracker`, which has to keep details, what it counts on this thread: names of parameters, gradients and optimizer state; shape and dtype
/// of what operators return; and the module in whose forward, or in the backward of whose operators, a tensor was allocated. In forward that is the innermost
/// interceptable module; in backward the module that made the autograd node that runs, found by the number that libtorch gives each node as forward makes it.
/// Plain torch::nn modules and what the model does outside of its modules stay unnamed. Changes no value and no allocation. Cost: some 2 us an operator.
/// Scopes of operators (nn::OperatorScope) that begin while it lives end before it does.
class MemoryWatch {
 public:
  MemoryWatch(MemoryTracker tracker, const Composition& run);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

 private:
  Attachment attached_;
  std::optional<nn::OperatorScope> operators_;
};

}  // namespace tessera
