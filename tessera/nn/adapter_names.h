#pragma once

#include <string_view>

/// Names of the parameters that stand beside a linear layer's weight, known to who adds them and to who writes them to files.
namespace tessera::nn {

inline constexpr std::string_view kLoraA = "lora_a", kLoraB = "lora_b";

/// Whether a parameter of this name is one of them.
inline bool is_adapter(std::string_view parameter) {
  const std::string_view last = parameter.substr(parameter.rfind('.') + 1);
  return last == kLoraA || last == kLoraB;
}

}  // namespace tessera::nn
