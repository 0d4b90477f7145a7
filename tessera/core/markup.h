#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// As it stands between the tags of HTML and XML, or in a quoted attribute; control characters become spaces.
std::string escape_markup(std::string_view text);

}  // namespace tessera
