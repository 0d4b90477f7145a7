#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tessera/nn/attach.h"

namespace tessera::nn {

/// A parameter's path and those of the modules that hold it: "layers", "layers.0", "layers.0.wq", "layers.0.wq.weight".
inline std::vector<std::string> paths_to(const std::string& name) {
  std::vector<std::string> paths;
  for (size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) paths.push_back(name.substr(0, dot));
  paths.push_back(name);
  return paths;
}

/// How far in the outermost of them lies that `pattern` matches, the first being 1: what it names is that, with all that it holds. Nothing where it matches
/// none.
inline std::optional<size_t> named_by(const std::string& pattern, const std::string& name) {
  const std::vector<std::string> paths = paths_to(name);
  for (size_t depth = 1; depth <= paths.size(); ++depth) {
    if (matches(pattern, paths[depth - 1])) return depth;
  }
  return std::nullopt;
}

}  // namespace tessera::nn
