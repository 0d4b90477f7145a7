#include "tessera/config/patterns.h"

#include <algorithm>
#include <utility>

#include "tessera/config/detail.h"

namespace tessera {

std::vector<std::string> patterns_in(std::string_view list) {
  std::vector<std::string> patterns;
  for (size_t begin = 0; begin <= list.size();) {
    const size_t end = std::min(list.find(',', begin), list.size());
    std::string one = detail::trimmed(std::string(list.substr(begin, end - begin)));
    if (!one.empty()) patterns.push_back(std::move(one));
    begin = end + 1;
  }
  return patterns;
}

}  // namespace tessera
