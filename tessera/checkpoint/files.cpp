#include "tessera/checkpoint/files.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/checkpoint/fault_point.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/system_reason.h"

// Whole or absent: the bytes of a file are durable after its fsync, its name only after that of the folder; in between a machine that stops may leave either
// without the other. So whoever calls these writes and syncs files first, then the folder, and gives the final name last. close() is looked at as well: network
// file systems tell of a full disk there.

namespace tessera::checkpoint {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* action, int code) {
  throw Error(
      detail::concat(path.string(), ": cannot ", action, ": ", reason_of_writing(code), is_full(code) ? "; make room there, or name another place" : ""));
}

/// A descriptor that closes itself; -1 holds none.
class Descriptor {
 public:
  explicit Descriptor(int value) : value_(value) {}
  ~Descriptor() {
    if (value_ >= 0) ::close(value_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return value_; }

 private:
  int value_;
};

}  // namespace

OutputFile::OutputFile(std::filesystem::path path) : path_(std::move(path)) {
  fault_point("create", path_);
  descriptor_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (descriptor_ < 0) fail(path_, "create", errno);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::write(std::span<const std::byte> bytes) {
  constexpr size_t kMost = size_t{1} << 30;  // the kernel takes no more than about 2 GiB at once
  while (!bytes.empty()) {
    fault_point("write", path_);
    const ssize_t written = ::write(descriptor_, bytes.data(), std::min(bytes.size(), kMost));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, "write", errno);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
}

void OutputFile::sync_and_close() {
  fault_point("sync", path_);
  if (::fsync(descriptor_) != 0) fail(path_, "sync", errno);
  if (::close(std::exchange(descriptor_, -1)) != 0) fail(path_, "close", errno);
}

MappedFile::MappedFile(const std::filesystem::path& path) {
  // Not blocking, or opening a named pipe would wait for a writer.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status{};
  if (file.get() < 0 || ::fstat(file.get(), &status) != 0) {
    const int error = errno;
    std::string problem = detail::concat(path.string(), ": cannot open: ", std::generic_category().message(error));
    if (error != ENOENT && error != ENOTDIR) throw UnreadableFile(problem);
    throw ConfigError(std::move(problem));
  }
  require(S_ISREG(status.st_mode), path.string(), ": is not a regular file");
  if (status.st_size == 0) return;
  const auto size = static_cast<size_t>(status.st_size);
  void* const address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (address == MAP_FAILED) throw UnreadableFile(detail::concat(path.string(), ": cannot map: ", std::generic_category().message(errno)));
  bytes_ = {static_cast<const std::byte*>(address), size};
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

void make_empty_directory(const std::filesystem::path& directory) {
  remove_tree(directory);
  fault_point("make folder", directory);
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) fail(directory, "make folder", error.value());
}

void remove_tree(const std::filesystem::path& path) {
  fault_point("remove", path);
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) fail(path, "remove", error.value());
}

void rename_to(const std::filesystem::path& from, const std::filesystem::path& to) {
  fault_point("rename", to);
  if (::rename(from.c_str(), to.c_str()) != 0) fail(to, "rename to", errno);
}

bool rename_to_new(const std::filesystem::path& from, const std::filesystem::path& to) {
  fault_point("rename", to);
  if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE) == 0) return true;
  if (errno == EEXIST) return false;
  if (errno != EINVAL && errno != ENOSYS) fail(to, "rename to", errno);
  if (is_there(to)) return false;  // of a file system that cannot ask and rename in one step
  rename_to(from, to);
  return true;
}

void write_file(const std::filesystem::path& path, const std::string& text) {
  OutputFile file(path);
  file.write(std::as_bytes(std::span(text)));
  file.sync_and_close();
}

std::string read_text_file(const std::filesystem::path& path, uint64_t max_bytes) {
  const MappedFile file(path);
  const auto bytes = file.bytes();
  require(bytes.size() <= max_bytes, path.string(), ": has ", bytes.size(), " bytes, more than the ", max_bytes, " that such a file can need");
  return bytes.empty() ? std::string() : std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

void sync_directory(const std::filesystem::path& directory) {
  fault_point("sync folder", directory);
  const Descriptor file(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (file.get() < 0) fail(directory, "open", errno);
  if (::fsync(file.get()) != 0 && errno != EINVAL) fail(directory, "sync", errno);  // EINVAL: a file system without it
}

void rename_or_exchange(const std::filesystem::path& from, const std::filesystem::path& to) {
  if (is_there(to)) {
    fault_point("rename", to);
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return;
    if (errno != EINVAL && errno != ENOSYS) fail(to, "replace", errno);
    return replace_in_two_steps(from, to);
  }
  rename_to(from, to);
}

void replace_in_two_steps(const std::filesystem::path& from, const std::filesystem::path& to) {
  auto aside = from;
  aside += ".replaced";
  remove_tree(aside);  // of a kill between the two, or of a removal that failed
  rename_to(to, aside);
  rename_to(from, to);
  std::error_code ignored;  // the new one is there
  std::filesystem::remove_all(aside, ignored);
}

}  // namespace tessera::checkpoint
