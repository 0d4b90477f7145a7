#pragma once

#include <optional>
#include <string>
#include <string_view>

#include <c10/core/ScalarType.h>

namespace tessera {

/// What keys and files call a floating-point dtype: fp32, bf16, ...; what has no name there keeps libtorch's.
std::string format_name(c10::ScalarType dtype);

/// The other way; nothing where `name` is none of fp32, fp64, bf16, fp16, complex64, complex128.
std::optional<c10::ScalarType> format_of(std::string_view name);

}  // namespace tessera
