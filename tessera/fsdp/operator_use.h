#pragma once

#include <string>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

namespace tessera {

/// What an operator that is given a parameter wants of it, while the parameter shows this rank's slice.
enum class OperatorUse {
  Slice,  ///< it writes it or copies it out: an optimizer, a checkpoint
  Whole,  ///< a forward: products, convolutions, norms, look-ups, or arguments that do not have the slice's shape
  Alone,  ///< it takes no other tensor
  Alike   ///< it takes others, and all have the slice's shape
};

/// `argument`: the position of the parameter, whose slice has `sizes`, among the operator's arguments, or of the list that it is in.
OperatorUse operator_use(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, size_t argument, at::IntArrayRef sizes);

/// Whether all floating-point arguments of the operator have to be of one dtype (products, convolutions).
bool needs_one_dtype(const std::string& name);

}  // namespace tessera
