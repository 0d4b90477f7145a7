// What the tracker counts of a device, against what the device's allocator says of itself. The CPU's says nothing.

#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/relu.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <gtest/gtest.h>

#include "tessera/memory/memory.h"
#include "tests/test_device.h"

namespace tessera {
namespace {

int64_t handed_out(at::Device device) {
  return c10::getDeviceAllocator(device.type())
      ->getDeviceStats(device.index())
      .requested_bytes[static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE)]
      .current;
}

/// Calls look() wherever something new is alive.
template <class Look>
void small_step(const at::Tensor& weight, const at::Tensor& labels, const Look& look) {
  const at::Tensor x = at::rand({37, 24});
  look();
  const at::Tensor hidden = at::relu(at::linear(x, weight));
  look();
  const at::Tensor loss = at::cross_entropy_loss(hidden, labels);
  look();
  loss.backward();
  look();
}

TEST(DeviceAllocator, HasHandedOutWhatTheTrackerCounts) {
  const at::Device device = testing_support::test_device();
  if (device.is_cpu()) GTEST_SKIP() << "the CPU's allocator says nothing of itself";
  track_device(device.type());
  at::Tensor weight = at::rand({37, 24}).requires_grad_(true);
  const at::Tensor labels = at::arange(37);
  small_step(weight, labels, [] {});  // what libraries keep for good is there by now
  weight.mutable_grad() = at::Tensor();
  const int64_t before = handed_out(device);
  MemoryTracker tracker;
  {
    const TrackMemory track(tracker);
    small_step(weight, labels, [&] { EXPECT_EQ(tracker.current(), handed_out(device) - before); });
    EXPECT_EQ(tracker.current(), static_cast<int64_t>(weight.grad().nbytes()));
    EXPECT_GT(tracker.peak(), tracker.current());
  }
  weight.mutable_grad() = at::Tensor();
  EXPECT_EQ(tracker.current(), 0);
}

}  // namespace
}  // namespace tessera
