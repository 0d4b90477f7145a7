// Counts what libtorch's CUDA allocator hands out. Operators ask that allocator directly, not the one registered for the device's type, so a wrapper like the
// CPU's would be passed by; but it tells whoever asks of each of its blocks, on the thread that allocates and under the device's lock.

#include <mutex>

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "tessera/memory/ledger.h"

namespace tessera::detail {

namespace {

using c10::CachingDeviceAllocator::TraceEntry;

void on_trace(const TraceEntry& entry) {
  void* const address = reinterpret_cast<void*>(entry.addr_);
  if (entry.action_ == TraceEntry::ALLOC) count_device_memory(address, static_cast<int64_t>(entry.size_));
  if (entry.action_ == TraceEntry::FREE_REQUESTED) uncount_device_memory(address);
}

void start_tracking() {
  static std::once_flag once;
  std::call_once(once, [] {
    at::globalContext().lazyInitDevice(at::kCUDA);  // before that there is no allocator that would take us
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&on_trace);
    c10::cuda::CUDACachingAllocator::attachOutOfMemoryObserver([](int64_t, size_t bytes, size_t, size_t) { device_refused(static_cast<int64_t>(bytes)); });
  });
}

const bool registered = [] {
  register_device_tracking(at::kCUDA, &start_tracking);
  return true;
}();

}  // namespace
}  // namespace tessera::detail
