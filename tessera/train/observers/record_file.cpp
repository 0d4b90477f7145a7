#include "tessera/train/observers/record_file.h"

#include <cerrno>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/core/log.h"
#include "tessera/core/system_reason.h"

namespace tessera {

RecordFile::~RecordFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

bool RecordFile::open(std::filesystem::path path) {
  path_ = std::move(path);
  if (try_open()) return true;
  const int reason = errno;
  if (strict_ || !is_full(reason)) return false;
  log().warn("{}: cannot be written: {}; training goes on, and records are lost until there is room", path_.string(), reason_of_writing(reason));
  losing_ = true;
  return true;
}

bool RecordFile::try_open() {
  std::error_code error;
  if (path_.has_parent_path()) std::filesystem::create_directory(path_.parent_path(), error);
  // A named pipe without a reader fails, and one that is full loses records: neither may hold up a run.
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644);
  if (descriptor_ < 0) {
    if (is_full(error.value())) errno = error.value();
    return false;
  }
  ::flock(descriptor_, LOCK_EX | LOCK_NB);  // for another run that looks (is_being_written)
  end_ = ::lseek(descriptor_, 0, SEEK_END);
  if (end_ < 0) end_ = 0;  // a device, which has no end
  return true;
}

bool RecordFile::is_being_written(const std::filesystem::path& path) {
  // NFS asks for a descriptor that may write, and answers EBADF to others, which says nothing of the lock.
  int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (descriptor < 0) descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // another user's, say
  if (descriptor < 0) return false;
  const bool held = ::flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
  ::close(descriptor);
  return held;
}

void RecordFile::append(std::string_view record) {
  if (descriptor_ < 0 && !try_open()) return lose(errno);
  for (std::string_view rest = record; !rest.empty();) {
    const ssize_t size = ::write(descriptor_, rest.data(), rest.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return lose(errno);
    rest.remove_prefix(static_cast<size_t>(size));
  }
  end_ += static_cast<int64_t>(record.size());
  ++written_;
  losing_ = false;
}

void RecordFile::lose(int code) {
  ++lost_;
  // Where even that fails, readers find a line that was cut, as after a crash.
  if (descriptor_ >= 0 && ::ftruncate(descriptor_, end_) == 0) ::lseek(descriptor_, end_, SEEK_SET);
  const std::string what = detail::concat(path_.string(), ": a record could not be written: ", reason_of_writing(code));
  if (strict_) throw Error(detail::concat(what, "; --strict-log ends the run"));
  if (!std::exchange(losing_, true)) log().warn("{}; training goes on", what);
}

void RecordFile::close() {
  const std::filesystem::path path = std::exchange(path_, {});
  if (path.empty()) return;
  bool synced = true;
  int code = 0;
  if (descriptor_ >= 0) {
    synced = ::fsync(descriptor_) == 0 || errno == EINVAL || errno == EROFS;  // what cannot be synced is no disk
    code = errno;
    struct stat ours{}, named{};
    const bool is_file = ::fstat(descriptor_, &ours) == 0 && S_ISREG(ours.st_mode);
    const bool gone = is_file && ::stat(path.c_str(), &named) != 0;
    const bool replaced = is_file && !gone && ours.st_ino != named.st_ino;
    if ((gone || replaced) && written_ > 0) {
      const char* const cause = gone ? "the file was removed while the run went on" : "another run that began meanwhile put its own there";
      log().warn("{}: its {} records of this run are lost: {}", path.string(), written_, cause);
    }
    ::close(std::exchange(descriptor_, -1));
  }
  if (lost_ > 0) log().warn("{}: {} of {} records were lost", path.string(), lost_, lost_ + written_);
  if (!synced) log().warn("{}: its last records may be lost: {}", path.string(), std::generic_category().message(code));
}

}  // namespace tessera
