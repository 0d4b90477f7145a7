#include "tessera/memory/host_cache.h"

#include <array>
#include <atomic>
#include <bit>
#include <cstdlib>
#include <mutex>
#include <vector>

#include <sys/mman.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TESSERA_ADDRESS_SANITIZER
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define TESSERA_ADDRESS_SANITIZER
#endif

// Sizes are rounded to eight classes a doubling: enough that a step's tensors find their block again although a few bytes differ, at an eighth of waste at
// most. The last block that came back goes first, for it is the one that the processor's caches still know. Running out of memory gives all free blocks back
// before it is an error: they may have the wrong sizes.

namespace tessera {
namespace {

#ifdef TESSERA_ADDRESS_SANITIZER
constexpr bool kEnabled = false;
#else
constexpr bool kEnabled = true;
#endif

constexpr size_t kSmallest = size_t{1} << 15;  // below, malloc keeps what is freed by itself
constexpr size_t kHugePage = size_t{1} << 21;
constexpr int kStepsPerDoubling = 8;  // so at most 1/8 of a block is waste
constexpr int kClasses = kStepsPerDoubling * 26;

thread_local int guards_of_thread = 0;

// Class c holds blocks of (8 + c % 8) / 8 * kSmallest * 2^(c / 8) bytes.
size_t class_bytes(int size_class) {
  const size_t base = kSmallest << (size_class / kStepsPerDoubling);
  return base + base / kStepsPerDoubling * static_cast<size_t>(size_class % kStepsPerDoubling);
}

int class_of(size_t bytes) {
  const int doubling = std::bit_width(bytes / kSmallest) - 1;
  const size_t base = kSmallest << doubling, step = base / kStepsPerDoubling;
  return doubling * kStepsPerDoubling + static_cast<int>((bytes - base + step - 1) / step);
}

class Cache {
 public:
  void* take(int size_class) {
    {
      const std::lock_guard lock(mutex_);
      auto& blocks = free_[static_cast<size_t>(size_class)];
      if (!blocks.empty()) {
        void* const block = blocks.back();
        blocks.pop_back();
        cached_ -= static_cast<int64_t>(class_bytes(size_class));
        return block;
      }
    }
    const size_t bytes = class_bytes(size_class);
    ++made_;
    void* block = make(bytes);
    if (block == nullptr) {
      flush();
      block = make(bytes);
    }
    return block;
  }

  void give(void* block, int size_class) {
    const std::lock_guard lock(mutex_);
    if (guards_ == 0) return std::free(block);
    free_[static_cast<size_t>(size_class)].push_back(block);
    cached_ += static_cast<int64_t>(class_bytes(size_class));
  }

  void enter() {
    const std::lock_guard lock(mutex_);
    ++guards_;
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    if (--guards_ == 0) free_all();
  }

  void flush() {
    const std::lock_guard lock(mutex_);
    free_all();
  }

  int64_t bytes() {
    const std::lock_guard lock(mutex_);
    return cached_;
  }

  int64_t made() const { return made_; }

 private:
  static void* make(size_t bytes) {
    const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
    void* block = nullptr;
    if (posix_memalign(&block, alignment, bytes) != 0) return nullptr;
    // Advice only: where the kernel has no huge page to give, the block is as good.
    if (alignment == kHugePage) madvise(block, bytes, MADV_HUGEPAGE);
    return block;
  }

  void free_all() {
    for (auto& blocks : free_) {
      for (void* block : blocks) std::free(block);
      blocks.clear();
    }
    cached_ = 0;
  }

  std::mutex mutex_;
  std::atomic<int64_t> made_ = 0;
  std::array<std::vector<void*>, kClasses> free_;
  int64_t cached_ = 0;
  int guards_ = 0;
};

/// Never destroyed: tensors may be freed after every static object.
Cache& cache() {
  static auto* const cache = new Cache;
  return *cache;
}

}  // namespace

CacheHostMemory::CacheHostMemory() {
  ++guards_of_thread;
  cache().enter();
}

CacheHostMemory::~CacheHostMemory() {
  --guards_of_thread;
  cache().leave();
}

namespace detail {

int host_cache_class(size_t bytes) {
  if (!kEnabled || guards_of_thread == 0 || bytes < kSmallest) return kNotCached;
  const int size_class = class_of(bytes);
  return size_class < kClasses ? size_class : kNotCached;
}

void* host_cache_take(int size_class) { return cache().take(size_class); }
void host_cache_give(void* block, int size_class) { cache().give(block, size_class); }
int64_t host_cache_bytes() { return cache().bytes(); }
int64_t host_cache_made() { return cache().made(); }

}  // namespace detail
}  // namespace tessera
