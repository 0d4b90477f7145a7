#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "tessera/core/events.h"

namespace tessera {

namespace detail {
struct MemoryLedger;
}

/// While alive, what the tracker of this thread counts, on whatever thread, is taken down in `stream`, too (MemoryChange). Nothing where no tracker counts.
class MemoryEvents {
 public:
  explicit MemoryEvents(EventStream& stream);
  ~MemoryEvents();
  MemoryEvents(const MemoryEvents&) = delete;
  MemoryEvents& operator=(const MemoryEvents&) = delete;

 private:
  std::shared_ptr<detail::MemoryLedger> ledger_;
  EventStream* before_ = nullptr;
};

/// What a tracker knows of the tensor's storage.
struct StorageNumber {
  int64_t number = 0;    ///< as events name it; 0: it counts on none
  bool on_host = false;  ///< beside the device
};
StorageNumber storage_number(const at::Tensor& tensor);

}  // namespace tessera
