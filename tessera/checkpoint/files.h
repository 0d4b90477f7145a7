#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>

#include "tessera/core/error.h"

/// What the room needs of the operating system: files that are whole or absent, whatever moment the machine stops. Throws Error naming the file and the
/// system's reason.
namespace tessera::checkpoint {

/// A file that is there, and that the system does not give: for want of permission, memory or descriptors, or for a fault of the disk or the network. Nothing
/// is known of what it holds, so nobody may take it for damaged.
class UnreadableFile : public ConfigError {
 public:
  /// `problem`: with the file and the system's reason; the way out is added.
  explicit UnreadableFile(const std::string& problem) : ConfigError(problem + "; it may be whole: make it readable, and try again") {}
};

/// A file that is being written.
class OutputFile {
 public:
  explicit OutputFile(std::filesystem::path path);  ///< created, or emptied
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void sync_and_close();  ///< returns when the bytes are on the disk

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
  int descriptor_ = -1;
};

/// A file mapped for reading; never more than the file is touched.
class MappedFile {
 public:
  /// Throws ConfigError where there is none or it is no regular file, UnreadableFile where it cannot be read.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  std::span<const std::byte> bytes_;
};

/// Makes an empty folder of that name, and those above it; what was there is removed first.
void make_empty_directory(const std::filesystem::path& directory);

/// Removes a file or a folder with all that it holds; none there is no error.
void remove_tree(const std::filesystem::path& path);

/// Gives a file or folder another name, which nothing has. False, and nothing has changed, where something has it by now.
[[nodiscard]] bool rename_to_new(const std::filesystem::path& from, const std::filesystem::path& to);

/// Gives a file or folder another name; a file, or an empty folder, that has it goes.
void rename_to(const std::filesystem::path& from, const std::filesystem::path& to);

/// Writes a small file whole, synced.
void write_file(const std::filesystem::path& path, const std::string& text);

/// Reads a text file of at most `max_bytes`. Throws ConfigError.
std::string read_text_file(const std::filesystem::path& path, uint64_t max_bytes);

/// Makes the names in a folder durable: files created, renamed and removed.
void sync_directory(const std::filesystem::path& directory);

/// Renames `from` to `to`; where `to` exists, the two change places in one step, or, where the file system cannot do that, replace_in_two_steps().
void rename_or_exchange(const std::filesystem::path& from, const std::filesystem::path& to);

/// Renames `from` to `to`, which exists and goes. Between the two steps, where a kill may fall, nothing has that name, and what had it is `from`.replaced.
void replace_in_two_steps(const std::filesystem::path& from, const std::filesystem::path& to);

}  // namespace tessera::checkpoint
