#include "tessera/core/temporary_place.h"

#include <cstdlib>

#include "tessera/core/error.h"

namespace tessera {

void TemporaryPlace::refuse(const std::string& why, const std::string& way_out) const {
  throw ConfigError(detail::concat(knob, ": nothing can be made there (", why, "); set TMPDIR to a folder that exists and can be written, or ", way_out));
}

TemporaryPlace temporary_place() {
  for (const char* const name : {"TMPDIR", "TMP", "TEMP", "TEMPDIR"}) {
    const char* const value = std::getenv(name);
    if (value != nullptr && *value != 0) return {.knob = detail::concat(name, " = ", value), .folder = std::filesystem::absolute(value)};
  }
  return {.knob = "TMPDIR is not set, and /tmp is taken", .folder = "/tmp"};
}

}  // namespace tessera
