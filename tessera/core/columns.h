#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <vector>

namespace tessera {

/// The rows as lines whose columns line up, two spaces apart, each row with as many cells as the first, which is the heading. Columns of numbers are aligned to
/// the right, those of `left` to the left. A row without cells is an empty line.
std::string format_columns(const std::vector<std::vector<std::string>>& rows, const std::set<size_t>& left = {});

}  // namespace tessera
