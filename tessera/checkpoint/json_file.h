#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace tessera::checkpoint {

/// Parses JSON that came from `file`. Throws ConfigError naming the file and the offset of the first error; values nested deeper than 64 are one.
nlohmann::json parse_json(const std::string& text, const std::filesystem::path& file);

/// Reads and parses a file of at most 256 MiB.
nlohmann::json read_json(const std::filesystem::path& file);

/// An integer of 64 bits, or a list of them; anything else, a fraction or a number that does not fit too, is a ConfigError that shows it. (nlohmann's own
/// conversion cuts fractions off, and wraps.)
int64_t to_integer(const nlohmann::json& value);
std::vector<int64_t> to_integers(const nlohmann::json& list);

}  // namespace tessera::checkpoint
