#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// Writes `text` as the whole of a file. Throws ConfigError, which begins with `what` ("picture a.svg"), where that cannot be: with the reason, and without
/// half a file left behind.
void write_text_file(const std::string& what, const std::string& path, std::string_view text);

}  // namespace tessera
