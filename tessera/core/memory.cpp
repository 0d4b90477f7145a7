#include "tessera/core/memory.h"

#include <array>
#include <atomic>
#include <fstream>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "tessera/core/error.h"
#include "tessera/core/host_cache.h"

namespace tessera {
namespace detail {

/// What a tracker counts. Shared by the tracker and by every storage that was counted on it, so that either may die first.
struct MemoryLedger : std::enable_shared_from_this<MemoryLedger> {
  void add(MemoryCategory category, int64_t bytes) {
    const std::lock_guard lock(mutex);
    by_category[static_cast<int>(category)] += bytes;
    total += bytes;
    if (bytes > 0) ++allocations;
    if (total > peak) {
      peak = total;
      peak_by_category = by_category;
    }
  }

  void move(MemoryCategory from, MemoryCategory to, int64_t bytes) {
    const std::lock_guard lock(mutex);
    by_category[static_cast<int>(from)] -= bytes;
    by_category[static_cast<int>(to)] += bytes;
  }

  mutable std::mutex mutex;
  int64_t total = 0, peak = 0, allocations = 0;
  MemoryByCategory by_category{}, peak_by_category{};
};

}  // namespace detail

namespace {

using detail::MemoryLedger;

// A raw pointer, not an owner: it is read by every allocation of the process, and whoever sets it keeps the ledger alive.
thread_local MemoryLedger* active_ledger = nullptr;
thread_local MemoryCategory active_category = MemoryCategory::Other;

/// What is known of an allocation that is counted, or lies in a cached block, or both.
struct Counted {
  std::shared_ptr<MemoryLedger> ledger;  ///< null where it is not counted
  MemoryCategory category = MemoryCategory::Other;
  int64_t bytes = 0;
  const void* call_site = nullptr;      ///< of the CPU allocator's allocate()
  int size_class = detail::kNotCached;  ///< of the cached block

  void take_off() const {
    if (ledger) ledger->add(category, -bytes);
  }
};

/// Such allocations of the CPU by address. A table beside them, rather than a context in their DataPtr: oneDNN asks for its scratch space by raw_allocate()
/// and gives it back by raw_deallocate(), which work only where the context is the data pointer itself.
class CountedTable {
 public:
  void insert(void* data, Counted counted) {
    Shard& shard = shard_of(data);
    const std::lock_guard lock(shard.mutex);
    shard.counted.insert_or_assign(data, std::move(counted));
    alive_.fetch_add(1, std::memory_order_relaxed);
  }
  /// Removes what is known of the allocation and takes it off its ledger; nothing where nothing is known.
  std::optional<Counted> erase(void* data) {
    if (alive_.load(std::memory_order_relaxed) == 0) return std::nullopt;
    Shard& shard = shard_of(data);
    std::unique_lock lock(shard.mutex);
    auto node = shard.counted.extract(data);
    lock.unlock();
    if (node.empty()) return std::nullopt;
    alive_.fetch_sub(1, std::memory_order_relaxed);
    node.mapped().take_off();
    return std::move(node.mapped());
  }
  /// change(Counted&) where something is known of the allocation.
  template <class F>
  void visit(void* data, F&& change) {
    Shard& shard = shard_of(data);
    const std::lock_guard lock(shard.mutex);
    if (const auto found = shard.counted.find(data); found != shard.counted.end()) change(found->second);
  }

 private:
  struct Shard {
    std::mutex mutex;
    std::unordered_map<void*, Counted> counted;
  };
  Shard& shard_of(void* data) { return shards_[(reinterpret_cast<uintptr_t>(data) >> 6) % shards_.size()]; }
  std::array<Shard, 16> shards_;
  std::atomic<int64_t> alive_{0};
};

/// Never destroyed: storages may be freed after every static object.
CountedTable& counted_table() {
  static auto* const table = new CountedTable;
  return *table;
}

c10::DeleterFnPtr cpu_deleter = nullptr;  ///< of libtorch's own CPU allocator

void give_back(void* data, const std::optional<Counted>& counted) {
  if (counted && counted->size_class != detail::kNotCached) {
    detail::host_cache_give(data, counted->size_class);
  } else {
    cpu_deleter(data);
  }
}

void free_cpu(void* data) { give_back(data, counted_table().erase(data)); }

void free_meta(void* context) {
  const std::unique_ptr<Counted> counted(static_cast<Counted*>(context));
  counted->take_off();
}

/// Where oneDNN asks for scratch space. Its size depends on the machine's instruction set, so no dry run could know it, and it is no storage. But
/// raw_allocate() calls the same allocate() as a storage does; only at raw_deallocate() do the two differ. So the first scratch space given back teaches where
/// such calls come from (there is one place, in libtorch's glue to oneDNN), and from then on they are not counted. learn_scratch_site() makes sure that this
/// happens before anything is measured.
std::atomic<const void*> scratch_site{nullptr};

void free_raw(void* data) {
  const auto counted = counted_table().erase(data);
  if (counted && counted->ledger) scratch_site.store(counted->call_site, std::memory_order_relaxed);
  give_back(data, counted);
}

/// Passes everything on to the allocator it wraps, and counts where the thread asks for it.
class CountingAllocator : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator& wrapped) : wrapped_(wrapped) {}

  bool is_simple_data_ptr(const c10::DataPtr& pointer) const override { return wrapped_.is_simple_data_ptr(pointer); }
  void copy_data(void* to, const void* from, size_t bytes) const override { wrapped_.copy_data(to, from, bytes); }

 protected:
  static bool is_counting(size_t bytes) { return active_ledger != nullptr && bytes > 0; }
  static Counted count(size_t bytes) {
    Counted counted{.ledger = active_ledger->shared_from_this(), .category = active_category, .bytes = static_cast<int64_t>(bytes)};
    counted.ledger->add(counted.category, counted.bytes);
    return counted;
  }
  c10::Allocator& wrapped_;
};

class CpuAllocator final : public CountingAllocator {
 public:
  using CountingAllocator::CountingAllocator;
  c10::DeleterFnPtr raw_deleter() const override { return &free_raw; }

  __attribute__((noinline)) c10::DataPtr allocate(size_t bytes) override {
    const void* const call_site = __builtin_return_address(0);
    const bool counting = is_counting(bytes) && call_site != scratch_site.load(std::memory_order_relaxed);
    int size_class = detail::host_cache_class(bytes);
    if (!counting && size_class == detail::kNotCached) [[likely]]
      return wrapped_.allocate(bytes);
    void* data = size_class == detail::kNotCached ? nullptr : detail::host_cache_take(size_class);
    if (data == nullptr) {
      size_class = detail::kNotCached;
      data = wrapped_.allocate(bytes).release_context();
    }
    Counted counted = counting ? count(bytes) : Counted{};
    counted.call_site = call_site;
    counted.size_class = size_class;
    counted_table().insert(data, std::move(counted));
    return {data, data, &free_cpu, c10::Device(c10::kCPU)};
  }
};

/// Meta storages have no address, so what is known of them is their context.
class MetaAllocator final : public CountingAllocator {
 public:
  using CountingAllocator::CountingAllocator;

  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr inner = wrapped_.allocate(bytes);
    if (!is_counting(bytes)) return inner;
    return {nullptr, new Counted(count(bytes)), &free_meta, inner.device()};
  }
};

/// One small product in bf16, which oneDNN serves where the machine can: see scratch_site.
void learn_scratch_site() {
  static std::once_flag once;
  std::call_once(once, [] {
    const c10::impl::ExcludeDispatchKeyGuard real_tensors(c10::DispatchKey::DeferredInit);
    const at::NoGradGuard no_grad;
    const auto ledger = std::make_shared<MemoryLedger>();
    MemoryLedger* const before = std::exchange(active_ledger, ledger.get());
    const at::Tensor ones = at::ones({32, 32}, at::kBFloat16);
    at::mm(ones, ones);
    active_ledger = before;
  });
}

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

int64_t status_bytes(std::string_view field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(field)) return std::stoll(line.substr(field.size())) * 1024;  // "VmHWM:   123 kB"
  }
  return 0;
}

}  // namespace

std::string_view to_string(MemoryCategory category) {
  static constexpr std::array<std::string_view, num_memory_categories> names = {"params", "gradients", "optimizer", "activations", "outputs", "comm", "other"};
  return names[static_cast<int>(category)];
}

MemoryTracker::MemoryTracker() : ledger_(std::make_shared<MemoryLedger>()) {}

int64_t MemoryTracker::current() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->total;
}

int64_t MemoryTracker::peak() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->peak;
}

int64_t MemoryTracker::num_allocations() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->allocations;
}

MemoryByCategory MemoryTracker::current_by_category() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->by_category;
}

MemoryByCategory MemoryTracker::peak_by_category() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->peak_by_category;
}

int64_t MemoryTracker::current(MemoryCategory category) const { return current_by_category()[static_cast<int>(category)]; }
int64_t MemoryTracker::at_peak(MemoryCategory category) const { return peak_by_category()[static_cast<int>(category)]; }

void MemoryTracker::reset_peak() {
  const std::lock_guard lock(ledger_->mutex);
  ledger_->peak = ledger_->total;
  ledger_->peak_by_category = ledger_->by_category;
}

void MemoryTracker::retag(const at::Tensor& tensor, MemoryCategory category) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  const c10::DataPtr& pointer = tensor.storage().data_ptr();
  const auto move = [&](Counted& counted) {
    if (counted.ledger != ledger_) return;
    ledger_->move(counted.category, category, counted.bytes);
    counted.category = category;
  };
  if (pointer.get_deleter() == &free_meta) {
    move(*static_cast<Counted*>(pointer.get_context()));
  } else {
    counted_table().visit(pointer.get_context(), move);
  }
}

TrackMemory::TrackMemory(MemoryTracker& tracker) : ledger_(tracker.ledger_) {
  learn_scratch_site();
  before_ = std::exchange(active_ledger, ledger_.get());
}
TrackMemory::~TrackMemory() { active_ledger = before_; }

MemoryScope::MemoryScope(MemoryCategory category) : before_(std::exchange(active_category, category)) {}
MemoryScope::~MemoryScope() { active_category = before_; }

MemoryContext MemoryContext::current() {
  MemoryContext context;
  if (active_ledger) context.ledger_ = active_ledger->shared_from_this();
  context.category_ = active_category;
  return context;
}

MemoryContext::Guard::Guard(const MemoryContext& context)
    : ledger_(context.ledger_),
      ledger_before_(std::exchange(active_ledger, ledger_.get())),
      category_before_(std::exchange(active_category, context.category_)) {}

MemoryContext::Guard::~Guard() {
  active_ledger = ledger_before_;
  active_category = category_before_;
}

void count_memory(void* context, int64_t bytes) {
  if (active_ledger == nullptr || bytes == 0) return;
  Counted counted{.ledger = active_ledger->shared_from_this(), .category = active_category, .bytes = bytes};
  counted.ledger->add(counted.category, bytes);
  counted_table().insert(context, std::move(counted));
}

void uncount_memory(void* context) { counted_table().erase(context); }

int64_t resident_bytes() { return status_bytes("VmRSS:"); }
int64_t peak_resident_bytes() { return status_bytes("VmHWM:"); }

}  // namespace tessera
