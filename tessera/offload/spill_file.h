#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include <ATen/core/Tensor.h>

#include "tessera/offload/disk_bytes.h"

namespace tessera::offload {

struct FreeRanges;

/// A file for bytes that wait outside of memory. It has a name for no longer than it takes to open it, so the system takes it back whichever way the process
/// ends. One thread of its own writes and reads in the order of asking, beside whoever asks. Ranges that are given back are used again.
class SpillFile {
 public:
  static constexpr int64_t kAlignment = 4096;  ///< of ranges: blocks of the file system, so that neighbours never share one; where pages are larger, theirs

  /// `folder` is made where it is not there. Throws ConfigError, naming `key`, where no file can be made in it. `dry`: nothing is opened, written or read.
  /// `size` is told what the file grows to, of a dry one, too.
  SpillFile(std::filesystem::path folder, std::string key, const DiskBytes& size = {}, bool dry = false);
  ~SpillFile();  ///< waits for what is under way
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  /// A range of the file, to which it returns when the last owner lets go.
  class Extent {
   public:
    ~Extent();

   private:
    friend class SpillFile;
    Extent(std::shared_ptr<FreeRanges> free, int64_t begin, int64_t size) : free_(std::move(free)), begin_(begin), size_(size) {}
    std::shared_ptr<FreeRanges> free_;
    int64_t begin_, size_;
  };
  std::shared_ptr<Extent> take(int64_t bytes);

  /// A number that done(number) and wait(number) know. Throws Error, in wait(), where the disk is full or fails: a sentence that names the folder.
  using Ticket = int64_t;
  /// Host memory -> the range. `ready` is called before it is read: it waits for whoever writes that memory.
  Ticket write(std::shared_ptr<Extent> to, at::Tensor from, std::function<void()> ready = {});
  Ticket read(std::shared_ptr<Extent> from, at::Tensor to);
  void wait(Ticket ticket);

  /// The range as memory of the host: what is written there is read by read(), and the other way around. Its room on disk is reserved, so that a full disk is
  /// told of here and not where that memory is touched. The mapping keeps the range. Throws Error where the disk, or what the process may map, is too small.
  std::shared_ptr<void> map(const std::shared_ptr<Extent>& extent);

 private:
  struct Job {
    bool writes;
    std::shared_ptr<Extent> extent;
    at::Tensor memory;
    std::function<void()> ready;
  };
  Ticket add(Job job);
  void run();
  void carry_out(const Job& job);

  std::filesystem::path folder_;
  std::string key_;
  int file_ = -1;  ///< -1: dry
  std::shared_ptr<FreeRanges> free_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  Ticket asked_ = 0, done_ = 0;
  std::exception_ptr failure_;  ///< of the first job that failed; those behind it are not carried out
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace tessera::offload
