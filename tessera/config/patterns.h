#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// The patterns of a key that holds several ("layers.*.attention.*, head"): separated by commas, without the blanks around them, empty ones left out.
std::vector<std::string> patterns_in(std::string_view list);

}  // namespace tessera
