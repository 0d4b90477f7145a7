#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/custom_class.h>

#include "tessera/core/error.h"

namespace tessera::nn {

/// What goes into and comes out of a module: tensors, optionals, lists and scalars, in the order of `forward`'s parameters.
/// A tuple or pair that `forward` returns arrives as several values; everything else as one.
using Values = std::vector<c10::IValue>;

namespace detail {

template <class T>
inline constexpr bool is_optional = false;
template <class T>
inline constexpr bool is_optional<std::optional<T>> = true;
template <class T>
inline constexpr bool is_handle = false;
template <class T>
inline constexpr bool is_handle<c10::intrusive_ptr<T>> = true;
template <class T>
inline constexpr bool is_tuple = false;
template <class... T>
inline constexpr bool is_tuple<std::tuple<T...>> = true;
template <class A, class B>
inline constexpr bool is_tuple<std::pair<A, B>> = true;
template <class T>
inline constexpr bool is_integer = std::is_integral_v<T> && !std::is_same_v<T, bool>;

/// One C++ value of type T -> one IValue. An object of the user's own travels as an intrusive_ptr to something derived from torch::CustomClassHolder.
template <class T>
c10::IValue to_value(T value) {
  if constexpr (is_optional<T>) {
    return value ? to_value<typename T::value_type>(*std::move(value)) : c10::IValue();
  } else if constexpr (is_handle<T>) {
    return value ? c10::IValue::make_capsule(std::move(value)) : c10::IValue();
  } else if constexpr (is_integer<T>) {
    return c10::IValue(static_cast<int64_t>(value));
  } else if constexpr (std::is_floating_point_v<T>) {
    return c10::IValue(static_cast<double>(value));
  } else {
    return c10::IValue(std::move(value));
  }
}

/// One IValue -> the C++ type T. An interceptor that hands on the wrong kind of value is told which.
template <class T>
T from_value(const c10::IValue& value) {
  if constexpr (is_optional<T>) {
    if (value.isNone()) return std::nullopt;
    return from_value<typename T::value_type>(value);
  } else if constexpr (std::is_same_v<T, at::Tensor>) {
    invariant(value.isTensor(), "an interceptor handed on a value of kind ", value.tagKind(), " where the module takes a tensor");
    return value.toTensor();
  } else if constexpr (is_handle<T>) {
    if (value.isNone()) return T();
    return c10::static_intrusive_pointer_cast<typename T::element_type>(value.toCapsule());
  } else if constexpr (is_integer<T>) {
    return static_cast<T>(value.toInt());
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(value.toDouble());
  } else {
    return value.to<T>();
  }
}

/// What forward returned -> values.
template <class T>
Values to_outputs(T result) {
  if constexpr (is_tuple<T>) {
    return std::apply([](auto... parts) { return Values{to_value(std::move(parts))...}; }, std::move(result));
  } else {
    return Values{to_value(std::move(result))};
  }
}

template <class Tuple, size_t... I>
Tuple tuple_from(const Values& values, std::index_sequence<I...>) {
  return Tuple(from_value<std::remove_cvref_t<std::tuple_element_t<I, Tuple>>>(values[I])...);
}

/// Values -> what forward returns.
template <class T>
T from_outputs(const Values& values) {
  if constexpr (std::is_void_v<T>) {
    return;
  } else if constexpr (is_tuple<T>) {
    constexpr size_t size = std::tuple_size_v<T>;
    invariant(values.size() == size, "an interceptor returned ", values.size(), " values where the module returns ", size);
    return tuple_from<T>(values, std::make_index_sequence<size>());
  } else {
    invariant(values.size() == 1, "an interceptor returned ", values.size(), " values where the module returns 1");
    return from_value<T>(values[0]);
  }
}

}  // namespace detail

}  // namespace tessera::nn
