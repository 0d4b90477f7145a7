#include "tessera/memory/ledger.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <c10/util/Exception.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "tessera/core/format.h"

// A peak is a moment, and what it was made of must be kept when it happens: categories are copied at every new peak. The blocks would be too many to copy. But
// numbers grow with every allocation, so a block was alive at the peak if its number is not larger than the last one then and it still lives, or died since:
// only the largest of those that die are kept.

namespace tessera::detail {

namespace {

size_t at(MemoryCategory category) { return static_cast<size_t>(category); }

/// The largest come first; among equals the one that was counted first.
void keep_largest(std::vector<MemoryBlock>& blocks, size_t n) {
  std::stable_sort(blocks.begin(), blocks.end(), [](const MemoryBlock& a, const MemoryBlock& b) { return a.bytes > b.bytes; });
  if (blocks.size() > n) blocks.resize(n);
}

}  // namespace

MemoryTimeline::MemoryTimeline(const MemoryByCategory& before, size_t most_events) : most_events_(std::max<size_t>(most_events, 2)) {
  history_.before = before;
}

int MemoryTimeline::position_of(std::string_view module) {
  const auto found = positions_.find(module);
  if (found != positions_.end()) return found->second;
  history_.modules.emplace_back(module);
  return positions_.emplace(module, static_cast<int>(history_.modules.size()) - 1).first->second;
}

void MemoryTimeline::add(MemoryCategory category, int64_t bytes, std::string_view module, const MemoryByCategory& after) {
  MemoryEvent event{.index = history_.num_events++, .seconds = now(), .category = category, .bytes = bytes, .module = position_of(module), .after = after};
  if (!group_ || total_of(event.after) > total_of(group_->after)) group_ = event;
  if (++in_group_ == history_.events_per_point) keep_group();
}

void MemoryTimeline::keep_group() {
  history_.events.push_back(*std::exchange(group_, std::nullopt));
  in_group_ = 0;
  if (history_.events.size() < most_events_) return;
  history_.events = thin(history_.events, 2);
  history_.events_per_point *= 2;
}

void MemoryTimeline::mark(std::string_view phase) { history_.marks.push_back({.name = std::string(phase), .index = history_.num_events, .seconds = now()}); }

MemoryHistory MemoryTimeline::take() && {
  if (group_) history_.events.push_back(*group_);
  history_.seconds = now();
  return std::move(history_);
}

void MemoryDetails::released(int64_t id) {
  const auto found = alive_.find(id);
  if (found == alive_.end()) return;
  if (id <= peak_id_) {
    died_.push_back(std::move(found->second));
    keep_largest(died_, kLargest);
  }
  alive_.erase(found);
}

void MemoryDetails::peak_is_now(int64_t last_id) {
  peak_id_ = last_id;
  died_.clear();
}

MemoryBlock* MemoryDetails::find(int64_t id) {
  const auto found = alive_.find(id);
  return found == alive_.end() ? nullptr : &found->second;
}

std::vector<MemoryBlock> MemoryDetails::largest(int64_t last_id, std::vector<MemoryBlock> candidates) const {
  std::vector<std::pair<int64_t, const MemoryBlock*>> order;
  for (const auto& [id, block] : alive_) {
    if (id <= last_id) order.emplace_back(id, &block);
  }
  const auto before = [](const auto& a, const auto& b) { return a.second->bytes != b.second->bytes ? a.second->bytes > b.second->bytes : a.first < b.first; };
  const size_t n = std::min(order.size(), kLargest);
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(n), order.end(), before);
  for (size_t i = 0; i < n; ++i) candidates.push_back(*order[i].second);
  keep_largest(candidates, kLargest);
  return candidates;
}

std::vector<MemoryBlock> MemoryDetails::largest_at_peak() const { return largest(peak_id_, died_); }
std::vector<MemoryBlock> MemoryDetails::largest_alive() const { return largest(INT64_MAX, {}); }

int64_t MemoryLedger::allocate(const MemoryThread& thread, int64_t bytes, bool within_limit) {
  const MemoryCategory category = thread.category;
  const std::string_view label = thread.label;
  const std::lock_guard lock(mutex);
  if (thread.on_host) {
    host[at(category)] += bytes;
    if (total_of(host) > total_of(host_peak)) host_peak = host;
    tell(++allocations, category, bytes, /*on_host=*/true);
    return allocations;
  }
  if (within_limit && limit > 0 && total + bytes > limit) [[unlikely]] {
    refuse(category, bytes, label, /*by_limit=*/true);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "out of memory: ", format_bytes(bytes), " more would pass the limit of ", format_bytes(limit), " with ",
                     format_bytes(total), " in use");
  }
  by_category[at(category)] += bytes;
  total += bytes;
  const int64_t id = ++allocations;
  if (details) [[unlikely]]
    details->allocated(id, {.bytes = bytes, .category = category, .module = std::string(label), .name = {}, .shape = {}});
  if (total > peak) {
    peak = total;
    peak_by_category = by_category;
    if (details) details->peak_is_now(id);
  }
  if (timeline) [[unlikely]]
    timeline->add(category, bytes, label, by_category);
  tell(id, category, bytes, /*on_host=*/false);
  return id;
}

void MemoryLedger::release(const CountedMemory& counted) {
  const int64_t bytes = counted.bytes, id = counted.id;
  const MemoryCategory category = counted.category;
  const std::lock_guard lock(mutex);
  tell(id, category, -bytes, counted.on_host);
  if (counted.on_host) {
    host[at(category)] -= bytes;
    return;
  }
  by_category[at(category)] -= bytes;
  total -= bytes;
  if (timeline) [[unlikely]] {
    const MemoryBlock* block = details ? details->find(id) : nullptr;
    timeline->add(category, -bytes, block ? std::string_view(block->module) : std::string_view(), by_category);
  }
  if (details) [[unlikely]]
    details->released(id);
}

void MemoryLedger::move(const CountedMemory& counted, MemoryCategory to) {
  const std::lock_guard lock(mutex);
  MemoryByCategory& place = counted.on_host ? host : by_category;
  place[at(counted.category)] -= counted.bytes;
  place[at(to)] += counted.bytes;
  tell(counted.id, counted.category, -counted.bytes, counted.on_host);
  tell(counted.id, to, counted.bytes, counted.on_host);
  if (MemoryBlock* block = details ? details->find(counted.id) : nullptr) block->category = to;
}

void MemoryLedger::tell(int64_t id, MemoryCategory category, int64_t bytes, bool on_host) const {
  if (events) [[unlikely]]
    events->add({.what = MemoryChange{.category = category, .bytes = bytes, .on_host = on_host}, .reads = {}, .writes = {id}});
}

void MemoryLedger::restart_peak() {
  const std::lock_guard lock(mutex);
  peak = total;
  peak_by_category = by_category;
  host_peak = host;
  if (details) details->peak_is_now(allocations);
}

void MemoryLedger::refuse(MemoryCategory category, int64_t bytes, std::string_view label, bool by_limit) {
  refusal = MemoryRefusal{.requested = bytes,
                          .limit = by_limit ? limit : 0,
                          .category = category,
                          .module = std::string(label),
                          .phase = std::string(phase),
                          .in_use = by_category,
                          .largest = details ? details->largest_alive() : std::vector<MemoryBlock>{}};
}

CountedMemory CountedMemory::count(const MemoryThread& thread, int64_t bytes, bool within_limit) {
  const int64_t id = thread.ledger->allocate(thread, bytes, within_limit);
  return {.ledger = thread.ledger->shared_from_this(), .category = thread.category, .bytes = bytes, .id = id, .on_host = thread.on_host};
}

namespace {

constexpr std::string_view kCarriedName = "memory of the thread that called";
constexpr c10::DebugInfoKind kCarried(&kCarriedName);

struct Carried final : c10::DebugInfoBase {
  std::atomic<const MemoryThread*> thread{&memory_thread};  ///< null: it counts no more
};

Carried* carried() { return static_cast<Carried*>(c10::ThreadLocalDebugInfo::get(kCarried)); }

}  // namespace

MemoryThread device_thread() {
  if (memory_thread.ledger != nullptr) return memory_thread;
  const Carried* const caller = carried();
  const MemoryThread* const thread = caller ? caller->thread.load() : nullptr;
  if (!thread) return memory_thread;
  MemoryThread acting = *thread;
  if (memory_thread.category != MemoryCategory::Other) acting.category = memory_thread.category;
  if (!memory_thread.label.empty()) acting.label = memory_thread.label;
  return acting;
}

void carry_thread() { c10::ThreadLocalDebugInfo::_push(kCarried, std::make_shared<Carried>()); }

void stop_carrying_thread() {
  if (Carried* const mine = carried()) mine->thread = nullptr;
  c10::ThreadLocalDebugInfo::_pop(kCarried);
}

}  // namespace tessera::detail
