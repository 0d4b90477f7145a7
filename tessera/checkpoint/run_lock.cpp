#include "tessera/checkpoint/run_lock.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <system_error>

#include <fcntl.h>
#include <nlohmann/json.hpp>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/core/host_name.h"
#include "tessera/core/poll.h"

// A file that says who holds it outlives who was killed, and a process number comes again: so the kernel holds the lock, and the file's text is only for
// people. The file is unlinked with the lock still held; whoever had opened it before then gets the lock of a file that has no name any more, which keeps
// nobody out. Hence the look whether the open file is the named one, and another try where it is not.

namespace tessera::checkpoint {
namespace {

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

/// Who holds a lock, as the file says.
struct Holder {
  std::string host{}, boot{};
  int64_t pid = 0;

  static Holder self() { return {.host = host_name("localhost"), .boot = boot_id(), .pid = ::getpid()}; }

  bool known() const { return pid > 0; }
  bool here() const { return host == host_name("localhost"); }
  /// As far as this host can tell. A process of an earlier boot is gone, whoever has its number now.
  bool alive() const { return known() && here() && boot == boot_id() && (::kill(static_cast<pid_t>(pid), 0) == 0 || errno == EPERM); }
  std::string text() const { return known() ? detail::concat("process ", pid, " on ", host) : std::string("another process"); }
};

Holder read_holder(int descriptor) {
  char text[512];
  const ssize_t size = ::pread(descriptor, text, sizeof text, 0);
  const auto json = nlohmann::json::parse(text, text + std::max<ssize_t>(size, 0), nullptr, /*allow_exceptions=*/false);
  try {
    return {.host = json.at("host"), .boot = json.at("boot"), .pid = json.at("pid")};
  } catch (const nlohmann::json::exception&) {  // being written, or cut: nobody can be named
    return {};
  }
}

/// Which folder lies under that name.
std::pair<uint64_t, uint64_t> folder_named(const std::filesystem::path& dir) {
  struct stat named{};
  return ::stat(dir.c_str(), &named) == 0 ? std::pair<uint64_t, uint64_t>(named.st_dev, named.st_ino) : std::pair<uint64_t, uint64_t>();
}

/// Whether the open file is the one of that name: who held the lock before may have removed it.
bool is_named(int descriptor, const std::filesystem::path& file) {
  struct stat open{}, named{};
  return ::fstat(descriptor, &open) == 0 && ::stat(file.c_str(), &named) == 0 && open.st_ino == named.st_ino && open.st_dev == named.st_dev;
}

}  // namespace

RunLock::RunLock(const std::filesystem::path& dir, std::chrono::milliseconds patience, LockedFolder what)
    : what_(std::move(what)), dir_(dir), file_(dir / what_.file) {
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  require(!error || !what_.needed, what_.knob, " = ", dir.string(), ": cannot be made: ", error.message(), "; name a folder that can be written");
  Holder holder;
  const auto taken = [&] {
    if (try_lock()) return true;
    holder = read_holder(descriptor_);
    ::close(std::exchange(descriptor_, -1));
    return false;
  };
  const auto held = [&] { return detail::concat(what_.knob, " = ", dir.string(), ": ", what_.before, holder.text(), what_.after); };
  const bool is_ours = poll_until(patience, taken, held);  // who holds it is known behind that
  require(is_ours, held(), what_.way_out);
  folder_ = folder_named(dir_);
}

bool RunLock::try_lock() {
  const auto refuse = [&](int code) {
    throw ConfigError(detail::concat(what_.knob, " = ", dir_.string(), ": cannot be written: ", what_.file, " in it: ", std::generic_category().message(code),
                                     "; name a folder that can, or leave ", what_.knob, " out"));
  };
  for (;;) {
    descriptor_ = ::open(file_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (descriptor_ < 0 && !what_.needed) return true;
    if (descriptor_ < 0) refuse(errno);
    const Holder before = read_holder(descriptor_);
    char first = '{';  // of ours, though it be cut; a disk that failed may have left zeros
    if (::pread(descriptor_, &first, 1, 0) == 1 && first != '{' && first != '\0') {
      ::close(std::exchange(descriptor_, -1));
      if (!what_.needed) return true;
      throw ConfigError(detail::concat(what_.knob, " = ", dir_.string(), ": ", what_.file,
                                       " in it is no run's, which would be written over; move it elsewhere, or name another ", what_.knob));
    }
    const int failed = ::flock(descriptor_, LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    if (failed == EWOULDBLOCK) return false;
    if (failed != 0) {
      if (before.alive() && before.pid != ::getpid()) return false;
      remarks_.push_back(detail::concat(what_.knob, " = ", dir_.string(), ": its file system has no locks (", std::generic_category().message(failed),
                                        "), so a second run on another host that trains into it would not be noticed"));
    } else if (!is_named(descriptor_, file_)) {
      ::close(std::exchange(descriptor_, -1));
      continue;
    } else if (before.known() && !before.here()) {
      remarks_.push_back(detail::concat(file_.string(), ": the lock of ", before.text(),
                                        " is taken over; where this file system keeps locks from other hosts, make sure that it trains no more"));
    }
    const Holder self = Holder::self();
    const std::string text = nlohmann::json{{"host", self.host}, {"boot", self.boot}, {"pid", self.pid}}.dump() + "\n";
    const bool written = ::ftruncate(descriptor_, 0) == 0 && ::pwrite(descriptor_, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size());
    if (!written && what_.needed) {  // it is the kernel's lock that keeps others out, and the text is for people
      const int code = errno;
      ::unlink(file_.c_str());
      ::close(std::exchange(descriptor_, -1));
      refuse(code);
    }
    return true;
  }
}

std::string RunLock::loss() const {
  if (descriptor_ < 0 || is_named(descriptor_, file_)) return {};
  return folder_named(dir_) == folder_ ? detail::concat("its ", what_.file, " was removed")
                                       : std::string("the folder was removed, or moved, with what it held,");
}

RunLock::~RunLock() {
  if (descriptor_ < 0) return;
  if (is_named(descriptor_, file_)) ::unlink(file_.c_str());  // while it is held, so that nobody finds a file that is about to go; and no other run's
  ::close(descriptor_);
}

}  // namespace tessera::checkpoint
