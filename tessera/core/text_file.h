#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

/// Writes `text` as the whole of a file. Returns 0, or an errno, and then leaves no half a file behind.
int try_to_write(const std::filesystem::path& file, std::string_view text);

/// The same by way of `partial`, which takes the file's name when it is whole, so that what was there before is lost by no crash, and on no full disk. Returns
/// 0, or an errno, and then leaves nothing of `partial`.
int try_to_replace(const std::filesystem::path& file, const std::filesystem::path& partial, std::string_view text);

/// try_to_write(), which throws as fail_to_write does, with a sentence that begins with `what` ("picture a.svg").
void write_text_file(const std::string& what, const std::string& path, std::string_view text);

/// Reads a file to its end. Throws ConfigError, which begins with `what` ("--layouts = a.jsonl"), with the system's reason where that fails: a stream of the
/// standard library would take an error for the end of the file, or throw a sentence that names neither.
std::string read_text_file(const std::string& what, const std::string& path);

}  // namespace tessera
