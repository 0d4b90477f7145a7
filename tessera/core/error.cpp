#include "tessera/core/error.h"

#include <sstream>
#include <utility>

namespace tessera::detail {

std::ostream& operator<<(std::ostream& out, const Part& part) {
  if (part.print_ == nullptr) {
    out << std::string_view(static_cast<const char*>(part.at_), part.size_);
  } else {
    part.print_(out, part.at_);
  }
  return out;
}

std::string joined(std::initializer_list<Part> parts) {
  std::ostringstream out;
  for (const Part& part : parts) out << part;
  return std::move(out).str();
}

void throw_config_error(std::initializer_list<Part> parts) { throw ConfigError(joined(parts)); }

void throw_internal_error(std::initializer_list<Part> parts) { throw InternalError("internal error: " + joined(parts)); }

}  // namespace tessera::detail
