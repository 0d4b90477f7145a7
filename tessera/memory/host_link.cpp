#include "tessera/memory/host_link.h"

#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "tessera/memory/memory.h"

// Pinned memory is counted by taking the tensor's DataPtr over: its own context then is ours, and the accelerator's, which ends the loan, lies within.
// (libtorch's allocator finds the block by address too, so that copies under way still keep it.)
// The order of a copy and what uses its memory is a matter of the device's streams alone: a copy waits for what was asked for before it, and who needs its
// result waits for its point. The host waits nowhere unless it asks to.

namespace tessera {
namespace {

/// Whether work is done when it is asked for, on memory that the host reads as it is.
bool is_its_own_host(at::Device device) { return device.is_cpu() || device.is_meta(); }

/// Pinned memory comes from an allocator of the accelerator that no tracker sees.
struct CountedPinned {
  at::DataPtr memory;
  static void free(void* context) {
    uncount_memory(context);
    delete static_cast<CountedPinned*>(context);
  }
};

void count_pinned(const at::Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  const at::Device device = tensor.device();
  auto owned = std::make_unique<CountedPinned>(storage->set_data_ptr(at::DataPtr(nullptr, device)));
  count_memory(owned.get(), static_cast<int64_t>(storage->nbytes()));
  void* const data = owned->memory.get();
  storage->set_data_ptr(at::DataPtr(data, owned.release(), &CountedPinned::free, device));
}

}  // namespace

struct CopyStream::Point::Event {
  explicit Event(c10::Stream stream) : event(stream.device_type()) { event.record(stream); }
  c10::Event event;
};

CopyStream::CopyStream(at::Device device) {
  if (is_its_own_host(device)) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  const at::Device indexed = device.has_index() ? device : guard.getDevice();
  stream_ = guard.getStreamFromGlobalPool(indexed);
}

CopyStream::Scope::Scope(const CopyStream& stream, Behind behind) {
  if (!stream.stream_) return;
  if (behind == Behind::Current) {
    const Point::Event before(c10::impl::VirtualGuardImpl(stream.stream_->device_type()).getStream(stream.stream_->device()));
    before.event.block(*stream.stream_);
  }
  guard_.reset_stream(*stream.stream_);
}

CopyStream::Point CopyStream::point() const {
  Point point;
  if (stream_) point.event_ = std::make_shared<Point::Event>(*stream_);
  return point;
}

void CopyStream::Point::hold_device() const {
  if (!event_) return;
  const c10::impl::VirtualGuardImpl guard(event_->event.device_type());
  event_->event.block(guard.getStream(event_->event.device()));
}

void CopyStream::Point::wait() const {
  if (event_) event_->event.synchronize();
}

void keep_until_used(const at::Tensor& tensor) {
  if (is_its_own_host(tensor.device())) return;
  tensor.record_stream(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
}

bool CopyStream::Point::done() const { return !event_ || event_->event.query(); }

HostLink::HostLink(at::Device device) : device(device), in(device), out(device) {}

at::Tensor HostLink::empty(int64_t size, at::ScalarType dtype) const {
  const HostMemory beside;
  if (is_its_own_host(device)) return at::empty({size}, at::TensorOptions(device).dtype(dtype));
  const at::Tensor pinned = at::empty({size}, at::TensorOptions(at::kCPU).dtype(dtype).pinned_memory(true));
  if (size > 0) count_pinned(pinned);
  return pinned;
}

}  // namespace tessera
