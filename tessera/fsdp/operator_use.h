#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>

#include "tessera/nn/operands.h"

namespace tessera {

/// What an operator that is given a parameter wants of it, while the parameter shows this rank's slice.
enum class OperatorUse {
  Slice,   ///< it writes it, or makes a handle of it: an optimizer, a checkpoint
  Shape,   ///< it makes another tensor of its shape: state of an optimizer, or in a forward what `1 - weight` begins with
  Whole,   ///< a forward: products, convolutions, norms, look-ups
  Unlike,  ///< it takes others, and not all have the slice's shape: a forward
  Clone,   ///< a copy as it is: a snapshot
  Cast,    ///< a copy in another dtype
  Look,    ///< one number of all of it, a comparison, or what prints it: a line for a log
  Alone,   ///< it takes no other tensor
  Alike    ///< it takes others, and all have the slice's shape
};

using nn::for_each_operand;
using nn::OperandPlace;

/// What the operator computes with beside the tensor at `place`: all tensors of its other arguments; of a list as long as the one that it stands in, the item
/// that stands at its place (at::_foreach_add_(averages, parameters)).
std::vector<at::Tensor> tensors_beside(at::ArrayRef<c10::IValue> arguments, const OperandPlace& place);

/// `place`: of `parameter`, which shows its slice.
OperatorUse operator_use(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, const OperandPlace& place, const at::Tensor& parameter);

/// Whether nothing but the forward of a layer calls it (products, convolutions, norms over features, look-ups, all kernels of ours).
bool is_layer(const std::string& name);

/// Whether nothing but a forward does: layers, and what makes views of parameters or reads rows of them.
bool is_forward(const std::string& name);

/// Whether it computes element by element, as optimizers and averages do, so that all that it takes has one shape, or shapes that broadcast; a reduction may
/// follow (losses).
bool goes_by_elements(const c10::OperatorHandle& op);
/// Whether what it makes has a value for each element of what it is given, stretched or not: by elements, a copy, a view, zeros like it.
bool keeps_rows(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments);
/// Whether that is of its shape, whatever it holds.
bool makes_alike(const std::string& name);
/// Whether it lays tensors of a list one beside the other.
bool joins(const std::string& name);

/// What an operator that goes by elements may take beside each other.
bool broadcast_together(at::IntArrayRef a, at::IntArrayRef b);

/// Whether the operator writes its argument `argument`, or any.
bool writes(const c10::FunctionSchema& schema, size_t argument);
bool writes(const c10::FunctionSchema& schema);

/// The same of its elements, and not of how it lies or whether it wants a gradient alone.
bool writes_elements(const c10::FunctionSchema& schema, size_t argument);

/// Whether the operator puts other memory in the place of its first argument's (set_data, of which nothing but libtorch's check of the two is seen).
bool replaces(const std::string& name);

/// Whether what it makes is a view of an argument, or may be; of its argument `argument`.
bool makes_views(const c10::FunctionSchema& schema);
bool makes_views(const c10::FunctionSchema& schema, size_t argument);

/// Whether the operator writes the tensor at `place` by where rows (dimension 0) stand in it, or by all of them. Goes by names, dimensions and indices, never
/// by sizes.
bool writes_by_rows(const c10::FunctionSchema& schema, at::ArrayRef<c10::IValue> arguments, const OperandPlace& place);

/// Whether it is a collective of libtorch's own that was called through the dispatcher, and writes its first argument.
bool brings_together(const std::string& name);

/// Whether all floating-point arguments of the operator have to be of one dtype (products, convolutions).
bool needs_one_dtype(const std::string& name);

}  // namespace tessera
