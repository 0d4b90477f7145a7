// Counts what libtorch's CUDA allocator hands out. Operators ask that allocator directly, not the one registered for the device's type, so a wrapper like the
// CPU's would be passed by; but it tells whoever asks of each of its blocks, on the thread that allocates and under the device's lock.

#include <algorithm>
#include <array>
#include <mutex>

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include "tessera/core/devices.h"
#include "tessera/core/error.h"
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

/// The allocator knows shares of the device's memory.
void set_limit(at::Device device, int64_t bytes) {
  at::globalContext().lazyInitDevice(at::kCUDA);
  const auto [free, total] = c10::cuda::CUDACachingAllocator::get()->getMemoryInfo(device.index());
  c10::cuda::CUDACachingAllocator::setMemoryFraction(std::min(1.0, static_cast<double>(bytes) / static_cast<double>(total)), device.index());
}

DeviceFacts facts(at::Device device) {
  DeviceFacts facts;
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device.index()) != cudaSuccess) return facts;
  facts.model = properties.name;
  facts.capability = concat(properties.major, ".", properties.minor);
  const auto [free, total] = c10::cuda::CUDACachingAllocator::get()->getMemoryInfo(device.index());
  facts.memory_bytes = static_cast<int64_t>(total);
  facts.free_bytes = static_cast<int64_t>(free);
  for (int peer = 0; peer < num_devices(at::kCUDA); ++peer) {
    int reaches = 0;
    if (peer != device.index() && cudaDeviceCanAccessPeer(&reaches, device.index(), peer) == cudaSuccess && reaches != 0) facts.peers.push_back(peer);
  }
  return facts;
}

std::string bus_id(at::Device device) {
  std::array<char, 32> id{};
  return cudaDeviceGetPCIBusId(id.data(), static_cast<int>(id.size()), device.index()) == cudaSuccess ? id.data() : "";
}

const bool registered = [] {
  add_device_facts(at::kCUDA, &facts, &bus_id);
  register_device_tracking(at::kCUDA, &start_tracking, &set_limit);
  return true;
}();

}  // namespace
}  // namespace tessera::detail
