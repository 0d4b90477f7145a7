#pragma once

#include <filesystem>

namespace tessera {

/// Whether something is there, and whether it is a folder; links are followed. Unlike those of the standard library, they throw ConfigError, with the path and
/// the cause, where the question itself fails: in a folder that this user may not enter, in a loop of links, for a name that is too long.
bool is_there(const std::filesystem::path& path);
bool is_folder(const std::filesystem::path& path);

/// To read the names in a folder; the same errors.
std::filesystem::directory_iterator entries_of(const std::filesystem::path& folder);

}  // namespace tessera
