#pragma once

#include <filesystem>
#include <string>

#include <nlohmann/json.hpp>

namespace tessera::checkpoint {

/// Parses JSON that came from `file`. Throws ConfigError naming the file and the offset of the first error; values nested deeper than 64 are one.
nlohmann::json parse_json(const std::string& text, const std::filesystem::path& file);

/// Reads and parses a file of at most 256 MiB.
nlohmann::json read_json(const std::filesystem::path& file);

}  // namespace tessera::checkpoint
