#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
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

  /// How large it is, and when it, or what the system keeps of it (its names, its mode), was last changed: by the system's note, which no program sets.
  struct State {
    int64_t bytes = -1, seconds = 0, nanoseconds = 0;  ///< -1: the system does not say
    auto operator<=>(const State&) const = default;
  };
  State opened() const { return opened_; }  ///< before anything of it was read
  State state() const;                      ///< now

  /// Asks the kernel to read these bytes soon; returns at once.
  void read_ahead(size_t first, size_t count) const;

 private:
  const std::byte* data_ = nullptr;
  size_t size_ = 0;
  int descriptor_ = -1;
  State opened_{};
};

}  // namespace tessera::data
