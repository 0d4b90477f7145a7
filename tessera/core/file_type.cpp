#include "tessera/core/file_type.h"

#include <system_error>

#include "tessera/core/error.h"

namespace tessera {

namespace {

void check_reached(const std::filesystem::path& path, bool reached, const std::error_code& error) {
  require(reached, path.string(), ": ", error.message(), "; name a path that can be reached, or let this user read there");
}

std::filesystem::file_type file_type_of(const std::filesystem::path& path) {
  std::error_code error;
  const auto type = std::filesystem::status(path, error).type();
  check_reached(path, type != std::filesystem::file_type::none, error);
  return type;
}

}  // namespace

bool is_there(const std::filesystem::path& path) { return file_type_of(path) != std::filesystem::file_type::not_found; }
bool is_folder(const std::filesystem::path& path) { return file_type_of(path) == std::filesystem::file_type::directory; }

std::filesystem::directory_iterator entries_of(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::directory_iterator entries(folder, error);
  check_reached(folder, !error, error);
  return entries;
}

}  // namespace tessera
