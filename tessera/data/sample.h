#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera::data {

/// About `bytes` bytes (more than half, never more) of the text of all files: stretches of whole lines, evenly spaced, the same on every call; a line beyond 4
/// KiB that is longer than several stretches is cut between characters. Less text than that, or bytes = 0, gives all of it. One pass over the text; memory of
/// the sample. Throws ConfigError as TextReader does.
std::vector<std::string> sample_text(const std::vector<std::filesystem::path>& files, int64_t bytes);

}  // namespace tessera::data
