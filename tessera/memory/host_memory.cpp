#include "tessera/memory/host_memory.h"

#include <algorithm>
#include <fstream>
#include <string>

#include <sys/resource.h>

namespace tessera {
namespace {

constexpr int64_t kKibibyte = 1024;

int64_t memory_and_swap() {
  std::ifstream file("/proc/meminfo");
  int64_t kibibytes = 0;
  for (std::string name, rest; file >> name; std::getline(file, rest)) {
    int64_t value = 0;
    if ((name == "MemTotal:" || name == "SwapTotal:") && file >> value) kibibytes += value;
  }
  return kibibytes * kKibibyte;
}

}  // namespace

int64_t host_memory_bytes() {
  int64_t bytes = memory_and_swap();
  for (const char* limit : {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {  // version 2 of control groups, and 1
    std::ifstream file(limit);
    if (int64_t value = 0; file >> value && value > 0) bytes = std::min(bytes, value);  // "max" is no number
  }
  return bytes;
}

int64_t process_memory_limit_bytes() {
  rlim_t most = RLIM_INFINITY;
  for (const auto kind : {RLIMIT_DATA, RLIMIT_AS}) {
    if (rlimit limit{}; ::getrlimit(kind, &limit) == 0) most = std::min(most, limit.rlim_cur);
  }
  return most == RLIM_INFINITY ? 0 : static_cast<int64_t>(most);
}

}  // namespace tessera
