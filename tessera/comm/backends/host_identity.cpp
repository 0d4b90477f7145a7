#include "tessera/comm/backends/host_identity.h"

#include <array>
#include <fstream>

#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

namespace tessera::comm {
namespace {

constexpr const char* kNone = "none";

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  return std::getline(file, id) ? id : kNone;
}

// Of a namespace, the inode names it; of a file system, the device.
std::string file_id(const char* path, bool is_namespace) {
  struct stat status{};
  if (::stat(path, &status) != 0) return kNone;
  return fmt::format("{:x}", is_namespace ? uint64_t{status.st_ino} : uint64_t{status.st_dev});
}

}  // namespace

std::string host_identity() {
  return fmt::format("{}/net:{}/pid:{}/shm:{}", boot_id(), file_id("/proc/self/ns/net", true), file_id("/proc/self/ns/pid", true), file_id("/dev/shm", false));
}

std::string machine_identity() {
  if (const std::string id = boot_id(); id != kNone) return id;
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

}  // namespace tessera::comm
