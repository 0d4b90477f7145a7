#include <array>
#include <atomic>
#include <functional>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "tessera/core/devices.h"
#include "tessera/core/error.h"
#include "tessera/memory/host_cache.h"
#include "tessera/memory/ledger.h"

// Every storage is made by libtorch's allocator for its device, so one around that misses nothing and asks nothing of whoever makes tensors; a thread that does
// not count pays a branch. Memory is freed on any thread, and after its tracker is gone: what was counted is found by its address, with a ledger that it keeps
// alive. Meta storages have no address; there it is their context.

namespace tessera::detail {

constinit thread_local MemoryThread memory_thread;

namespace {

/// What is known of an allocation that is counted, or lies in a cached block, or both.
struct Known {
  CountedMemory counted{};
  const void* call_site = nullptr;  ///< of the CPU allocator's allocate()
  int size_class = kNotCached;      ///< of the cached block
};

/// Such allocations by address. A table beside them, rather than a context in their DataPtr: oneDNN asks for its scratch space by raw_allocate()
/// and gives it back by raw_deallocate(), which work only where the context is the data pointer itself.
class KnownTable {
 public:
  void insert(void* data, Known known) {
    Shard& shard = shard_of(data);
    const std::lock_guard lock(shard.mutex);
    shard.known.insert_or_assign(data, std::move(known));
    alive_.fetch_add(1, std::memory_order_relaxed);
  }
  /// Removes what is known of the allocation and takes it off its ledger; nothing where nothing is known.
  std::optional<Known> erase(void* data) {
    if (alive_.load(std::memory_order_relaxed) == 0) return std::nullopt;
    Shard& shard = shard_of(data);
    std::unique_lock lock(shard.mutex);
    auto node = shard.known.extract(data);
    lock.unlock();
    if (node.empty()) return std::nullopt;
    alive_.fetch_sub(1, std::memory_order_relaxed);
    node.mapped().counted.take_off();
    return std::move(node.mapped());
  }
  /// change(CountedMemory&) where something is known of the allocation.
  void visit(void* data, const std::function<void(CountedMemory&)>& change) {
    Shard& shard = shard_of(data);
    const std::lock_guard lock(shard.mutex);
    if (const auto found = shard.known.find(data); found != shard.known.end()) change(found->second.counted);
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::unordered_map<void*, Known> known;
  };
  Shard& shard_of(void* data) { return shards_[(reinterpret_cast<uintptr_t>(data) >> 6) % shards_.size()]; }
  std::array<Shard, 16> shards_;
  std::atomic<int64_t> alive_{0};
};

/// Never destroyed: storages may be freed after every static object.
KnownTable& known_table() {
  static auto* const table = new KnownTable;
  return *table;
}

/// For whom this thread takes the CPU's memory: without a ledger for nobody. A rank that computes on an accelerator does so in autograd's threads, too.
MemoryThread cpu_thread() {
  MemoryThread thread = memory_thread.ledger ? memory_thread : device_thread();
  if (thread.ledger == nullptr) return thread;
  if (thread.ledger->beside_device) {
    thread.on_host = true;
  } else if (thread.ledger != memory_thread.ledger) {
    thread.ledger = nullptr;
  }
  return thread;
}

c10::DeleterFnPtr cpu_deleter = nullptr;  ///< of libtorch's own CPU allocator

void give_back(void* data, const std::optional<Known>& known) {
  if (known && known->size_class != kNotCached) {
    host_cache_give(data, known->size_class);
  } else {
    cpu_deleter(data);
  }
}

void free_cpu(void* data) { give_back(data, known_table().erase(data)); }

void free_meta(void* context) {
  const std::unique_ptr<CountedMemory> counted(static_cast<CountedMemory*>(context));
  counted->take_off();
}

/// Where oneDNN asks for scratch space. Its size depends on the machine's instruction set, so no dry run could know it, and it is no storage. But
/// raw_allocate() calls the same allocate() as a storage does; only at raw_deallocate() do the two differ. So the first scratch space given back teaches where
/// such calls come from (there is one place, in libtorch's glue to oneDNN), and from then on they are not counted. learn_scratch_site() makes sure that this
/// happens before anything is measured.
std::atomic<const void*> scratch_site{nullptr};

void free_raw(void* data) {
  const auto known = known_table().erase(data);
  if (known && known->counted.ledger) scratch_site.store(known->call_site, std::memory_order_relaxed);
  give_back(data, known);
}

/// Passes everything on to the allocator it wraps, and counts where the thread asks for it.
class CountingAllocator : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator& wrapped) : wrapped_(wrapped) {}

  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override { return wrapped_.is_simple_data_ptr(pointer); }
  void copy_data(void* to, const void* from, size_t bytes) const override { wrapped_.copy_data(to, from, bytes); }

 protected:
  static bool is_counting(size_t bytes) { return memory_thread.ledger != nullptr && bytes > 0; }
  c10::Allocator& wrapped_;
};

class CpuAllocator final : public CountingAllocator {
 public:
  using CountingAllocator::CountingAllocator;
  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }

  __attribute__((noinline)) c10::DataPtr allocate(size_t bytes) override {
    const void* const call_site = __builtin_return_address(0);
    const MemoryThread thread = cpu_thread();
    const bool counting = thread.ledger != nullptr && bytes > 0 && call_site != scratch_site.load(std::memory_order_relaxed);
    const int size_class = host_cache_class(bytes);
    if (!counting && size_class == kNotCached) [[likely]]
      return wrapped_.allocate(bytes);
    Known known{.counted = counting ? CountedMemory::count(thread, static_cast<int64_t>(bytes)) : CountedMemory{}, .call_site = call_site};
    void* const data = take(bytes, size_class, known);
    known_table().insert(data, std::move(known));
    return {data, data, &free_cpu, c10::Device(c10::kCPU)};
  }

 private:
  /// From the cache or the allocator; where neither has any, what was counted is taken off again and the refusal is like that of a device.
  void* take(size_t bytes, int size_class, Known& known) {
    if (size_class != kNotCached) {
      if (void* const block = host_cache_take(size_class)) {
        known.size_class = size_class;
        return block;
      }
    }
    try {
      return wrapped_.allocate(bytes).release_context();
    } catch (const c10::Error& error) {
      known.counted.take_off();
      device_refused(static_cast<int64_t>(bytes));
      TORCH_CHECK_WITH(OutOfMemoryError, false, error.what_without_backtrace());
    }
  }
};

/// Meta storages have no address, so what is known of them is their context.
class MetaAllocator final : public CountingAllocator {
 public:
  using CountingAllocator::CountingAllocator;

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr inner = wrapped_.allocate(bytes);
    if (!is_counting(bytes)) return inner;
    return {nullptr, new CountedMemory(CountedMemory::count(memory_thread, static_cast<int64_t>(bytes))), &free_meta, inner.device()};
  }
};

/// Once, when the library loads; never undone, because storages keep a pointer to their allocator.
const bool installed = [] {
  constexpr uint8_t highest = 255;  // a lower priority than that of the allocator there is ignored
  c10::Allocator* const cpu = c10::GetAllocator(c10::kCPU);
  cpu_deleter = cpu->raw_deleter();
  invariant(cpu_deleter != nullptr, "libtorch's CPU allocator has no raw deleter");
  c10::SetAllocator(c10::kCPU, new CpuAllocator(*cpu), highest);
  c10::SetAllocator(c10::kMeta, new MetaAllocator(*c10::GetAllocator(c10::kMeta)), highest);
  return true;
}();

/// How devices that are neither are made to report, and to hold a limit.
struct DeviceTracking {
  void (*start)() = nullptr;
  void (*limit)(at::Device device, int64_t bytes) = nullptr;
};
std::array<DeviceTracking, c10::COMPILE_TIME_MAX_DEVICE_TYPES>& device_tracking() {
  static std::array<DeviceTracking, c10::COMPILE_TIME_MAX_DEVICE_TYPES> types{};
  return types;
}

}  // namespace

void visit_counted(const at::Tensor& tensor, const std::function<void(CountedMemory&)>& change) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  // Without libtorch's checks: memory that a shard has given back complains when it is read, and here it is only looked up.
  const c10::DataPtr& pointer = tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks();
  if (pointer.get_deleter() == &free_meta) {
    change(*static_cast<CountedMemory*>(pointer.get_context()));
  } else {
    known_table().visit(pointer.get_context(), change);
  }
}

void learn_scratch_site() {
  static std::once_flag once;
  std::call_once(once, [] {
    const c10::impl::ExcludeDispatchKeyGuard real_tensors(c10::DispatchKey::DeferredInit);
    const at::NoGradGuard no_grad;
    const auto ledger = std::make_shared<MemoryLedger>();
    MemoryLedger* const before = std::exchange(memory_thread.ledger, ledger.get());
    const at::Tensor ones = at::ones({32, 32}, at::kBFloat16);
    at::mm(ones, ones);
    memory_thread.ledger = before;
  });
}

void count_device_memory(void* address, int64_t bytes) noexcept {
  MemoryThread thread = device_thread();
  if (thread.ledger == nullptr || bytes == 0) return;
  thread.on_host = false;
  known_table().insert(address, {.counted = CountedMemory::count(thread, bytes, /*within_limit=*/false)});
}

void uncount_device_memory(void* address) noexcept { known_table().erase(address); }

void device_refused(int64_t bytes) noexcept {
  const MemoryThread thread = device_thread();
  if (thread.ledger == nullptr) return;
  const std::lock_guard lock(thread.ledger->mutex);
  thread.ledger->refuse(thread.category, bytes, thread.label, /*by_limit=*/false);
}

void register_device_tracking(at::DeviceType type, void (*start)(), void (*limit)(at::Device device, int64_t bytes)) {
  device_tracking()[static_cast<size_t>(type)] = {start, limit};
  add_supported_device(type);
}

}  // namespace tessera::detail

namespace tessera {

void count_memory(void* context, int64_t bytes, at::Device device) {
  if (!device.is_cpu()) {
    detail::count_device_memory(context, bytes);
    return;
  }
  const detail::MemoryThread thread = detail::cpu_thread();
  if (thread.ledger != nullptr && bytes != 0) detail::known_table().insert(context, {.counted = detail::CountedMemory::count(thread, bytes)});
}

void uncount_memory(void* context) { detail::known_table().erase(context); }

void track_device(at::DeviceType type) {
  if (type == at::kCPU || type == at::kMeta) return;
  const auto start = detail::device_tracking()[static_cast<size_t>(type)].start;
  require(start != nullptr, "memory on ", c10::DeviceTypeName(type, /*lower_case=*/true),
          ": this build of tessera cannot count it; build with that device's kernels (TESSERA_CUDA=ON), or run on a device that it has");
  start();
}

void limit_device(at::Device device, int64_t bytes) {
  if (device.is_cpu() || device.is_meta()) return;
  const auto limit = detail::device_tracking()[static_cast<size_t>(device.type())].limit;
  require(limit != nullptr, "run.memory_limit_bytes = ", bytes, ": this build of tessera cannot limit memory on ",
          c10::DeviceTypeName(device.type(), /*lower_case=*/true), "; leave it out");
  limit(device, bytes);
}

ReservedMemory reserved_memory(at::Device device) {
  if (device.is_cpu() || device.is_meta()) return {};
  const auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !device.has_index()) return {};
  constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto bytes = const_cast<c10::DeviceAllocator*>(allocator)->getDeviceStats(device.index()).reserved_bytes[kAll];
  return {.current = bytes.current, .peak = bytes.peak};
}

}  // namespace tessera
