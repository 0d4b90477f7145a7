#pragma once

#include <filesystem>
#include <string>

namespace tessera::data {

/// The unfinished form of a file, `<path>.partial`, and the lock of whoever writes it, in one: of all threads and processes that construct one for the same
/// path, one holds it and the others wait. A crashed holder lets go; whoever comes next starts the file anew.
class PartialFile {
 public:
  /// Waits for the lock. Throws ConfigError where the folder cannot be made or written, naming the `knob` that says where.
  PartialFile(const std::filesystem::path& path, const std::string& knob);
  /// Removes the partial file unless it was committed.
  ~PartialFile();
  PartialFile(const PartialFile&) = delete;
  PartialFile& operator=(const PartialFile&) = delete;

  /// False where another holder finished or gave up while this one waited: look at `path` again, then try again.
  bool held() const { return held_; }
  const std::filesystem::path& partial() const { return partial_; }
  /// Renames it to its final name, replacing what is there.
  void commit();

 private:
  std::filesystem::path path_, partial_;
  int descriptor_ = -1;
  bool held_ = false;
};

}  // namespace tessera::data
