#pragma once

#include <atomic>
#include <cerrno>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace tessera {

/// While it lives, flock() in this program does what some file systems make of it. One file of a program includes this: it stands before the C library's.
class FileLocks {
 public:
  using Answer = int (*)(int descriptor, int operation);  ///< an errno, or 0: the kernel's answer
  explicit FileLocks(Answer answer) { current = answer; }
  ~FileLocks() { current = nullptr; }
  FileLocks(const FileLocks&) = delete;
  FileLocks& operator=(const FileLocks&) = delete;

  static int none(int, int) { return ENOSYS; }
  /// NFS makes a lock of a range of bytes of it, and an exclusive one needs a descriptor that may write.
  static int of_nfs(int descriptor, int operation) {
    const bool exclusive = (operation & LOCK_EX) != 0, writes = (::fcntl(descriptor, F_GETFL) & O_ACCMODE) != O_RDONLY;
    return exclusive && !writes ? EBADF : 0;
  }

  inline static std::atomic<Answer> current = nullptr;
};

}  // namespace tessera

extern "C" int flock(int descriptor, int operation) noexcept {
  const auto answer = tessera::FileLocks::current.load();
  if (const int failed = answer == nullptr ? 0 : answer(descriptor, operation)) {
    errno = failed;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_flock, descriptor, operation));
}
