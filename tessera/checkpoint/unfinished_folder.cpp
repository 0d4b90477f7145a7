#include "tessera/checkpoint/unfinished_folder.h"

#include <algorithm>
#include <cerrno>
#include <random>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include "tessera/checkpoint/fault_point.h"
#include "tessera/checkpoint/files.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"

// A lock rather than an age or a process number tells the living from what a killed one left: the kernel drops it however a process ends, and no clock or host
// has to be compared. Between making a folder and locking it there is a moment in which another one may take it for a leftover; who finds it gone after the
// lock makes another.

namespace tessera::checkpoint {
namespace {

constexpr size_t kRandomDigits = 16;

/// What the names of all begin with that are at work on `whole`; of a long name the beginning, as there must be room for the rest.
std::string common_name(const std::filesystem::path& whole) { return ".tmp-" + whole.filename().string().substr(0, 100) + "."; }

/// Whether `name` is one that own_name() makes.
bool is_own_name(std::string_view name, const std::string& common) {
  if (!name.starts_with(common)) return false;
  name.remove_prefix(common.size());
  const auto is_digit = [](char c) { return c >= '0' && c <= '9'; };
  const auto is_hexadecimal = [&](char c) { return is_digit(c) || (c >= 'a' && c <= 'f'); };
  const size_t dot = name.find('.');
  if (dot == 0 || dot == std::string_view::npos) return false;
  const auto process = name.substr(0, dot), drawn = name.substr(dot + 1);
  return std::ranges::all_of(process, is_digit) && drawn.size() == kRandomDigits && std::ranges::all_of(drawn, is_hexadecimal);
}

std::string own_name(const std::string& common) {
  std::random_device draw;
  return fmt::format("{}{}.{:08x}{:08x}", common, ::getpid(), draw(), draw());
}

int open_folder(const std::filesystem::path& path) { return ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC); }

}  // namespace

UnfinishedFolder::UnfinishedFolder(const std::filesystem::path& whole) : whole_(std::filesystem::absolute(whole).lexically_normal()) {
  if (!whole_.has_filename()) whole_ = whole_.parent_path();  // "folder/"
  std::error_code error;
  std::filesystem::create_directories(whole_.parent_path(), error);
  if (!error) remove_leftovers();
  while (!error && descriptor_ < 0) {
    path_ = whole_.parent_path() / own_name(common_name(whole_));
    fault_point("make folder", path_);
    std::filesystem::create_directory(path_, error);
    if (error) break;
    descriptor_ = open_folder(path_);
    if (descriptor_ < 0 && errno != ENOENT) error.assign(errno, std::generic_category());
    if (descriptor_ < 0) continue;
    ::flock(descriptor_, LOCK_EX);  // none where the file system has no locks; then nobody removes leftovers either
    // Before it was locked, whoever removes leftovers could take it for one.
    if (!is_there(path_)) ::close(std::exchange(descriptor_, -1));
  }
  if (error) throw Error(detail::concat(whole_.string(), ": cannot be made in ", whole_.parent_path().string(), ": ", error.message()));
}

UnfinishedFolder::~UnfinishedFolder() {
  std::error_code ignored;  // what matters is what went wrong before
  if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool UnfinishedFolder::commit() {
  sync_directory(path_);
  if (!rename_to_new(path_, whole_)) return false;
  path_.clear();
  sync_directory(whole_.parent_path());
  return true;
}

void UnfinishedFolder::remove_leftovers() const {
  const std::string common = common_name(whole_);
  for (const auto& entry : entries_of(whole_.parent_path())) {
    if (!is_own_name(entry.path().filename().string(), common)) continue;
    const int found = open_folder(entry.path());
    if (found < 0) continue;
    std::error_code ignored;  // it is in nobody's way
    if (::flock(found, LOCK_EX | LOCK_NB) == 0) std::filesystem::remove_all(entry.path(), ignored);
    ::close(found);
  }
}

}  // namespace tessera::checkpoint
