#include "tessera/data/partial_file.h"

#include <cerrno>
#include <chrono>
#include <regex>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/core/drawn_name.h"
#include "tessera/core/error.h"
#include "tessera/core/hash.h"
#include "tessera/core/host_name.h"
#include "tessera/core/system_reason.h"

// Whoever waited for the lock may have got that of a file which its holder has removed meanwhile: a lock belongs to the file and not to its name. So the name
// is looked up again, and only the file that it names now counts. The lock saves work, and no more is asked of it: network file systems may refuse it, or keep
// it within a host, and then two of them would truncate and write one file if it were what is written.

namespace tessera::data {
namespace {

constexpr const char* kPartial = ".partial";

/// Of this host in the names of what it writes, so that it knows its own; hashed, as a name of a host may be long.
std::string host_tag() {
  const std::string host = host_name("localhost");
  return hash_hex(host.data(), host.size());
}

}  // namespace

PartialFile::PartialFile(const std::filesystem::path& path, const std::string& knob)
    : path_(path), lock_(path.string() + kPartial), partial_(detail::concat(path.string(), ".", host_tag(), ".", drawn_name(), kPartial)) {
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  descriptor_ = ::open(lock_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail_to_write(lock_.string() + ": cannot be written", error ? error.value() : errno, "choose another " + knob);
  int failed = 0;
  while ((failed = ::flock(descriptor_, LOCK_EX)) != 0 && errno == EINTR) {
  }
  struct stat ours{}, theirs{};
  held_ = ::fstat(descriptor_, &ours) == 0 && ::stat(lock_.c_str(), &theirs) == 0 && ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev;
  if (held_ && failed == 0) remove_leftovers();
}

PartialFile::~PartialFile() {
  std::error_code error;
  if (held_) {
    std::filesystem::remove(partial_, error);
    std::filesystem::remove(lock_, error);
  }
  if (descriptor_ >= 0) ::close(descriptor_);  // and with it the lock
}

/// With the lock held nobody else of this host writes. Whether locks reach other hosts, nobody says.
void PartialFile::remove_leftovers() const {
  static const std::regex tags(R"([0-9a-f]{16}\.[0-9a-f]{16}\.partial)");
  const std::string before = path_.filename().string() + ".", own = before + host_tag() + ".";
  const auto long_ago = std::filesystem::file_time_type::clock::now() - std::chrono::hours(24);
  std::error_code error;
  const auto folder = path_.has_parent_path() ? path_.parent_path() : std::filesystem::path(".");
  for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (!name.starts_with(before) || !std::regex_match(name.substr(before.size()), tags)) continue;
    std::error_code ignored;
    const auto written = entry->last_write_time(ignored);
    if (name.starts_with(own) || (!ignored && written < long_ago)) std::filesystem::remove(entry->path(), ignored);
  }
}

void PartialFile::commit() {
  invariant(held_, "commit of ", partial_.string(), " without its lock");
  std::error_code error;
  std::filesystem::rename(partial_, path_, error);
  if (error) fail_to_write(path_.string() + ": cannot be written in place of what is there", error.value(), "move it elsewhere, or choose another path");
  std::filesystem::remove(lock_, error);
  held_ = false;
}

}  // namespace tessera::data
