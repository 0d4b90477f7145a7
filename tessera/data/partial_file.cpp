#include "tessera/data/partial_file.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/core/error.h"

// Whoever waited for the lock may have got that of a file which its holder has renamed or removed meanwhile: a lock belongs to the file and not to its name. So
// the name is looked up again, and only the file that it names now counts.

namespace tessera::data {

PartialFile::PartialFile(const std::filesystem::path& path, const std::string& knob) : path_(path), partial_(path.string() + ".partial") {
  std::error_code error;
  if (path.has_parent_path()) std::filesystem::create_directories(path.parent_path(), error);
  descriptor_ = ::open(partial_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  require(descriptor_ >= 0, partial_.string(), ": cannot be written: ", error ? error.message() : std::strerror(errno), "; choose another ", knob);
  while (::flock(descriptor_, LOCK_EX) != 0 && errno == EINTR) {
  }
  struct stat ours{}, theirs{};
  held_ = ::fstat(descriptor_, &ours) == 0 && ::stat(partial_.c_str(), &theirs) == 0 && ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev;
}

PartialFile::~PartialFile() {
  std::error_code error;
  if (held_) std::filesystem::remove(partial_, error);
  if (descriptor_ >= 0) ::close(descriptor_);  // and with it the lock
}

void PartialFile::commit() {
  invariant(held_, "commit of ", partial_.string(), " without its lock");
  std::error_code error;
  std::filesystem::rename(partial_, path_, error);
  require(!error, path_.string(), ": cannot be written in place of what is there: ", error.message(), "; move it elsewhere, or choose another path");
  held_ = false;
}

}  // namespace tessera::data
