#pragma once

#include <filesystem>
#include <string>

namespace tessera::data {

/// The unfinished form of a file, and the lock of whoever writes it: of all threads and processes that construct one for the same path, one holds
/// `<path>.partial` and the others wait. What is written has a name of its own, `<path>.<host>.<drawn>.partial`: where the file system keeps no locks, or not
/// between hosts, several hold it at once, and each writes its own. A crashed holder lets go; the next one of its host removes what it left, and one of another
/// host what nobody has written to for a day.
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
  /// Where the file is to be written.
  const std::filesystem::path& partial() const { return partial_; }
  /// Renames it to its final name, replacing what is there.
  void commit();

 private:
  void remove_leftovers() const;

  std::filesystem::path path_, lock_, partial_;
  int descriptor_ = -1;
  bool held_ = false;
};

}  // namespace tessera::data
