#include "tessera/core/host_name.h"

#include <algorithm>
#include <fstream>

#include <unistd.h>

namespace tessera {

std::string host_name(const std::string& otherwise) {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 && name[0] != 0 ? name : otherwise;
}

std::string processor_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) return line.substr(std::min(line.size(), line.find(':') + 2));
  }
  return "";
}

}  // namespace tessera
