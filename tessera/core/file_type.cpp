#include "tessera/core/file_type.h"

#include <algorithm>
#include <system_error>
#include <vector>

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

/// The names that lead from `file`, by one link after another, to what is no link: that is the last of them, and need not exist.
std::vector<std::filesystem::path> way_of(const std::filesystem::path& file) {
  constexpr size_t most = 41;  // the system follows 40 links
  std::vector<std::filesystem::path> way{file};
  std::error_code error;
  while (way.size() < most && std::filesystem::is_symlink(std::filesystem::symlink_status(way.back(), error))) {
    way.push_back(way.back().parent_path() / std::filesystem::read_symlink(way.back(), error));  // an absolute target stands for itself
  }
  return way;
}

/// Whether a link is one of the system's to what a process has open: /dev/stdout leads to one.
bool leads_to_an_open_file(const std::filesystem::path& link) {
  std::error_code error;
  const auto folder = std::filesystem::canonical(std::filesystem::absolute(link).parent_path(), error);
  return folder.filename() == "fd" && folder.string().starts_with("/proc/");
}

}  // namespace

bool is_there(const std::filesystem::path& path) { return file_type_of(path) != std::filesystem::file_type::not_found; }
bool is_folder(const std::filesystem::path& path) { return file_type_of(path) == std::filesystem::file_type::directory; }

std::filesystem::path target_of(const std::filesystem::path& file) { return way_of(file).back(); }

std::filesystem::path output_place(const std::filesystem::path& file, const std::string& knob) {
  is_there(file);  // which refuses links in a loop
  const auto way = way_of(file);
  require(std::find_if(way.begin(), way.end() - 1, leads_to_an_open_file) == way.end() - 1, knob, " = ", file.string(),
          ": is what a process has open, and not the name of a file, whose place another one could take; name a file");
  const auto& place = way.back();
  const auto folder = std::filesystem::absolute(place).parent_path();
  require(is_folder(folder), knob, " = ", file.string(), ": there is no folder ", folder.string(), "; make it, or name a file in one that exists");
  require(!is_folder(place) && place.has_filename(), knob, " = ", file.string(), ": is a folder; name a file in it");
  require(!is_there(place) || file_type_of(place) == std::filesystem::file_type::regular, knob, " = ", file.string(),
          ": is a device, a pipe or a socket, and not a regular file, whose place another one could take; name another file");
  return place;
}

std::filesystem::path name_aside(const std::filesystem::path& file, const std::string& suffix) {
  std::filesystem::path aside;
  std::error_code ignored;
  int number = 1;
  do aside = detail::concat(file.string(), ".", suffix, "-", number++);
  while (std::filesystem::exists(std::filesystem::symlink_status(aside, ignored)));
  return aside;
}

std::filesystem::directory_iterator entries_of(const std::filesystem::path& folder) {
  std::error_code error;
  std::filesystem::directory_iterator entries(folder, error);
  check_reached(folder, !error, error);
  return entries;
}

}  // namespace tessera
