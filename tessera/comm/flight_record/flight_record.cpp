#include "tessera/comm/flight_record/flight_record.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <system_error>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/dtype_name.h"
#include "tessera/comm/thread_without_signals.h"

// The kernel keeps the pages of a mapping when their process is killed, so a store is as safe as a write to the file, and makes no system call. A reader may
// come at any moment, also while the process lives: an entry is unpublished, written, and published under its number, and an entry under another number is not
// the reader's. The header's magic comes last, and a new file takes the old one's name only when it has all its room.

namespace tessera::comm {
namespace {

using flight::Entry;
using flight::GroupHeader;
using flight::Header;
using flight::State;

constexpr size_t kPage = 4096;

constexpr size_t up_to(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

int64_t nanoseconds(auto time_since_epoch) { return std::chrono::duration_cast<std::chrono::nanoseconds>(time_since_epoch).count(); }
int64_t now_ns() { return nanoseconds(std::chrono::steady_clock::now().time_since_epoch()); }

[[noreturn]] void fail(int error, const std::filesystem::path& path) { throw std::system_error(error, std::generic_category(), path.string()); }

// Texts end with a zero, also where they were cut.
template <size_t N>
void write_text(std::array<char, N>& to, std::string_view text) {
  const auto size = text.copy(to.data(), N - 1);
  to[size] = '\0';
}

// Of a path that is too long, the end says most.
void write_site(std::array<char, 88>& to, std::string_view site) {
  constexpr std::string_view cut = "..";
  constexpr size_t most = 87;
  if (site.size() <= most) return write_text(to, site);
  std::memcpy(to.data(), cut.data(), cut.size());
  const auto tail = site.substr(site.size() - (most - cut.size()));
  std::memcpy(to.data() + cut.size(), tail.data(), tail.size());
  to[most] = '\0';
}

template <class T>
void publish(T& field, T value) {
  std::atomic_ref(field).store(value, std::memory_order_release);
}

// An empty file with room for `bytes`, mapped. The old file, if any, stays whole for whoever reads it.
void* map_new_file(const std::filesystem::path& path, size_t bytes) {
  const std::filesystem::path draft = path.string() + ".new";
  const int file = open(draft.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (file < 0) fail(errno, path);
  int error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  void* mapping = MAP_FAILED;
  if (error == 0) {
    mapping = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) error = errno;
  }
  close(file);
  if (error == 0 && rename(draft.c_str(), path.c_str()) != 0) {
    error = errno;
    munmap(mapping, bytes);
  }
  if (error != 0) {
    unlink(draft.c_str());
    fail(error, path);
  }
  return mapping;
}

// Whose file it is; nothing where it is no record.
std::optional<int> rank_of(const std::filesystem::path& file) {
  const std::string name = file.filename().string();
  int rank = -1, length = 0;
  const bool record = std::sscanf(name.c_str(), "rank_%d.bin%n", &rank, &length) == 1 && length == static_cast<int>(name.size());
  return record ? std::optional(rank) : std::nullopt;
}

}  // namespace

std::filesystem::path FlightRecord::file_of(const std::filesystem::path& dir, int rank) { return dir / ("rank_" + std::to_string(rank) + ".bin"); }

void FlightRecord::remove_files(const std::filesystem::path& dir, const std::vector<int>& ranks, int world_size) noexcept {
  try {
    std::vector<std::filesystem::path> stale;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(dir, ignored)) {
      const auto rank = rank_of(entry.path());
      if (rank && (*rank >= world_size || std::ranges::find(ranks, *rank) != ranks.end())) stale.push_back(entry.path());
    }
    for (const auto& file : stale) std::filesystem::remove(file, ignored);
  } catch (const std::exception&) {  // no memory for names: the launcher has something to say all the same
  }
}

FlightRecord::FlightRecord(const std::filesystem::path& dir, const Environment& environment, uint64_t capacity) : path_(file_of(dir, environment.rank)) {
  const size_t groups_bytes = up_to((64 << 10) + size_t{128} * environment.size, kPage);
  const size_t entries_offset = kPage + groups_bytes;
  bytes_ = entries_offset + capacity * sizeof(Entry);
  std::error_code error;
  std::filesystem::create_directories(dir, error);
  if (error) fail(error.value(), dir);
  mapping_ = map_new_file(path_, bytes_);
  if (environment.rank == 0) remove_files(dir, {}, environment.size);

  header_ = new (mapping_) Header{};
  header_->version = flight::kVersion;
  header_->entry_bytes = sizeof(Entry);
  header_->capacity = capacity;
  header_->groups_offset = kPage;
  header_->groups_bytes = groups_bytes;
  header_->entries_offset = entries_offset;
  header_->rank = environment.rank;
  header_->world_size = environment.size;
  header_->pid = getpid();
  header_->restart_count = environment.restart_count;
  gethostname(header_->host.data(), header_->host.size() - 1);
  header_->started_wall_ns = nanoseconds(std::chrono::system_clock::now().time_since_epoch());
  header_->started_ns = header_->seen_ns = now_ns();
  entries_ = reinterpret_cast<Entry*>(static_cast<char*>(mapping_) + entries_offset);
  std::atomic_thread_fence(std::memory_order_release);
  header_->magic = flight::kMagic;  // last: a file that has it is whole
  watch_ = start_thread_without_signals([this] { show_signs_of_life(); });
}

FlightRecord::~FlightRecord() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  closed_.notify_all();
  watch_.join();
  const auto now = now_ns();
  publish(header_->seen_ns, now);
  publish(header_->closed_ns, now);
  munmap(mapping_, bytes_);
}

void FlightRecord::show_signs_of_life() {
  std::unique_lock lock(mutex_);
  while (!closed_.wait_for(lock, kSignOfLife, [&] { return closing_; })) {
    publish(header_->seen_ns, now_ns());
    lock.unlock();
    ask_followed();
    lock.lock();
  }
}

void FlightRecord::follow(uint64_t number, std::function<State()> ask) {
  const std::lock_guard lock(followed_mutex_);
  followed_[number] = std::move(ask);
}

void FlightRecord::forget(uint64_t number) {
  const std::lock_guard lock(followed_mutex_);
  followed_.erase(number);
}

void FlightRecord::ask_followed() {
  const std::lock_guard lock(followed_mutex_);
  std::erase_if(followed_, [&](const auto& followed) {
    const auto& [number, ask] = followed;
    try {
      const State state = ask();
      mark(number, state);
      return state == State::Completed || state == State::Failed;
    } catch (...) {  // of a device that is lost
      return false;
    }
  });
}

std::optional<FlightRecord::GroupSlot> FlightRecord::add_group(const GroupInfo& group) {
  const std::lock_guard lock(mutex_);
  const std::vector<int32_t> members(group.ranks.begin(), group.ranks.end());
  const size_t bytes = up_to(sizeof(GroupHeader) + members.size() * sizeof(int32_t) + group.name.size(), 8);
  if (header_->groups_used + bytes > header_->groups_bytes) return std::nullopt;
  char* at = static_cast<char*>(mapping_) + header_->groups_offset + header_->groups_used;
  auto* entry = new (at) GroupHeader{.bytes = static_cast<uint32_t>(bytes),
                                     .rank = group.rank,
                                     .size = group.size,
                                     .members = static_cast<uint32_t>(members.size()),
                                     .name_bytes = static_cast<uint32_t>(group.name.size()),
                                     .reserved = 0,
                                     .collectives = 0};
  at += sizeof(GroupHeader);
  if (!members.empty()) std::memcpy(at, members.data(), members.size() * sizeof(int32_t));
  std::memcpy(at + members.size() * sizeof(int32_t), group.name.data(), group.name.size());
  publish(header_->groups_used, header_->groups_used + bytes);
  return GroupSlot{groups_++, &entry->collectives, group.size};
}

uint64_t FlightRecord::enter(const GroupSlot& group, const Call& call, uint64_t message) {
  const auto shape = call.whole(group.size);
  const uint64_t number = std::atomic_ref(header_->next).fetch_add(1, std::memory_order_relaxed);
  Entry& entry = entries_[number % header_->capacity];
  // Zero while it is written: a reader leaves it out.
  publish(entry.published, uint64_t{0});
  std::atomic_thread_fence(std::memory_order_release);
  entry.sequence = message != 0 ? message : std::atomic_ref(*group.collectives).fetch_add(1, std::memory_order_relaxed) + 1;
  entry.entered_ns = now_ns();
  entry.left_ns = 0;
  entry.bytes = call.bytes(group.size);
  entry.dims = static_cast<uint32_t>(shape.size());
  entry.on_device = call.is_on_device() ? 1 : 0;
  std::copy_n(shape.begin(), std::min(shape.size(), flight::kMostDims), entry.shape.begin());
  entry.state = State::Entered;
  entry.group = group.number;
  entry.peer = call.peer;
  entry.tag = call.tag;
  write_text(entry.op, to_string(call.op));
  const auto reduction = call.named_reduction();
  write_text(entry.dtype, dtype_name(call.named_dtype()));
  write_text(entry.reduction, reduction ? to_string(*reduction) : std::string_view());
  write_site(entry.site, CallSite::current());
  publish(entry.published, number + 1);
  return number;
}

void FlightRecord::set_place(std::string_view place) {
  publish(header_->place[0], '\0');  // a reader that comes now finds none
  std::atomic_thread_fence(std::memory_order_release);
  const auto size = place.substr(0, header_->place.size() - 1).size();
  for (size_t i = size; i > 1; --i) header_->place[i - 1] = place[i - 1];
  header_->place[size] = '\0';
  if (size > 0) publish(header_->place[0], place[0]);
}

void FlightRecord::mark(uint64_t number, State state) {
  Entry& entry = entries_[number % header_->capacity];
  if (std::atomic_ref(entry.published).load(std::memory_order_acquire) != number + 1) return;
  if (state == State::Completed || state == State::Failed) entry.left_ns = now_ns();
  publish(entry.state, state);
}

}  // namespace tessera::comm
