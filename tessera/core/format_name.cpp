#include "tessera/core/format_name.h"

#include <array>
#include <utility>

namespace tessera {
namespace {

constexpr std::array<std::pair<c10::ScalarType, std::string_view>, 6> kNames{{{c10::kFloat, "fp32"},
                                                                              {c10::kDouble, "fp64"},
                                                                              {c10::kBFloat16, "bf16"},
                                                                              {c10::kHalf, "fp16"},
                                                                              {c10::kComplexFloat, "complex64"},
                                                                              {c10::kComplexDouble, "complex128"}}};

}  // namespace

std::string format_name(c10::ScalarType dtype) {
  for (const auto& [known, name] : kNames) {
    if (known == dtype) return std::string(name);
  }
  return c10::toString(dtype);
}

std::optional<c10::ScalarType> format_of(std::string_view name) {
  for (const auto& [dtype, known] : kNames) {
    if (known == name) return dtype;
  }
  return std::nullopt;
}

}  // namespace tessera
