#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/core/events.h"
#include "tessera/memory/history.h"
#include "tessera/memory/memory.h"

/// What is behind a tracker. Not part of the public surface.
namespace tessera::detail {

/// Takes down a timeline as it happens, in bounded memory: when it is full, it keeps every second point and takes half as many from then on.
class MemoryTimeline {
 public:
  MemoryTimeline(const MemoryByCategory& before, size_t most_events);
  void add(MemoryCategory category, int64_t bytes, std::string_view module, const MemoryByCategory& after);
  void mark(std::string_view phase);
  /// What was seen up to now, without `largest`.
  MemoryHistory take() &&;

 private:
  double now() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count(); }
  int position_of(std::string_view module);
  void keep_group();

  size_t most_events_;
  std::chrono::steady_clock::time_point began_ = std::chrono::steady_clock::now();
  MemoryHistory history_;
  std::map<std::string, int, std::less<>> positions_{{"", 0}};
  std::optional<MemoryEvent> group_;  ///< of the events that become the next point, the one after which most was alive
  int64_t in_group_ = 0;
};

/// What is known of every storage that is alive, and of the largest of those that were alive at the peak and have died since.
class MemoryDetails {
 public:
  static constexpr size_t kLargest = 10;

  void allocated(int64_t id, MemoryBlock block) { alive_.emplace(id, std::move(block)); }
  void released(int64_t id);
  void peak_is_now(int64_t last_id);
  MemoryBlock* find(int64_t id);
  std::vector<MemoryBlock> largest_at_peak() const;
  std::vector<MemoryBlock> largest_alive() const;

 private:
  std::vector<MemoryBlock> largest(int64_t last_id, std::vector<MemoryBlock> candidates) const;

  std::unordered_map<int64_t, MemoryBlock> alive_;
  std::vector<MemoryBlock> died_;  ///< since the peak, at most kLargest of them
  int64_t peak_id_ = 0;            ///< storages counted later were not alive at the peak
};

struct CountedMemory;
struct MemoryThread;

/// What a tracker counts. Shared by the tracker and by every storage that was counted on it, so that either may die first.
struct MemoryLedger : std::enable_shared_from_this<MemoryLedger> {
  /// Counts a storage; returns its number, from 1. Throws c10::OutOfMemoryError, counting nothing, where that would pass the limit (unless told to pass it).
  int64_t allocate(const MemoryThread& thread, int64_t bytes, bool within_limit = true);
  void release(const CountedMemory& counted);
  void move(const CountedMemory& counted, MemoryCategory to);
  /// Says to who listens that memory was taken, or given back. To be called with the mutex held.
  void tell(int64_t id, MemoryCategory category, int64_t bytes, bool on_host) const;
  void restart_peak();
  /// Takes down that `bytes` more were refused. To be called with the mutex held.
  void refuse(MemoryCategory category, int64_t bytes, std::string_view label, bool by_limit);

  mutable std::mutex mutex;
  std::atomic<bool> beside_device = false;  ///< what is allocated on the CPU lies on the host beside an accelerator
  int64_t total = 0, peak = 0, allocations = 0, limit = 0;
  MemoryByCategory by_category{}, peak_by_category{};
  MemoryByCategory host{}, host_peak{};  ///< beside the device: in none of the above
  std::string_view phase;                ///< the last mark
  std::optional<MemoryRefusal> refusal;
  std::unique_ptr<MemoryDetails> details;    ///< null: not asked for
  std::unique_ptr<MemoryTimeline> timeline;  ///< null: not asked for
  EventStream* events = nullptr;             ///< null: nobody listens
};

/// What the allocations of a thread count on.
struct MemoryThread {
  MemoryLedger* ledger = nullptr;  ///< not an owner: it is read by every allocation of the process, and whoever sets it keeps the ledger alive
  MemoryCategory category = MemoryCategory::Other;
  bool on_host = false;  ///< beside the device
  std::string_view label{};
};
extern constinit thread_local MemoryThread memory_thread;

/// On whose behalf this thread allocates on a device: its own, or, in a thread that autograd keeps for a device, that of the thread that called backward and
/// waits for it; then with the category and the label of this one's own scopes, where it has any. libtorch carries the answer along with whatever else is the
/// caller's.
MemoryThread device_thread();
void carry_thread();          ///< from now on this thread is such a caller
void stop_carrying_thread();  ///< and from now on no more

/// An allocation that is counted.
struct CountedMemory {
  std::shared_ptr<MemoryLedger> ledger{};  ///< null where it is not counted
  MemoryCategory category = MemoryCategory::Other;
  int64_t bytes = 0;
  int64_t id = 0;  ///< in the ledger
  bool on_host = false;

  /// Counts `bytes` as `thread` does, which has to have a ledger.
  static CountedMemory count(const MemoryThread& thread, int64_t bytes, bool within_limit = true);
  void take_off() const {
    if (ledger) ledger->release(*this);
  }
};

/// The counted allocation on which the tensor lies; change(CountedMemory&) where there is one.
void visit_counted(const at::Tensor& tensor, const std::function<void(CountedMemory&)>& change);

/// One small product in bf16, so that oneDNN's scratch space is known (allocators.cpp). Once a process.
void learn_scratch_site();

/// What an allocator of a device that is none of ours reports. Never throws: the device's own limit is the one that counts.
void count_device_memory(void* address, int64_t bytes) noexcept;
void uncount_device_memory(void* address) noexcept;
void device_refused(int64_t bytes) noexcept;

/// How a type of device is made to report, and to refuse what would pass a limit (null: it cannot); registered when the library loads by what this build has of
/// it, which says with it that the build supports the type (core/devices.h).
void register_device_tracking(at::DeviceType type, void (*start)(), void (*limit)(at::Device device, int64_t bytes) = nullptr);

}  // namespace tessera::detail
