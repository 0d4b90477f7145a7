#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

namespace tessera::data {

/// Reads a text file block by block: compressed by gzip where its name ends in .gz (several members too) or .dz (dictzip, which is gzip with an index),
/// plain otherwise.
///
/// Throws ConfigError with the file, and the offset in it, where it is missing, unreadable, truncated, or damaged; and where it begins, or unfolds to what
/// begins, as no text does: gzip data under another name, what other programs have compressed or archived, a packed corpus, UTF-16.
class TextReader {
 public:
  /// `knob`: what named the file, for messages.
  explicit TextReader(const std::filesystem::path& file, const std::string& knob = "");
  ~TextReader();
  TextReader(const TextReader&) = delete;
  TextReader& operator=(const TextReader&) = delete;

  /// Appends up to `bytes` bytes of text; returns how many, 0 only at the end.
  size_t read(std::string& text, size_t bytes);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The whole text of a plain, .gz or .dz file. Throws as TextReader does.
std::string read_text(const std::filesystem::path& file);

}  // namespace tessera::data
