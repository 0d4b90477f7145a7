#pragma once

#include <ATen/record_function.h>

#include "tessera/nn/operators.h"

namespace tessera::plan {

/// Makes operators on meta take the memory that they take on a CPU, where it is not their kernels that differ but libtorch around them:
///
///   sums in autograd's engine   of the terms of one gradient, which the engine adds in place unless they lie on meta
///   numbers beside a tensor     which an operator on a CPU casts to the dtype that it computes in: a tensor of one element, while it runs
///   sums of two types           in whose wider one the narrower tensor is copied, while they are made
///
/// Belongs outside of all other scopes of operators, on the thread that makes it. Changes nothing but memory.
class CpuMemory final : public nn::OperatorHooks {
 public:
  CpuMemory();
  ~CpuMemory() override;
  CpuMemory(const CpuMemory&) = delete;
  CpuMemory& operator=(const CpuMemory&) = delete;

  void call(nn::OperatorCall& operation) override;

 private:
  at::CallbackHandle nodes_;  ///< tells when a node of the graph begins and ends
};

}  // namespace tessera::plan
