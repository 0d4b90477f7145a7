#include "tessera/core/text_file.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "tessera/core/error.h"

namespace tessera {

void write_text_file(const std::string& what, const std::string& path, std::string_view text) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const bool opened = file.is_open();
  file << text << std::flush;
  const int reason = file.good() ? 0 : errno;
  file.close();
  if (file.good()) return;
  std::error_code ignored;  // half a text is none
  if (opened && std::filesystem::is_regular_file(path, ignored)) std::filesystem::remove(path, ignored);
  const bool full = reason == ENOSPC || reason == EDQUOT || reason == EFBIG;
  throw ConfigError(detail::concat(what, ": cannot be written: ", reason != 0 ? std::strerror(reason) : "the reason is not known",
                                   full ? "; make room there, or name a file on another disk" : "; name a file in a folder that exists and can be written"));
}

}  // namespace tessera
