#pragma once

#include <cstddef>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

/// For those who watch operators (operator_watch.h). Not part of the public surface.
namespace tessera::nn {

/// Where a tensor stands among an operator's arguments.
struct OperandPlace {
  size_t argument;
  std::optional<size_t> item{};  ///< where the argument is a list: in it
};

/// Calls visit(tensor, place) for each tensor that an operator is given, in lists, too.
template <class Visit>
void for_each_operand(at::ArrayRef<c10::IValue> arguments, const Visit& visit) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor()) {
      if (arguments[i].toTensor().defined()) visit(arguments[i].toTensor(), OperandPlace{i});
    } else if (arguments[i].isList() && !arguments[i].isIntList()) {
      const at::ArrayRef<c10::IValue> items = arguments[i].toListRef();
      for (size_t k = 0; k < items.size(); ++k) {
        if (items[k].isTensor() && items[k].toTensor().defined()) visit(items[k].toTensor(), OperandPlace{i, k});
      }
    }
  }
}

}  // namespace tessera::nn
