#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace tessera {

/// What nlohmann-json says of a field that is missing or of another type, without the library's own number of the sentence in front.
inline std::string json_reason(const std::exception& error) {
  std::string_view text = error.what();
  if (const auto end = text.find("] "); text.starts_with("[json.exception.") && end != std::string_view::npos) text.remove_prefix(end + 2);
  return std::string(text);
}

}  // namespace tessera
