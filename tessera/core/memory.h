#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string_view>

#include <ATen/core/Tensor.h>

namespace tessera {

/// What a tensor's bytes are spent on. The names are the fields of `tessera plan --json`.
enum class MemoryCategory : uint8_t { Parameters, Gradients, Optimizer, Activations, Outputs, Comm, Other };
inline constexpr int num_memory_categories = 7;
std::string_view to_string(MemoryCategory category);                  ///< params gradients optimizer activations outputs comm other
using MemoryByCategory = std::array<int64_t, num_memory_categories>;  ///< indexed by int(category), bytes

namespace detail {
struct MemoryLedger;
}

/// Counts, to the byte, what libtorch's CPU and meta allocators hand out while a TrackMemory names this tracker on the allocating thread. A meta tensor counts
/// what the same tensor would take on the CPU, so that a dry run and a real run give the same numbers. A tensor that is freed later, on any
/// thread and even after the tracker is gone, is taken off the tracker that it was counted on. Thread-safe: one tracker may serve a rank's several threads.
///
/// Counted are storages (bytes asked for), not what an operator's library allocates by malloc or, as oneDNN does for scratch space, by raw_allocate(). On meta,
/// resize_() to a larger size passes by the allocator and is not counted: what has to be counted is allocated at its size. Cost while tracking: one small
/// allocation and two short locks per storage; while not tracking: one thread-local read per allocation.
class MemoryTracker {
 public:
  MemoryTracker();

  int64_t current() const;  ///< bytes alive now
  int64_t peak() const;     ///< most bytes alive at once since construction or reset_peak()
  int64_t current(MemoryCategory category) const;
  int64_t at_peak(MemoryCategory category) const;  ///< this category's share at the moment of the peak
  MemoryByCategory current_by_category() const;
  MemoryByCategory peak_by_category() const;  ///< sums to peak()
  int64_t num_allocations() const;            ///< storages counted so far
  void reset_peak();                          ///< the peak starts again from what is alive now

  /// Counts the tensor's storage under another category from now on. A storage that this tracker does not count is left alone.
  void retag(const at::Tensor& tensor, MemoryCategory category);

 private:
  friend class MemoryContext;
  friend class TrackMemory;
  std::shared_ptr<detail::MemoryLedger> ledger_;
};

/// While alive, this thread's allocations count on `tracker`; restores what was before. Nests.
class TrackMemory {
 public:
  explicit TrackMemory(MemoryTracker& tracker);
  ~TrackMemory();
  TrackMemory(const TrackMemory&) = delete;
  TrackMemory& operator=(const TrackMemory&) = delete;

 private:
  std::shared_ptr<detail::MemoryLedger> ledger_;
  detail::MemoryLedger* before_;
};

/// While alive, this thread's new allocations are of `category` (outside any scope: Other). Nests.
class MemoryScope {
 public:
  explicit MemoryScope(MemoryCategory category);
  ~MemoryScope();
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

 private:
  MemoryCategory before_;
};

/// Tracker and category of a thread, to be carried to another one that works for it (backward on a device's thread, a copy engine):
///   auto context = MemoryContext::current();  ...on the other thread:  MemoryContext::Guard guard(context);
class MemoryContext {
 public:
  static MemoryContext current();

  class Guard {
   public:
    explicit Guard(const MemoryContext& context);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    std::shared_ptr<detail::MemoryLedger> ledger_;
    detail::MemoryLedger* ledger_before_;
    MemoryCategory category_before_;
  };

 private:
  std::shared_ptr<detail::MemoryLedger> ledger_;
  MemoryCategory category_ = MemoryCategory::Other;
};

/// Counts memory that comes from none of libtorch's allocators (shared with other processes, say) as if it did: `bytes` under this thread's tracker and
/// category, if it has one. `context` is that of the storage's DataPtr, and has to be its own; the DataPtr's deleter calls `uncount_memory` with it.
void count_memory(void* context, int64_t bytes);
void uncount_memory(void* context);

/// Resident memory of the process as the kernel counts it, in bytes; 0 where /proc does not say.
int64_t resident_bytes();
int64_t peak_resident_bytes();

}  // namespace tessera
