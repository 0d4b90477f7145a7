#pragma once

#include <cstddef>
#include <string>

namespace tessera::comm::shm {

/// A file in memory, mapped. Unmapped and closed by the destructor; a file without a name vanishes with the last process that has it, however that one ends.
/// Throws Failure with path, size, bytes free and the way out.
class Segment {
 public:
  /// `bytes` of address space on a memfd, or, where `folder` is given, on a file without a name there. No memory is taken before reserve().
  static Segment create(size_t bytes, const std::string& folder);
  /// The same on a file with a name (in `folder`, or /dev/shm), for peers that cannot open our files through /proc. It has to be unlinked once all have mapped
  /// it.
  static Segment create_named(size_t bytes, const std::string& folder);
  /// Another process's segment, by its path; `folder` as it was made with.
  static Segment open(const std::string& path, size_t bytes, const std::string& folder);

  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&&) = delete;
  ~Segment();

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  /// Under which others on this host can open it: a name, or this process's descriptor in /proc.
  const std::string& path() const { return path_; }
  int descriptor() const { return descriptor_; }
  void unlink();

  /// Makes sure that there is memory for these bytes, so that writing them can never end in SIGBUS. Bytes that were never written are zero.
  void reserve(size_t offset, size_t bytes);
  /// Gives whole pages back to the system; they read as zero afterwards.
  void release(size_t offset, size_t bytes) noexcept;

 private:
  Segment(int descriptor, size_t bytes, std::string path, std::string place);
  void map();

  int descriptor_ = -1;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  std::string path_;
  std::string place_;  ///< folder that limits its memory; empty for a memfd
  bool named_ = false;
};

size_t page_size();

}  // namespace tessera::comm::shm
