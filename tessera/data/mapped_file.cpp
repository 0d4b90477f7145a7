#include "tessera/data/mapped_file.h"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

MappedFile::State state_of(const struct stat& status) {
  return {.bytes = status.st_size, .seconds = status.st_ctim.tv_sec, .nanoseconds = status.st_ctim.tv_nsec};
}

}  // namespace

MappedFile::MappedFile(const std::filesystem::path& file) {
  // Not blocking, or opening a named pipe would wait for a writer.
  descriptor_ = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  require(descriptor_ >= 0, file.string(), ": cannot be opened: ", std::strerror(errno));
  struct stat status{};
  const bool known = ::fstat(descriptor_, &status) == 0 && S_ISREG(status.st_mode);
  size_ = known ? static_cast<size_t>(status.st_size) : 0;
  std::byte first{};
  const ssize_t beyond = known && size_ == 0 ? ::pread(descriptor_, &first, 1, 0) : 0;  // of what has no bytes, or only says so, as files of the system do
  void* mapped = size_ > 0 ? ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, descriptor_, 0) : nullptr;
  const int error = errno;
  const bool mapped_none = size_ == 0 || mapped == MAP_FAILED;
  if (mapped_none) ::close(std::exchange(descriptor_, -1));
  require(known, file.string(), ": is not a regular file");
  require(beyond >= 0, file.string(), ": cannot be read: ", std::strerror(error));
  require(beyond == 0, file.string(), ": says that it is empty, and is not, as files of the system do; copy it, and name the copy");
  require(mapped != MAP_FAILED, file.string(), ": cannot be mapped into memory: ", std::strerror(error));
  data_ = static_cast<const std::byte*>(mapped);
  opened_ = state_of(status);
}

MappedFile::~MappedFile() {
  if (size_ > 0) ::munmap(const_cast<std::byte*>(data_), size_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

MappedFile::State MappedFile::state() const {
  struct stat status{};
  if (descriptor_ < 0) return opened_;
  return ::fstat(descriptor_, &status) == 0 ? state_of(status) : State();
}

void MappedFile::read_ahead(size_t first, size_t count) const {
  if (count == 0) return;
  const size_t page = static_cast<size_t>(::sysconf(_SC_PAGESIZE)), begin = first / page * page;
  ::madvise(const_cast<std::byte*>(data_) + begin, first + count - begin, MADV_WILLNEED);  // a hint: failure changes nothing
}

}  // namespace tessera::data
