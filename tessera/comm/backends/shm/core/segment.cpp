#include "tessera/comm/backends/shm/core/segment.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "tessera/comm/backends/shm/core/failure.h"

// A store into a hole of a full tmpfs is a SIGBUS, which ends the process without a word. So a file is all address space (sparse, mapped without reserve), and
// memory is asked for by fallocate before the first store: a full machine is an error that can name sizes and a way out. Core dumps leave the mapping out.

namespace tessera::comm::shm {
namespace {

constexpr const char* kNamedFolder = "/dev/shm";

std::string mebibytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f MiB", bytes / (1 << 20));
  return text;
}

std::string available_memory() {
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);) {
    if (line.starts_with("MemAvailable:")) return mebibytes(1024.0 * std::stod(line.substr(13))) + " are available";
  }
  return "how much is available /proc/meminfo does not say";
}

std::string room_in(const std::string& folder) {
  struct statvfs fs{};
  if (::statvfs(folder.c_str(), &fs) != 0) return "its size is unknown";
  const auto block = static_cast<double>(fs.f_frsize);
  return mebibytes(block * static_cast<double>(fs.f_bavail)) + " of " + mebibytes(block * static_cast<double>(fs.f_blocks)) + " are free";
}

[[noreturn]] void fail(const std::string& what, int error) {
  const std::string way_out = error == EFBIG ? "; `ulimit -f` is what a file may have at most: raise it (ulimit -f unlimited)" : "";
  throw Failure("shared memory: " + what + ": " + std::strerror(error) + way_out);
}

}  // namespace

size_t page_size() {
  static const auto size = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

Segment::Segment(int descriptor, size_t bytes, std::string path, std::string place)
    : descriptor_(descriptor), bytes_(bytes), path_(std::move(path)), place_(std::move(place)) {}

Segment::Segment(Segment&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      data_(std::exchange(other.data_, nullptr)),
      bytes_(other.bytes_),
      path_(std::move(other.path_)),
      place_(std::move(other.place_)),
      named_(std::exchange(other.named_, false)) {}

Segment::~Segment() {
  unlink();
  if (data_) ::munmap(data_, bytes_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

void Segment::map() {
  void* const data = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor_, 0);
  if (data == MAP_FAILED) fail("cannot map " + mebibytes(static_cast<double>(bytes_)) + " of " + path_, errno);
  data_ = static_cast<std::byte*>(data);
  ::madvise(data_, bytes_, MADV_DONTDUMP);
}

Segment Segment::create(size_t bytes, const std::string& folder) {
  const int descriptor = folder.empty() ? ::memfd_create("tessera", MFD_CLOEXEC) : ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (descriptor < 0) fail(folder.empty() ? "cannot make a file in memory" : "cannot make a file in " + folder, errno);
  Segment segment(descriptor, bytes, "/proc/" + std::to_string(::getpid()) + "/fd/" + std::to_string(descriptor), folder);
  if (::ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) fail("cannot size a file in " + (folder.empty() ? "memory" : folder), errno);
  segment.map();
  return segment;
}

Segment Segment::create_named(size_t bytes, const std::string& folder) {
  const auto place = folder.empty() ? std::string(kNamedFolder) : folder;
  auto path = place + "/tessera-XXXXXX";
  const int descriptor = ::mkostemp(path.data(), O_CLOEXEC);
  if (descriptor < 0) fail("cannot make a file in " + place, errno);
  Segment segment(descriptor, bytes, path, place);
  segment.named_ = true;
  if (::ftruncate(descriptor, static_cast<off_t>(bytes)) != 0) fail("cannot size " + path, errno);
  segment.map();
  return segment;
}

Segment Segment::open(const std::string& path, size_t bytes, const std::string& folder) {
  const int descriptor = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (descriptor < 0) fail("cannot open " + path, errno);
  Segment segment(descriptor, bytes, path, path.starts_with("/proc/") ? folder : path.substr(0, path.rfind('/')));
  segment.map();
  return segment;
}

void Segment::unlink() {
  if (std::exchange(named_, false)) ::unlink(path_.c_str());
}

void Segment::reserve(size_t offset, size_t bytes) {
  int error = 0;
  do {
    error = ::fallocate(descriptor_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  if (error == 0) return;
  const auto size = mebibytes(static_cast<double>(bytes));
  if (place_.empty())
    fail("cannot reserve " + size + " of memory, of which " + available_memory() + "; use fewer ranks or smaller buffers on this host", error);
  fail("cannot reserve " + size + " in " + place_ + ", where " + room_in(place_) +
           "; free space there, enlarge it (mount -o remount,size=...), or name another " + "folder in TESSERA_SHM_DIR",
       error);
}

void Segment::release(size_t offset, size_t bytes) noexcept {
  ::fallocate(descriptor_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes));
}

}  // namespace tessera::comm::shm
