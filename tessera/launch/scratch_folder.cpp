#include "tessera/launch/scratch_folder.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <system_error>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/core/host_name.h"

// The lock file gets its name only when it is locked: nobody can ever see a folder of ours with an unlocked file in it while we live. A lock is believed only
// on the host that took it, since shared file systems need not hand locks on.

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;

constexpr const char* prefix = "tessera_run_";
constexpr const char* lock_name = "launcher.lock";

std::string this_host() { return host_name("localhost") + "\n"; }

std::string text_of(int descriptor) {
  char text[512];
  const ssize_t size = ::pread(descriptor, text, sizeof text, 0);
  return {text, static_cast<size_t>(size > 0 ? size : 0)};
}

/// Whether the launcher that made the open folder has ended. The lock stays with the descriptor that comes back in `lock`.
bool owner_is_gone(int folder, int& lock) {
  struct stat found{};
  if (::fstat(folder, &found) != 0 || found.st_uid != ::geteuid()) return false;
  lock = ::openat(folder, lock_name, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
  // A file system that hosts share may keep the locks of each to itself.
  if (lock < 0 || text_of(lock) != this_host() || ::flock(lock, LOCK_EX | LOCK_NB) != 0) return false;
  return ::fstat(lock, &found) == 0 && found.st_nlink > 0;  // or somebody else has just removed it
}

void remove_if_left_behind(const fs::path& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (folder < 0) return;
  int lock = -1;
  if (owner_is_gone(folder, lock)) {
    std::error_code error;
    fs::remove_all(path, error);
  }
  if (lock >= 0) ::close(lock);
  ::close(folder);
}

void remove_what_was_left_behind(const fs::path& place) {
  std::error_code error;
  for (fs::directory_iterator entry(place, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with(prefix)) remove_if_left_behind(entry->path());
  }
}

}  // namespace

ScratchFolder::ScratchFolder(const TemporaryPlace& place, const std::string& way_out) {
  remove_what_was_left_behind(place.folder);
  std::string pattern = (place.folder / (std::string(prefix) + "XXXXXX")).string();
  if (::mkdtemp(pattern.data()) == nullptr) place.refuse(std::strerror(errno), way_out);
  path_ = pattern;
  lock();
}

/// Without a lock nobody else removes the folder, and it is left behind if we are killed.
void ScratchFolder::lock() {
  const fs::path unlocked = path_ / "launcher.new";
  lock_ = ::open(unlocked.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  const std::string host = this_host();
  const bool locked = lock_ >= 0 && ::write(lock_, host.data(), host.size()) == static_cast<ssize_t>(host.size()) && ::flock(lock_, LOCK_EX | LOCK_NB) == 0;
  if (locked) ::rename(unlocked.c_str(), (path_ / lock_name).c_str());
}

ScratchFolder::~ScratchFolder() {
  std::error_code error;
  fs::remove_all(path_, error);
  if (lock_ >= 0) ::close(lock_);
}

}  // namespace tessera::launch
