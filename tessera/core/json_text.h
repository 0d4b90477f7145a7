#pragma once

#include <string>

namespace tessera {

/// JSON as it is written for others to read. Paths and names may hold bytes that are no UTF-8, of which there is no JSON: each of them is written as U+FFFD,
/// rather than that what was computed is lost. What has to read back byte for byte is checked before.
template <class Json>
std::string json_text(const Json& json, int indent = -1) {
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tessera
