#include "tessera/memory/memory_events.h"

#include <utility>

#include "tessera/memory/ledger.h"

namespace tessera {

MemoryEvents::MemoryEvents(EventStream& stream) {
  if (detail::memory_thread.ledger == nullptr) return;
  ledger_ = detail::memory_thread.ledger->shared_from_this();
  const std::lock_guard lock(ledger_->mutex);
  before_ = std::exchange(ledger_->events, &stream);
}

MemoryEvents::~MemoryEvents() {
  if (!ledger_) return;
  const std::lock_guard lock(ledger_->mutex);
  ledger_->events = before_;
}

StorageNumber storage_number(const at::Tensor& tensor) {
  StorageNumber found;
  detail::visit_counted(tensor, [&](const detail::CountedMemory& counted) { found = {.number = counted.id, .on_host = counted.on_host}; });
  return found;
}

}  // namespace tessera
