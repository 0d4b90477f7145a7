#include "tessera/offload/disk_speed.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "tessera/offload/nameless_file.h"

namespace tessera {

namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::max(1e-9, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}

struct OpenFile {
  int file;
  ~OpenFile() {
    if (file >= 0) ::close(file);
  }
};

}  // namespace

std::optional<DiskSpeed> measure_disk(const std::filesystem::path& folder, int64_t bytes) {
  constexpr int64_t kBlock = int64_t{4} << 20;  // as large as what is moved
  const OpenFile open{offload::open_nameless(folder)};
  if (open.file < 0 || bytes <= 0) return std::nullopt;
  std::vector<char> block(static_cast<size_t>(std::min(bytes, kBlock)), '\x5a');
  const auto pass = [&](auto&& move) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t moved = move(block.data(), static_cast<size_t>(std::min<int64_t>(bytes - done, std::ssize(block))), done);
      if (moved <= 0) return false;
      done += moved;
    }
    return true;
  };
  DiskSpeed speed;
  auto begin = std::chrono::steady_clock::now();
  if (!pass([&](char* at, size_t size, int64_t offset) { return ::pwrite(open.file, at, size, offset); }) || ::fdatasync(open.file) != 0) return std::nullopt;
  speed.write = static_cast<double>(bytes) / seconds_since(begin);
  ::posix_fadvise(open.file, 0, 0, POSIX_FADV_DONTNEED);
  begin = std::chrono::steady_clock::now();
  if (!pass([&](char* at, size_t size, int64_t offset) { return ::pread(open.file, at, size, offset); })) return std::nullopt;
  speed.read = static_cast<double>(bytes) / seconds_since(begin);
  return speed;
}

}  // namespace tessera
