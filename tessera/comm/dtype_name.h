#pragma once

#include <string_view>

#include <c10/core/ScalarType.h>

namespace tessera::comm {

/// What records and messages call a dtype: float32, bfloat16, uint8, ...; "none" for Undefined. The text lives for ever.
std::string_view dtype_name(c10::ScalarType dtype);

}  // namespace tessera::comm
