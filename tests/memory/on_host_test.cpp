#include "tessera/memory/on_host.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "tessera/memory/memory.h"

namespace tessera {
namespace {

TEST(OnHost, MetaIsTheHostsUnlessItStandsForAnAcceleratorAndIsNotBesideIt) {
  const auto on = [](at::DeviceType type) { return at::empty({4}, at::TensorOptions(type)); };
  EXPECT_TRUE(is_on_host(on(at::kCPU)));
  EXPECT_TRUE(is_on_host(on(at::kMeta)));
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  const at::Tensor before = on(at::kMeta);
  {
    const MetaAsAccelerator accelerator;
    EXPECT_TRUE(is_on_host(on(at::kCPU)));
    EXPECT_FALSE(is_on_host(before));
    EXPECT_FALSE(is_on_host(on(at::kMeta)));
    const HostMemory beside;
    const at::Tensor waits = on(at::kMeta);
    EXPECT_TRUE(is_on_host(waits));
    EXPECT_FALSE(is_on_host(before)) << "by where it lies, not by who asks";
  }
  EXPECT_TRUE(is_on_host(before));
}

}  // namespace
}  // namespace tessera
