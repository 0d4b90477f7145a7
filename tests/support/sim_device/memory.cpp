#include "tests/support/sim_device/memory.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Backtrace.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/memory/ledger.h"
#include "tests/support/sim_device/device.h"
#include "tests/support/sim_device/graph.h"

namespace tessera::sim {

namespace {

constexpr size_t kPage = 4096, kLarge = size_t{1} << 20;
constexpr size_t kRange = size_t{16} << 30;  ///< addresses of one device
constexpr size_t kAll = kRange * kMaxDevices;
constexpr int kUnwritten = 0xff;
thread_local const char* running = "the host";

/// The same memory twice.
struct Ranges {
  uintptr_t device = 0, host = 0;
  Ranges() {
    const int file = memfd_create("simulated device", MFD_CLOEXEC);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(kAll)) == 0, "simulated device: cannot reserve memory");
    const auto map = [&](int protection) {
      void* const begin = mmap(nullptr, kAll, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(begin != MAP_FAILED, "simulated device: cannot reserve addresses");
      return reinterpret_cast<uintptr_t>(begin);
    };
    device = map(PROT_NONE);
    host = map(PROT_READ | PROT_WRITE);
    ::close(file);
  }
};

const Ranges& ranges() {
  static const auto* const both = new Ranges;
  return *both;
}

struct Pool {
  std::recursive_mutex mutex;
  std::map<uintptr_t, Block*> device, pinned;                                 // alive, by begin
  std::map<std::tuple<int, int, int64_t, size_t>, std::vector<Block*>> free;  // by device, stream, pool and room, as CUDA's caching allocator keeps them
  std::vector<Block*> closed;                                                 // of `pinned`
  std::vector<uintptr_t> opened;                                              // pages of device memory
  std::array<uintptr_t, kMaxDevices> next{};
  std::array<int64_t, kMaxDevices> in_use{};
  std::array<Reserved, kMaxDevices> reserved{};
  std::array<int64_t, kMaxDevices> limit{};
  std::map<std::pair<int, size_t>, std::vector<Block*>> given_back;  // by device and room: addresses, but nothing is reserved there
};

Pool& pool() {
  static auto* const one = new Pool;
  return *one;
}

uintptr_t number(const void* address) { return reinterpret_cast<uintptr_t>(address); }

size_t room_for(size_t bytes) {
  if (bytes > kLarge) return (bytes + kLarge - 1) / kLarge * kLarge;
  size_t room = 512;
  while (room < bytes) room *= 2;
  return room;
}

/// What nobody uses goes back to the device; what graphs keep stays.
void give_back_unused(int device) {
  auto& p = pool();
  for (auto& [key, blocks] : p.free) {
    const auto& [of, stream, kept_for, room] = key;
    if (of != device || kept_for != 0) continue;
    p.reserved[static_cast<size_t>(device)].current -= static_cast<int64_t>(room * blocks.size());
    auto& addresses = p.given_back[{device, room}];
    addresses.insert(addresses.end(), blocks.begin(), blocks.end());
    blocks.clear();
  }
}

bool has_room(size_t room, int device) {
  const auto d = static_cast<size_t>(device);
  const auto more = static_cast<int64_t>(room);
  return pool().next[d] + room <= kRange && (pool().limit[d] == 0 || pool().reserved[d].current + more <= pool().limit[d]);
}

/// Tells the tracker of what it has to refuse, as CUDA's caching allocator does.
Block* new_block(size_t room, int device, size_t bytes) {
  if (!has_room(room, device) && Capture::of(device) == nullptr) {
    wait_for_device(device, "out of memory");
    give_back_unused(device);
  }
  if (!has_room(room, device)) {
    tessera::detail::device_refused(static_cast<int64_t>(bytes));
    TORCH_CHECK_WITH(OutOfMemoryError, false, "simulated device: out of memory");
  }
  auto& p = pool();
  auto& reserved = p.reserved[static_cast<size_t>(device)];
  reserved.current += static_cast<int64_t>(room);
  reserved.peak = std::max(reserved.peak, reserved.current);
  if (auto& addresses = p.given_back[{device, room}]; !addresses.empty()) {
    Block* const block = addresses.back();
    addresses.pop_back();
    return block;
  }
  auto& next = p.next[static_cast<size_t>(device)];
  auto* const block = new Block{.begin = ranges().device + static_cast<size_t>(device) * kRange + next, .room = room, .device = device};
  next += room;
  return block;
}

struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::impl::VirtualGuardImpl guard(sim_type());
    const c10::Device device = guard.getDevice();
    if (bytes == 0) return {nullptr, device};
    void* const data = take(bytes, device.index(), stream_number(guard.getStream(device)));
    return {data, data, &give, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(host_of(to), host_of(from), bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    const int device = c10::impl::VirtualGuardImpl(sim_type()).getDevice().index();  // the others are other ranks'
    wait_for_device(device, "emptyCache");
    const std::lock_guard lock(pool().mutex);
    give_back_unused(device);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override { record_stream(pointer.get(), stream_number(stream)); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = bytes_in_use(device);
    const Reserved of = tessera::sim::reserved(device);
    stats.requested_bytes[0].current = stats.allocated_bytes[0].current;
    stats.reserved_bytes[0].current = of.current;
    stats.reserved_bytes[0].peak = of.peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

/// Pages of its own for each tensor, so that each can be closed alone.
struct PinnedAllocator final : c10::Allocator {
  static void free(void* data) {
    auto& p = pool();
    const std::lock_guard lock(p.mutex);
    const auto found = p.pinned.find(number(data));
    Block* const block = found->second;
    p.pinned.erase(found);
    std::erase(p.closed, block);
    munmap(data, block->room);
    delete block;
  }
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::kCPU);
    if (bytes == 0) return {nullptr, cpu};
    const size_t room = (bytes + kPage - 1) / kPage * kPage;
    void* const data = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, data != MAP_FAILED, "simulated device: out of pinned memory");
    auto& p = pool();
    const std::lock_guard lock(p.mutex);
    p.pinned[number(data)] = new Block{.begin = number(data), .bytes = bytes, .room = room};
    return {data, data, &free, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct sigaction before;

/// Reports the access of the host at `address`, and lets it go on; false where the address is none of ours.
bool report_access(const void* address, const char* verb) {
  auto& p = pool();
  const std::lock_guard lock(p.mutex);
  if (is_device(address)) {
    std::string where = "no tensor";
    with_block(address, [&](const Block& block) { where = "a tensor of " + std::to_string(block.bytes) + " bytes on device " + std::to_string(block.device); });
    HappensBefore::get().report({.kind = Report::Kind::HostAccess,
                                 .text = std::string(running) + " " + verb + " device memory on the host (" + where + "), at\n" + c10::get_backtrace(3, 14),
                                 .first = running,
                                 .second = ""});
    const uintptr_t page = number(address) / kPage * kPage;
    mprotect(reinterpret_cast<void*>(page), kPage, PROT_READ | PROT_WRITE);
    p.opened.push_back(page);
    return true;
  }
  bool known = false;
  with_block(address, [&](Block& block) {
    if (!(known = block.closed)) return;
    if (const Access* const use = HappensBefore::get().pending(block.history)) {
      HappensBefore::get().report({.kind = Report::Kind::HostRace,
                                   .text = std::string("the host ") + verb + " pinned memory while " + use->by + (use->writes ? " writes" : " reads") +
                                           " it on " + HappensBefore::get().name(use->stream) + ": wait for the copy first; at\n" + c10::get_backtrace(3, 14),
                                   .first = use->by,
                                   .second = "the host"});
    }
    open(block);
  });
  return known;
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const bool writes = (static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_ERR] & 2) != 0;
  if (!report_access(info->si_addr, writes ? "writes" : "reads")) sigaction(signal, &before, nullptr);  // and faults again
}

}  // namespace

bool is_device(const void* address) { return number(address) >= ranges().device && number(address) < ranges().device + kAll; }
bool is_pinned(const void* address) {
  return !is_device(address) && with_block(address, [](const Block&) {});
}
void* host_of(const void* address) { return address ? reinterpret_cast<void*>(number(address) - ranges().device + ranges().host) : nullptr; }
int device_of(const void* address) { return static_cast<int>((number(address) - ranges().device) / kRange); }

bool with_block(const void* address, const std::function<void(Block&)>& use) {
  auto& p = pool();
  const std::lock_guard lock(p.mutex);
  auto& alive = is_device(address) ? p.device : p.pinned;
  const auto after = alive.upper_bound(number(address));
  if (after == alive.begin()) return false;
  Block& block = *std::prev(after)->second;
  if (number(address) >= block.begin + block.room) return false;
  use(block);
  return true;
}

void* take(size_t bytes, int device, int stream) {
  auto& p = pool();
  const std::lock_guard lock(p.mutex);
  const size_t room = room_for(bytes);
  const Capture* const capture = Capture::of(device);
  const int64_t kept_for = capture ? capture->pool() : 0;
  auto& free = p.free[{device, stream, kept_for, room}];
  Block* const block = free.empty() ? new_block(room, device, bytes) : free.back();
  if (!free.empty()) free.pop_back();
  block->bytes = bytes;
  block->stream = stream;
  block->pool = kept_for;
  block->recorded.clear();
  p.device[block->begin] = block;
  p.in_use[static_cast<size_t>(device)] += static_cast<int64_t>(bytes);
  void* const data = reinterpret_cast<void*>(block->begin);
  std::memset(host_of(data), kUnwritten, room);
  HappensBefore::get().allocated(block->history, block->begin, block->begin + bytes, stream, running);
  tessera::detail::count_device_memory(data, static_cast<int64_t>(bytes));
  return data;
}

namespace {

/// What lies between the end of a block and that of its room is nobody's, and has been filled by take(). Of a graph's pool it may be an earlier block's, which
/// a replay writes again.
void report_overrun(const Block& block) {
  if (block.pool != 0) return;
  const auto* const begin = static_cast<const unsigned char*>(host_of(reinterpret_cast<const void*>(block.begin)));
  const auto* const written = std::find_if(begin + block.bytes, begin + block.room, [](unsigned char byte) { return byte != kUnwritten; });
  if (written == begin + block.room) return;
  HappensBefore::get().report({.kind = Report::Kind::Overrun,
                               .text = tessera::detail::concat("simulated device: something wrote behind the end of ", block.bytes, " bytes of device memory, ",
                                                               written - begin - static_cast<std::ptrdiff_t>(block.bytes), " bytes further on")});
}

}  // namespace

void give(void* data) {
  if (!data) return;
  tessera::detail::uncount_device_memory(data);
  auto& p = pool();
  const std::lock_guard lock(p.mutex);
  const auto found = p.device.find(number(data));
  TORCH_INTERNAL_ASSERT(found != p.device.end());
  Block* const block = found->second;
  p.device.erase(found);
  p.in_use[static_cast<size_t>(block->device)] -= static_cast<int64_t>(block->bytes);
  report_overrun(*block);
  HappensBefore::get().freed(block->history, block->stream, block->recorded);
  p.free[{block->device, block->stream, block->pool, block->room}].push_back(block);
}

void record_stream(const void* data, int stream) {
  with_block(data, [&](Block& block) { block.recorded.push_back(stream); });
}

int64_t bytes_in_use(int device) {
  const std::lock_guard lock(pool().mutex);
  return pool().in_use[static_cast<size_t>(device)];
}

Reserved reserved(int device) {
  const std::lock_guard lock(pool().mutex);
  return pool().reserved[static_cast<size_t>(device)];
}

void limit_reserved(int device, int64_t bytes) {
  const std::lock_guard lock(pool().mutex);
  pool().limit[static_cast<size_t>(device)] = bytes;
}

void lift_limits() {
  const std::lock_guard lock(pool().mutex);
  pool().limit.fill(0);
}

void forget_test() {
  lift_limits();
  HappensBefore::get().host_waits_everything();
  reuse_streams();
  after_host_sync();
  HappensBefore::get().take_reports();
  HappensBefore::get().take_host_syncs();
}

void each_block(int device, const std::function<void(const Block&)>& use) {
  const std::lock_guard lock(pool().mutex);
  for (const auto& [begin, block] : pool().device) {
    if (block->device == device) use(*block);
  }
}

void spoil(int device, int64_t kept_for) {
  auto& p = pool();
  const std::lock_guard lock(p.mutex);
  const auto fill = [](const Block& block) { std::memset(host_of(reinterpret_cast<const void*>(block.begin)), 0xff, block.bytes); };
  for (const auto& [begin, block] : p.device) {
    if (block->device == device && block->pool == kept_for) fill(*block);
  }
  for (const auto& [key, blocks] : p.free) {
    if (std::get<0>(key) != device || std::get<2>(key) != kept_for) continue;
    for (const Block* const block : blocks) fill(*block);
  }
}

c10::Allocator* device_allocator() {
  static auto* const one = new DeviceAllocator;
  return one;
}

c10::Allocator* pinned_allocator() {
  static auto* const one = new PinnedAllocator;
  return one;
}

void close_while_pending(Block& block) {
  const Access* const use = HappensBefore::get().pending(block.history);
  if (!use) return;
  mprotect(reinterpret_cast<void*>(block.begin), block.room, use->writes ? PROT_NONE : PROT_READ);
  if (!block.closed) pool().closed.push_back(&block);
  block.closed = true;
}

void open(Block& block) {
  if (!block.closed) return;
  mprotect(reinterpret_cast<void*>(block.begin), block.room, PROT_READ | PROT_WRITE);
  block.closed = false;
  std::erase(pool().closed, &block);
}

void after_host_sync() {
  auto& p = pool();
  const std::lock_guard lock(p.mutex);
  for (Block* const block : std::vector<Block*>(p.closed)) {
    open(*block);
    close_while_pending(*block);
  }
}

void close_opened_pages() {
  auto& p = pool();
  const std::lock_guard lock(p.mutex);
  for (const uintptr_t page : std::exchange(p.opened, {})) mprotect(reinterpret_cast<void*>(page), kPage, PROT_NONE);
}

void install_fault_handler() {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, &before);
}

Running::Running(const char* op) : before_(std::exchange(running, op)) {}
Running::~Running() { running = before_; }
const char* Running::now() { return running; }

}  // namespace tessera::sim
