#pragma once

#include <string>
#include <vector>

/// The notations in which Slurm writes lists. Pure functions.
namespace tessera::comm {

/// "node[01-03,7],gpu2" -> node01, node02, node03, node7, gpu2. Brackets may stand anywhere and more than once in a name ("r[1-2]n[1-2]"); leading zeros are
/// the width. Throws ConfigError, quoting `variable`, for anything else.
std::vector<std::string> expand_nodes(const std::string& list, const std::string& variable);

/// "2(x3),1" -> 2, 2, 2, 1. Throws ConfigError, quoting `variable`, for anything else.
std::vector<int> expand_counts(const std::string& list, const std::string& variable);

}  // namespace tessera::comm
