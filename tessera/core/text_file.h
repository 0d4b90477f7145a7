#pragma once

#include <string>
#include <string_view>

namespace tessera {

/// Writes `text` as the whole of a file. Throws as fail_to_write does, with a sentence that begins with `what` ("picture a.svg"), where that cannot be, and
/// leaves no half a file behind.
void write_text_file(const std::string& what, const std::string& path, std::string_view text);

/// Reads a file to its end. Throws ConfigError, which begins with `what` ("--layouts = a.jsonl"), with the system's reason where that fails: a stream of the
/// standard library would take an error for the end of the file, or throw a sentence that names neither.
std::string read_text_file(const std::string& what, const std::string& path);

}  // namespace tessera
