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

int try_to_write(const std::filesystem::path& file, std::string_view text) {
  errno = 0;
  std::ofstream out(file, std::ios::binary | std::ios::trunc);
  const bool opened = out.is_open();
  out << text;
  out.close();  // a disk over a network may say only now that it is full
  if (out.good()) return 0;
  const int reason = errno != 0 ? errno : EIO;
  std::error_code ignored;  // half a text is none
  if (opened && std::filesystem::is_regular_file(file, ignored)) std::filesystem::remove(file, ignored);
  return reason;
}

int try_to_replace(const std::filesystem::path& file, const std::filesystem::path& partial, std::string_view text) {
  if (const int reason = try_to_write(partial, text); reason != 0) return reason;
  std::error_code error, ignored;
  std::filesystem::rename(partial, file, error);
  if (error) std::filesystem::remove(partial, ignored);
  return error.value();
}

void write_text_file(const std::string& what, const std::string& path, std::string_view text) {
  const int reason = try_to_write(path, text);
  if (reason == 0) return;
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
