#include "tessera/memory/memory.h"

#include <fstream>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/memory/history.h"
#include "tessera/memory/ledger.h"

namespace tessera {

namespace {

using detail::memory_thread;
using detail::MemoryLedger;

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

MemoryByCategory MemoryTracker::host_by_category() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->host;
}

MemoryByCategory MemoryTracker::host_peak_by_category() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->host_peak;
}

int64_t MemoryTracker::current(MemoryCategory category) const { return current_by_category()[static_cast<int>(category)]; }
int64_t MemoryTracker::at_peak(MemoryCategory category) const { return peak_by_category()[static_cast<int>(category)]; }
void MemoryTracker::reset_peak() { ledger_->restart_peak(); }

void MemoryTracker::retag(const at::Tensor& tensor, MemoryCategory category) {
  detail::visit_counted(tensor, [&](detail::CountedMemory& counted) {
    if (counted.ledger != ledger_) return;
    ledger_->move(counted, category);
    counted.category = category;
  });
}

void MemoryTracker::compute_on(at::Device device) { ledger_->beside_device = !device.is_cpu() && !device.is_meta(); }

void MemoryTracker::set_limit(int64_t bytes) {
  const std::lock_guard lock(ledger_->mutex);
  ledger_->limit = bytes;
}

std::optional<MemoryRefusal> MemoryTracker::refusal() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->refusal;
}

void MemoryTracker::keep_details(bool keep) {
  const std::lock_guard lock(ledger_->mutex);
  if (!keep) {
    ledger_->details.reset();
  } else if (!ledger_->details) {
    ledger_->details = std::make_unique<detail::MemoryDetails>();
  }
}

void MemoryTracker::describe(const at::Tensor& tensor, const std::string& name) {
  detail::visit_counted(tensor, [&](detail::CountedMemory& counted) {
    if (counted.ledger != ledger_) return;
    const std::lock_guard lock(ledger_->mutex);
    MemoryBlock* const block = ledger_->details ? ledger_->details->find(counted.id) : nullptr;
    if (!block) return;
    const bool whole = static_cast<int64_t>(tensor.nbytes()) == block->bytes;
    if (!block->dtype) {
      block->dtype = tensor.scalar_type();
      block->shape = whole ? tensor.sizes().vec() : std::vector<int64_t>{block->bytes / static_cast<int64_t>(tensor.element_size())};
    }
    if (!name.empty() && block->name.empty()) block->name = whole ? name : name + " and others";
  });
}

std::vector<MemoryBlock> MemoryTracker::largest_at_peak() const {
  const std::lock_guard lock(ledger_->mutex);
  return ledger_->details ? ledger_->details->largest_at_peak() : std::vector<MemoryBlock>{};
}

void MemoryTracker::start_timeline(size_t most_events) {
  ledger_->restart_peak();
  const std::lock_guard lock(ledger_->mutex);
  ledger_->timeline = std::make_unique<detail::MemoryTimeline>(ledger_->by_category, most_events);
}

MemoryHistory MemoryTracker::end_timeline() {
  const std::lock_guard lock(ledger_->mutex);
  invariant(ledger_->timeline != nullptr, "end_timeline: none was started");
  MemoryHistory history = std::move(*std::exchange(ledger_->timeline, nullptr)).take();
  if (ledger_->details) history.largest = ledger_->details->largest_at_peak();
  history.host = ledger_->host_peak;
  return history;
}

TrackMemory::TrackMemory(MemoryTracker& tracker) : ledger_(tracker.ledger_) {
  detail::learn_scratch_site();
  before_ = std::exchange(memory_thread.ledger, ledger_.get());
  if (!before_) detail::carry_thread();
}
TrackMemory::~TrackMemory() {
  if (!before_) detail::stop_carrying_thread();
  memory_thread.ledger = before_;
}

MemoryScope::MemoryScope(MemoryCategory category) : before_(std::exchange(memory_thread.category, category)) {}
MemoryScope::~MemoryScope() { memory_thread.category = before_; }

HostMemory::HostMemory(bool on_host) : before_(std::exchange(memory_thread.on_host, memory_thread.on_host || on_host)) {}
HostMemory::~HostMemory() { memory_thread.on_host = before_; }

MemoryLabel::MemoryLabel(std::string_view label) : before_(memory_thread.label) {
  if (!label.empty()) memory_thread.label = label;
}
MemoryLabel::~MemoryLabel() { memory_thread.label = before_; }
std::string_view MemoryLabel::current() { return memory_thread.label; }

void mark_memory(std::string_view phase) {
  MemoryLedger* const ledger = memory_thread.ledger;
  if (ledger == nullptr) return;
  const std::lock_guard lock(ledger->mutex);
  ledger->phase = phase;
  if (ledger->timeline) ledger->timeline->mark(phase);
}

MemoryContext MemoryContext::current() {
  MemoryContext context;
  if (memory_thread.ledger) context.ledger_ = memory_thread.ledger->shared_from_this();
  context.category_ = memory_thread.category;
  context.on_host_ = memory_thread.on_host;
  context.label_ = memory_thread.label;
  return context;
}

MemoryContext::Guard::Guard(const MemoryContext& context)
    : ledger_(context.ledger_),
      ledger_before_(std::exchange(memory_thread.ledger, ledger_.get())),
      category_before_(std::exchange(memory_thread.category, context.category_)),
      on_host_before_(std::exchange(memory_thread.on_host, context.on_host_)),
      label_before_(std::exchange(memory_thread.label, context.label_)) {}

MemoryContext::Guard::~Guard() {
  memory_thread.ledger = ledger_before_;
  memory_thread.category = category_before_;
  memory_thread.on_host = on_host_before_;
  memory_thread.label = label_before_;
}

int64_t resident_bytes() { return status_bytes("VmRSS:"); }
int64_t peak_resident_bytes() { return status_bytes("VmHWM:"); }

}  // namespace tessera
