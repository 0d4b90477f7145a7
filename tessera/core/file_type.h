#pragma once

#include <filesystem>
#include <string>

namespace tessera {

/// Whether something is there, and whether it is a folder; links are followed. Unlike those of the standard library, they throw ConfigError, with the path and
/// the cause, where the question itself fails: in a folder that this user may not enter, in a loop of links, for a name that is too long.
bool is_there(const std::filesystem::path& path);
bool is_folder(const std::filesystem::path& path);

/// Where a file of that name is to be written so that a rename puts it in its place: the target where the name is a link, also one that leads to nothing yet.
std::filesystem::path target_of(const std::filesystem::path& file);
/// The same. Throws ConfigError, with `knob`, where the folder does not exist, or what is there is no regular file: a device or a pipe would be replaced by a
/// file. Nor is /dev/stdout a place for one, whatever it leads to.
std::filesystem::path output_place(const std::filesystem::path& file, const std::string& knob);

/// FILE.SUFFIX-1, or with the first number after it that nothing has: for a file that gives its place to another.
std::filesystem::path name_aside(const std::filesystem::path& file, const std::string& suffix);

/// To read the names in a folder; the same errors.
std::filesystem::directory_iterator entries_of(const std::filesystem::path& folder);

}  // namespace tessera
