#pragma once

#include <filesystem>

namespace tessera::checkpoint {

/// The unfinished form of a folder: beside it, under a name that nobody else has (".tmp-hf.<process>.<16 hexadecimal digits>"), and locked (flock) as long as
/// this object lives. So any number may be at work on the same folder: each has its own, and one of them gets the name.
///
/// What killed ones left of the same folder is removed first: what has such a name, and no lock. Where the file system has no locks, it stays.
class UnfinishedFolder {
 public:
  /// Makes it, and the folders above. Throws Error.
  explicit UnfinishedFolder(const std::filesystem::path& whole);
  /// Removes it with all that it holds, unless it was committed.
  ~UnfinishedFolder();
  UnfinishedFolder(const UnfinishedFolder&) = delete;
  UnfinishedFolder& operator=(const UnfinishedFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  /// Syncs it and gives it its name. False where something has that name by now.
  [[nodiscard]] bool commit();

 private:
  void remove_leftovers() const;
  std::filesystem::path whole_, path_;
  int descriptor_ = -1;
};

}  // namespace tessera::checkpoint
