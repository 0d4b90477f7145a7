#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/empty.h>

#include "tessera/nn/saved_tensors.h"
#include "tessera/nn/values.h"

namespace tessera {

namespace nn {

/// `value` with every defined tensor in it, also inside lists, tuples and dictionaries, replaced by change(tensor), in a fixed order.
template <class Change>
c10::IValue map_tensors(const c10::IValue& value, Change&& change) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(at::Tensor(change(value.toTensor()))) : value;
  if (value.isList()) {
    c10::impl::GenericList mapped(value.toList().elementType());
    for (const c10::IValue& element : value.toListRef()) mapped.push_back(map_tensors(element, change));
    return mapped;
  }
  if (value.isTuple()) {
    std::vector<c10::IValue> elements;
    for (const auto& element : value.toTupleRef().elements()) elements.push_back(map_tensors(element, change));
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (value.isGenericDict()) {
    const auto dictionary = value.toGenericDict();
    c10::impl::GenericDict mapped(dictionary.keyType(), dictionary.valueType());
    for (const auto& entry : dictionary) mapped.insert(entry.key(), map_tensors(entry.value(), change));
    return mapped;
  }
  return value;
}

}  // namespace nn

/// Arguments of a call, kept to make it again: tensors through nn::save, everything else as it is. Objects of the user's own (capsules) are shared.
class KeptValues {
 public:
  explicit KeptValues(const nn::Values& values) {
    for (const auto& value : values) {
      values_.push_back(nn::map_tensors(value, [&](const at::Tensor& tensor) {
        tensors_.push_back({nn::save(tensor), tensor.requires_grad()});
        return empty_place();
      }));
    }
  }

  /// The values again: tensors that belong to no graph, and require a gradient where the first ones did.
  nn::Values restore() const {
    nn::Values restored;
    size_t next = 0;
    for (const auto& value : values_) {
      restored.push_back(nn::map_tensors(value, [&](const at::Tensor&) {
        const auto& kept = tensors_.at(next++);
        return nn::alias_of(kept.tensor->unpack()).set_requires_grad(kept.requires_grad);
      }));
    }
    return restored;
  }

 private:
  struct Kept {
    std::unique_ptr<nn::SavedTensor> tensor;
    bool requires_grad;
  };

  /// Defined, and without memory.
  static const at::Tensor& empty_place() {
    static const at::Tensor place = at::empty({0});
    return place;
  }

  nn::Values values_;
  std::vector<Kept> tensors_;
};

}  // namespace tessera
