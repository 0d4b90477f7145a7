#include "tessera/offload/spill_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/core/system_reason.h"
#include "tessera/offload/nameless_file.h"

// One file, one thread: what is written is read again in the order of asking, and a disk gains nothing from two who seek. Plain pread and pwrite, for the page
// cache is what makes a small run fast and the kernel writes behind; pieces are of MiB, so that calls cost nothing beside bytes. The file has no name, so
// nothing is left however the process ends.

namespace tessera::offload {

/// What of the file nobody has, by where it begins; neighbours are one. Behind the last range the file grows.
struct FreeRanges {
  explicit FreeRanges(const DiskBytes& size) : grown(size) {}

  DiskBytes grown;
  std::mutex mutex{};
  std::map<int64_t, int64_t> size_at{};
  int64_t end = 0;

  int64_t take(int64_t size) {
    const std::lock_guard lock(mutex);
    for (auto range = size_at.begin(); range != size_at.end(); ++range) {
      if (range->second < size) continue;
      const auto [begin, room] = *range;
      size_at.erase(range);
      if (room > size) size_at.emplace(begin + size, room - size);
      return begin;
    }
    grown.grow(size);
    return std::exchange(end, end + size);
  }

  void give(int64_t begin, int64_t size) {
    const std::lock_guard lock(mutex);
    auto range = size_at.emplace(begin, size).first;
    if (const auto next = std::next(range); next != size_at.end() && range->first + range->second == next->first) {
      range->second += next->second;
      size_at.erase(next);
    }
    if (range == size_at.begin()) return;
    if (const auto before = std::prev(range); before->first + before->second == range->first) {
      before->second += range->second;
      size_at.erase(range);
    }
  }
};

namespace {

const char* way_out(int reason) { return is_full(reason) ? "; name a folder with more space, or leave more on the device or the host" : ""; }

}  // namespace

int open_nameless(const std::filesystem::path& folder) {
  const int file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string name = (folder / ".offload-XXXXXX").string();
  const int named = ::mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) ::unlink(name.c_str());
  return named;
}

SpillFile::Extent::~Extent() { free_->give(begin_, size_); }

SpillFile::SpillFile(std::filesystem::path folder, std::string key, const DiskBytes& size, bool dry)
    : folder_(std::move(folder)), key_(std::move(key)), free_(std::make_shared<FreeRanges>(size)) {
  if (dry) return;
  require(!folder_.empty(), key_, ": empty, and what goes to disk needs a folder; set ", key_);
  std::error_code failed;
  std::filesystem::create_directories(folder_, failed);
  file_ = open_nameless(folder_);
  require(file_ >= 0, key_, " = ", folder_.string(), ": no file can be made there: ", std::strerror(errno), "; name a folder that can be written");
  try {
    thread_ = std::thread([this] { run(); });
  } catch (...) {
    ::close(file_);
    throw;
  }
}

SpillFile::~SpillFile() {
  if (file_ < 0) return;
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
  ::close(file_);
}

std::shared_ptr<SpillFile::Extent> SpillFile::take(int64_t bytes) {
  static const int64_t alignment = std::max<int64_t>(kAlignment, ::sysconf(_SC_PAGESIZE));
  const int64_t size = (bytes + alignment - 1) / alignment * alignment;
  return std::shared_ptr<Extent>(new Extent(free_, free_->take(size), size));
}

SpillFile::Ticket SpillFile::write(std::shared_ptr<Extent> to, at::Tensor from, std::function<void()> ready) {
  return add({.writes = true, .extent = std::move(to), .memory = std::move(from), .ready = std::move(ready)});
}

SpillFile::Ticket SpillFile::read(std::shared_ptr<Extent> from, at::Tensor to) {
  return add({.writes = false, .extent = std::move(from), .memory = std::move(to), .ready = {}});
}

std::shared_ptr<void> SpillFile::map(const std::shared_ptr<Extent>& extent) {
  const auto size = static_cast<size_t>(extent->size_);
  const int refused = ::posix_fallocate(file_, extent->begin_, extent->size_);
  if (refused != 0) {
    throw Error(detail::concat(key_, " = ", folder_.string(), ": reserving ", size, " bytes failed: ", std::strerror(refused), way_out(refused)));
  }
  void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, extent->begin_);
  if (memory == MAP_FAILED) {
    throw Error(detail::concat(key_, " = ", folder_.string(), ": mapping ", size, " bytes failed: ", std::strerror(errno),
                               errno == ENOMEM ? "; raise what the process may map (ulimit -v), or leave more on the device or the host" : ""));
  }
  return {memory, [extent, size](void* mapped) { ::munmap(mapped, size); }};
}

SpillFile::Ticket SpillFile::add(Job job) {
  std::unique_lock lock(mutex_);
  const Ticket ticket = ++asked_;
  if (file_ < 0) {
    done_ = ticket;
    return ticket;
  }
  jobs_.push_back(std::move(job));
  lock.unlock();
  changed_.notify_all();
  return ticket;
}

void SpillFile::wait(Ticket ticket) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return done_ >= ticket; });
  if (failure_) std::rethrow_exception(failure_);
}

void SpillFile::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return ending_ || !jobs_.empty(); });
    if (ending_) return;
    {
      const Job job = std::move(jobs_.front());
      jobs_.pop_front();
      const bool failed = failure_ != nullptr;
      lock.unlock();
      std::exception_ptr failure;
      try {
        if (!failed) carry_out(job);
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      if (failure) failure_ = failure;
    }  // its memory is let go of before anybody hears that it is done
    ++done_;
    changed_.notify_all();
  }
}

void SpillFile::carry_out(const Job& job) {
  if (job.ready) job.ready();
  auto* at = static_cast<char*>(job.memory.data_ptr());
  auto left = static_cast<size_t>(job.memory.nbytes());
  off_t offset = job.extent->begin_;
  while (left > 0) {
    const ssize_t moved = job.writes ? ::pwrite(file_, at, left, offset) : ::pread(file_, at, left, offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) {
      const int reason = moved < 0 ? errno : EIO;
      throw Error(detail::concat(key_, " = ", folder_.string(), ": ", job.writes ? "writing " : "reading ", job.memory.nbytes(),
                                 " bytes failed: ", std::strerror(reason), way_out(reason)));
    }
    at += moved;
    left -= static_cast<size_t>(moved);
    offset += moved;
  }
}

}  // namespace tessera::offload
