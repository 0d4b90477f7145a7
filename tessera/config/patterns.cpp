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

std::vector<std::string_view> components_of(std::string_view path) {
  std::vector<std::string_view> parts;
  if (path.empty()) return parts;
  for (size_t begin = 0;;) {
    const size_t dot = path.find('.', begin);
    parts.push_back(path.substr(begin, dot - begin));
    if (dot == std::string_view::npos) return parts;
    begin = dot + 1;
  }
}

bool component_matches(std::string_view pattern, std::string_view text) {
  // Greedy with one place to go back to: the last '*' and how much of the text it has taken so far.
  size_t p = 0, t = 0, star = std::string_view::npos, taken = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++taken;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

namespace {

bool parts_match(const std::vector<std::string_view>& pattern, size_t p, const std::vector<std::string_view>& path, size_t t) {
  for (; p < pattern.size(); ++p, ++t) {
    if (pattern[p] == "**") {
      for (size_t skip = t; skip <= path.size(); ++skip) {
        if (parts_match(pattern, p + 1, path, skip)) return true;
      }
      return false;
    }
    if (t == path.size() || !component_matches(pattern[p], path[t])) return false;
  }
  return t == path.size();
}

}  // namespace

bool path_matches(std::string_view pattern, std::string_view path) { return parts_match(components_of(pattern), 0, components_of(path), 0); }

std::vector<std::string> paths_to(const std::string& name) {
  std::vector<std::string> paths;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) paths.push_back(name.substr(0, dot));
  paths.push_back(name);
  return paths;
}

std::optional<size_t> named_by(const std::string& pattern, const std::string& name) {
  const std::vector<std::string> paths = paths_to(name);
  for (size_t depth = 1; depth <= paths.size(); ++depth) {
    if (path_matches(pattern, paths[depth - 1])) return depth;
  }
  return std::nullopt;
}

}  // namespace tessera
