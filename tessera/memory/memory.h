#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace tessera {

struct MemoryBlock;  // tessera/memory/history.h
struct MemoryHistory;
struct MemoryRefusal;

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
/// allocation and two short locks per storage; while not tracking: one thread-local read per allocation. Details and timelines are kept only where asked for,
/// and cost one pointer test until then.
///
/// A tracker is a handle: copies speak of the same counts.
class MemoryTracker {
 public:
  MemoryTracker();

  int64_t current() const;  ///< bytes alive now
  int64_t peak() const;     ///< most bytes alive at once since construction or reset_peak()
  int64_t current(MemoryCategory category) const;
  int64_t at_peak(MemoryCategory category) const;  ///< this category's share at the moment of the peak
  MemoryByCategory current_by_category() const;
  MemoryByCategory peak_by_category() const;       ///< sums to peak()
  MemoryByCategory host_by_category() const;       ///< alive now on the host beside the device (HostMemory)
  MemoryByCategory host_peak_by_category() const;  ///< when most was alive there, which need not be when most was alive on the device
  int64_t num_allocations() const;                 ///< storages counted so far
  void reset_peak();                               ///< the peaks start again from what is alive now

  /// Counts the tensor's storage under another category from now on. A storage that this tracker does not count is left alone.
  void retag(const at::Tensor& tensor, MemoryCategory category);

  /// Says where the threads of this tracker compute. What they allocate on the CPU lies beside an accelerator: it counts as under HostMemory, and no limit of
  /// the device's refuses it. Before that, and on the CPU and on meta, such memory is the device's.
  void compute_on(at::Device device);

  /// Refuses, from now on, every allocation that would bring current() above `bytes`: it throws c10::OutOfMemoryError, as a device does that has no more.
  /// 0: no limit. Memory of a device that has a limit of its own (track_device) is counted but refused by the device alone.
  void set_limit(int64_t bytes);
  /// The last allocation that the limit, or the device, refused.
  std::optional<MemoryRefusal> refusal() const;

  /// Keeps, of every storage counted from now on, where it was allocated and what it is: some 200 bytes and 0.2 us each. false: no more.
  void keep_details(bool keep = true);
  /// Says what lies on the tensor's storage: its shape and dtype, where nobody has said so before, and its name, if there is one. Without details, nothing.
  void describe(const at::Tensor& tensor, const std::string& name = {});

  /// The ten largest storages that were alive at the peak, the largest first; none without details.
  std::vector<MemoryBlock> largest_at_peak() const;

  /// Takes down every allocation and release from now on, and what is alive after it; restarts the peak. Memory: some 100 bytes an event, of which at most
  /// `most_events` are kept: when they are too many, half of them are dropped, never the peak (MemoryHistory::events_per_point says so).
  void start_timeline(size_t most_events = 16384);
  /// Ends it. With details, the ten largest storages at the peak come along. Throws InternalError where none was started.
  MemoryHistory end_timeline();

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

/// While alive, what this thread allocates on the CPU (or on meta) lies on the host beside a device, whichever MemoryScope is inside: it counts there by its
/// category, and not to the device's current and peak bytes, its limit, details and timeline. So a run on the CPU, which is its own host, tells both apart as
/// one on an accelerator does. Memory of an accelerator stays what it is. HostMemory(false) does nothing. Nests.
class HostMemory {
 public:
  explicit HostMemory(bool on_host = true);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

 private:
  bool before_;
};

/// While alive, what this thread allocates is known to belong to `label`: the path of a module. The text is not copied and must outlive the scope. An empty
/// label leaves the outer one. Nests.
class MemoryLabel {
 public:
  explicit MemoryLabel(std::string_view label);
  ~MemoryLabel();
  MemoryLabel(const MemoryLabel&) = delete;
  MemoryLabel& operator=(const MemoryLabel&) = delete;

  static std::string_view current();

 private:
  std::string_view before_;
};

/// Says to this thread's tracker, if it has one, that a phase of the step begins: "forward". `phase` is a literal.
void mark_memory(std::string_view phase);

/// Makes trackers count memory of that type of device, too; nothing to do for the CPU and for meta, which they always count. Call it before the first tensor
/// there that is to be counted. Bytes are those that were asked for. Throws ConfigError where this build cannot count it.
void track_device(at::DeviceType type);

/// From now on the device refuses this process what would bring what it has reserved there above `bytes`: run.memory_limit_bytes, held by the device's own
/// allocator, since what it keeps for reuse is taken from others as well. Nothing to do for the CPU and for meta, whose limit is the tracker's. Throws
/// ConfigError where this build cannot.
void limit_device(at::Device device, int64_t bytes);

/// What the allocator of an accelerator holds of it: what is alive, rounded up, and what it keeps for reuse. 0 on the CPU and on meta.
struct ReservedMemory {
  int64_t current = 0;
  int64_t peak = 0;  ///< since the process began
};
ReservedMemory reserved_memory(at::Device device);

/// Tracker, category, place and label of a thread, to be carried to another one that works for it (backward on a device's thread, a copy engine):
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
    bool on_host_before_;
    std::string_view label_before_;
  };

 private:
  std::shared_ptr<detail::MemoryLedger> ledger_;
  MemoryCategory category_ = MemoryCategory::Other;
  bool on_host_ = false;
  std::string_view label_;  ///< of whoever is alive as long as the context is in use
};

/// Counts memory of `device` that comes from none of libtorch's allocators (shared with other processes, say) as if it did: `bytes` under this thread's tracker
/// and category, if it has one. `context` is that of the storage's DataPtr, and has to be its own; the DataPtr's deleter calls `uncount_memory` with it.
/// Throws c10::OutOfMemoryError, counting nothing, where that would pass the tracker's limit.
void count_memory(void* context, int64_t bytes, at::Device device = at::kCPU);
void uncount_memory(void* context);

/// Resident memory of the process as the kernel counts it, in bytes; 0 where /proc does not say.
int64_t resident_bytes();
int64_t peak_resident_bytes();

}  // namespace tessera
