#include "tessera/offload/host_sums.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include "tessera/memory/memory.h"

// Terms are added in the order in which a run without it adds them in grad() and in its buckets, so the bits are the same. The device's memory of a gradient is
// free when its copy is made; how many may wait for that is bounded by landing the oldest.

namespace tessera {

HostSums::HostSums(at::Device device, int64_t in_flight_bytes) : link_(device), in_flight_bytes_(in_flight_bytes) {}

void HostSums::keep(const at::Tensor& tensor, const at::Tensor& gradient) {
  const c10::NoGradGuard no_grad;
  const auto bytes = static_cast<int64_t>(gradient.nbytes());
  while (!flights_.empty() && flying_bytes_ + bytes > in_flight_bytes_) land();
  const MemoryScope scope(MemoryCategory::Gradients);
  Flight flight{.key = tensor.unsafeGetTensorImpl(), .gradient = link_.empty(gradient.numel(), gradient.scalar_type()).view(gradient.sizes()), .arrived = {}};
  {
    const CopyStream::Scope copying(link_.out);
    flight.gradient.copy_(gradient, /*non_blocking=*/true);
    keep_until_used(gradient);
    flight.arrived = link_.out.point();
  }
  flying_bytes_ += bytes;
  flights_.push_back(std::move(flight));
}

/// The oldest arrives, and is added to what came before for the same tensor.
void HostSums::land() {
  const Flight flight = std::move(flights_.front());
  flights_.pop_front();
  flying_bytes_ -= static_cast<int64_t>(flight.gradient.nbytes());
  flight.arrived.wait();
  at::Tensor& sum = sums_[flight.key];
  sum.defined() ? static_cast<void>(sum.add_(flight.gradient)) : static_cast<void>(sum = flight.gradient);
}

at::Tensor HostSums::take(const at::Tensor& tensor) {
  const c10::NoGradGuard no_grad;
  const Key key = tensor.unsafeGetTensorImpl();
  while (std::ranges::find(flights_, key, &Flight::key) != flights_.end()) land();
  const auto found = sums_.find(key);
  if (found == sums_.end()) return {};
  at::Tensor sum = std::move(found->second);
  sums_.erase(found);
  return sum;
}

void HostSums::add_kept(const at::Tensor& tensor, const at::Tensor& sum) {
  const c10::NoGradGuard no_grad;
  const at::Tensor kept = take(tensor);
  if (!kept.defined()) return;
  const MemoryScope scope(MemoryCategory::Gradients);
  at::Tensor there;
  CopyStream::Point arrived;
  {
    const CopyStream::Scope copying(link_.in, CopyStream::Behind::Nothing);
    there = at::empty(kept.sizes(), kept.options().device(link_.device).pinned_memory(false));
    there.copy_(kept, /*non_blocking=*/true);
    arrived = link_.in.point();
  }
  arrived.hold_device();  // pinned memory is given to nobody else before a copy from it is done: that is its allocator's matter
  keep_until_used(there);
  at::Tensor(sum).add_(there);
}

void HostSums::clear() {
  while (!flights_.empty()) land();
  sums_.clear();
}

}  // namespace tessera
