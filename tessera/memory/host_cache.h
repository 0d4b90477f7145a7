#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

/// While alive, large CPU tensors that this thread allocates come from a cache of blocks, to which they return when they are freed, on whatever thread.
/// A training step asks for the same sizes again and again; malloc gives blocks of that size back to the kernel each time, and the page faults of the next step
/// then cost more than the arithmetic on them (a fused norm of 32 MiB: 25 ms against 3). Blocks of 2 MiB and more ask for huge pages. What is cached stays
/// resident until the last such guard of the process ends; it never exceeds the sum over block sizes of the most that was in use at once.
/// What MemoryTracker counts does not change: bytes asked for, from the asking to the freeing.
/// Inert under the address sanitizer, which has to see every free.
class CacheHostMemory {
 public:
  CacheHostMemory();
  ~CacheHostMemory();
  CacheHostMemory(const CacheHostMemory&) = delete;
  CacheHostMemory& operator=(const CacheHostMemory&) = delete;
};

namespace detail {

/// Blocks of the cache have a size class, other memory has none.
inline constexpr int kNotCached = -1;

/// The class that serves `bytes` on this thread, or kNotCached.
int host_cache_class(size_t bytes);

/// A block of that class, aligned to 64 bytes; null where memory has run out even after everything cached was given back.
void* host_cache_take(int size_class);
void host_cache_give(void* block, int size_class);

/// Bytes of free blocks that are kept now.
int64_t host_cache_bytes();

/// Blocks that were asked of the system since the process began: the same number after two steps says that nothing was allocated between them.
int64_t host_cache_made();

}  // namespace detail
}  // namespace tessera
