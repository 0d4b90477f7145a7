#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace tessera::data {

/// A file mapped read-only into memory for as long as the object lives. Throws ConfigError naming the file where it cannot be opened.
class MappedFile {
 public:
  explicit MappedFile(const std::filesystem::path& file);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

  /// Asks the kernel to read these bytes soon; returns at once.
  void read_ahead(size_t first, size_t count) const;

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace tessera::data
