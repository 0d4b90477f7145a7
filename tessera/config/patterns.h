#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// The patterns of a key that holds several ("layers.*.attention.*, head"): separated by commas, without the blanks around them, empty ones left out.
std::vector<std::string> patterns_in(std::string_view list);

/// What stands between the dots of a path; none of an empty one.
std::vector<std::string_view> components_of(std::string_view path);

/// Of one component: '*' stands for any text.
bool component_matches(std::string_view pattern, std::string_view text);

/// Whether `path` matches: '*' stands for any text within one component, '**' for any number of components, also none.
bool path_matches(std::string_view pattern, std::string_view path);

/// A parameter's path and those of the modules that hold it: "layers", "layers.0", "layers.0.wq", "layers.0.wq.weight".
std::vector<std::string> paths_to(const std::string& name);

/// How far in the outermost of them lies that `pattern` matches, the first being 1: what it names is that, with all that it holds. Nothing where it matches
/// none.
std::optional<size_t> named_by(const std::string& pattern, const std::string& name);

}  // namespace tessera
