#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace tessera {

/// A file of a run's records, each of which is there whole or not at all: on a full disk the part that was written is taken back. The first record of a row
/// that is lost is said aloud, and with close() how many were; the next is tried all the same, for the disk may have room again.
class RecordFile {
 public:
  /// `strict`: a record that is lost is an error.
  explicit RecordFile(bool strict = false) : strict_(strict) {}
  ~RecordFile();
  RecordFile(const RecordFile&) = delete;
  RecordFile& operator=(const RecordFile&) = delete;

  /// Opens an existing file behind its end, or a new one, and makes the folder that it lies in. False, with errno, where that cannot be. Where it is for want
  /// of room, and the file is not strict, that is said, and each record tries again.
  [[nodiscard]] bool open(std::filesystem::path path);
  /// Whether a live process of this host has a RecordFile open there, as far as the file system keeps locks.
  static bool is_being_written(const std::filesystem::path& path);
  /// Throws Error where one is lost and the file is strict.
  void append(std::string_view record);
  /// Says what was lost, if anything, also by the last look at the disk. Once.
  void close();

  bool strict() const { return strict_; }
  int64_t lost() const { return lost_; }

 private:
  bool try_open();
  void lose(int code);

  bool strict_;
  std::filesystem::path path_;
  int descriptor_ = -1;
  int64_t end_ = 0;  ///< of the last whole record
  int64_t written_ = 0, lost_ = 0;
  bool losing_ = false;
};

}  // namespace tessera
