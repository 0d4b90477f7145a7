#include "tessera/core/text_file.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>

#include "tessera/core/error.h"
#include "tessera/core/system_reason.h"

namespace tessera {

void write_text_file(const std::string& what, const std::string& path, std::string_view text) {
  errno = 0;
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  const bool opened = file.is_open();
  file << text << std::flush;
  file.close();  // a disk over a network may say only now that it is full
  if (file.good()) return;
  const int reason = errno;
  std::error_code ignored;  // half a text is none
  if (opened && std::filesystem::is_regular_file(path, ignored)) std::filesystem::remove(path, ignored);
  fail_to_write(what + ": cannot be written", reason,
                is_full(reason) ? "name a file on another disk" : "name a file in a folder that exists and can be written");
}

std::string read_text_file(const std::string& what, const std::string& path) {
  const auto check = [&](bool good) { require(good, what, ": cannot be read: ", std::strerror(errno), "; name a file that is there and can be read"); };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), std::fclose);
  check(file != nullptr);
  std::string text;
  for (size_t got = 1; got > 0;) {
    constexpr size_t kPiece = size_t{64} << 10;
    const size_t before = text.size();
    text.resize(before + kPiece);
    got = std::fread(text.data() + before, 1, kPiece, file.get());
    check(std::ferror(file.get()) == 0);
    text.resize(before + got);
  }
  return text;
}

}  // namespace tessera
