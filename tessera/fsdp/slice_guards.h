#pragma once

#include <vector>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include "tessera/fsdp/operator_use.h"
#include "tessera/fsdp/sharded_step.h"
#include "tessera/fsdp/unit_tensors.h"
#include "tessera/nn/part_operators.h"

namespace tessera {

/// A parameter that shows its slice, among an operator's arguments.
struct SeenSlice {
  at::Tensor tensor;
  UnitPlace place;
  OperandPlace operand;
};

/// What is right with whole parameters, gradients and state, and with this rank's slices of them is another number on each rank: refused by name (ConfigError),
/// with the line to change. Changes nothing and starts no collective; whether something is refused is the same on every rank that is given it.
class SliceGuards {
 public:
  using Arguments = at::ArrayRef<c10::IValue>;

  SliceGuards(const torch::nn::Module& module, const UnitTensors& tensors, const ShardedStep& step);

  /// Of any operator outside of backward passes: libtorch's clip_grad_norm_ and LBFGS, an optimizer's state of whole parameters, what fills slices with random
  /// numbers, what writes by rows. `in_call`: within a module's call.
  void before(const c10::FunctionSchema& schema, Arguments arguments, bool in_call);

  void refuse_layers_over_slices(const c10::FunctionSchema& schema, Arguments arguments, const std::vector<at::Tensor>& handles) const;
  void refuse_functions_over_slices(const std::vector<SeenSlice>& seen) const;
  void refuse_other_rows(const c10::FunctionSchema& schema, Arguments arguments) const;
  void refuse_rows_of_other_wrappers(const c10::FunctionSchema& schema, Arguments arguments) const;
  void refuse_whole_gradients(Arguments arguments) const;
  void refuse_whole_values(const c10::FunctionSchema& schema, Arguments arguments, bool in_call) const;
  /// `may_end`: a forward is under way that a write of this rank's rows ends.
  void refuse_lost_writes(const c10::FunctionSchema& schema, Arguments arguments, bool may_end) const;
  /// `given_whole`: an operator that is given parameters which show slices gets the wholes.
  void refuse_rows_beside_wholes(const c10::OperatorHandle& op, Arguments arguments, bool given_whole) const;
  void refuse_fitting_both(const c10::FunctionSchema& schema, const UnitPlace& place, const std::vector<at::Tensor>& others) const;

 private:
  void refuse_local_norms(const c10::FunctionSchema& schema, Arguments arguments);
  bool stays_in_rows(const c10::FunctionSchema& schema, Arguments arguments) const;
  void refuse_flat_gradients(const c10::FunctionSchema& schema, Arguments arguments) const;
  void refuse_whole_state(const c10::FunctionSchema& schema, Arguments arguments, bool in_call) const;
  void refuse_draws(const c10::FunctionSchema& schema, Arguments arguments);
  void refuse_by_rows(const c10::FunctionSchema& schema, Arguments arguments) const;
  bool stretches(Arguments arguments, const at::Tensor& handle) const;

  const torch::nn::Module& module_;
  const UnitTensors& tensors_;
  const ShardedStep& step_;
  nn::LocalNorms norms_;
  nn::LocalDraws draws_;
};

}  // namespace tessera
