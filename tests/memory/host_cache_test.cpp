#include "tessera/memory/host_cache.h"

#include <cstdint>
#include <thread>

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "tessera/memory/memory.h"

namespace tessera {
namespace {

bool enabled() {
  CacheHostMemory cache;
  return detail::host_cache_class(1 << 20) != detail::kNotCached;  // inert under the address sanitizer
}

TEST(HostCache, GivesAFreedBlockToTheNextTensorOfThatSize) {
  if (!enabled()) GTEST_SKIP() << "inert under the address sanitizer";
  CacheHostMemory cache;
  void* first = nullptr;
  {
    const at::Tensor tensor = at::empty({1 << 20});
    first = tensor.data_ptr();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0);
    EXPECT_EQ(detail::host_cache_bytes(), 0);
  }
  EXPECT_GE(detail::host_cache_bytes(), int64_t{4} << 20);
  const at::Tensor again = at::empty({(1 << 20) - 5});  // rounds up to the same size
  EXPECT_EQ(again.data_ptr(), first);
  EXPECT_EQ(detail::host_cache_bytes(), 0);
}

TEST(HostCache, ClassesHoldWhatTheyServeAndWasteAtMostAnEighth) {
  if (!enabled()) GTEST_SKIP() << "inert under the address sanitizer";
  for (int64_t bytes : {32768, 32769, 36864, 36865, 65535, 65536, 1 << 21, (1 << 21) + 1, 50'000'001}) {
    CacheHostMemory cache;  // empty anew for each size
    {
      const at::Tensor tensor = at::ones({bytes}, at::kByte);
    }
    const int64_t kept = detail::host_cache_bytes();
    EXPECT_GE(kept, bytes);
    EXPECT_LE(kept, bytes + bytes / 8 + 1);
    const at::Tensor again = at::empty({bytes}, at::kByte);
    EXPECT_EQ(detail::host_cache_bytes(), 0) << bytes;
  }
}

TEST(HostCache, IsEmptyAfterTheLastGuardAndBlocksMayOutliveIt) {
  at::Tensor survivor;
  {
    CacheHostMemory cache;
    survivor = at::ones({1 << 20});
    {
      const at::Tensor freed = at::empty({1 << 20});
    }
  }
  EXPECT_EQ(detail::host_cache_bytes(), 0);
  EXPECT_EQ(survivor.sum().item<float>(), static_cast<float>(1 << 20));
  survivor.reset();
  EXPECT_EQ(detail::host_cache_bytes(), 0);
}

TEST(HostCache, CountsTheBytesAskedFor) {
  CacheHostMemory cache;
  MemoryTracker tracker;
  TrackMemory tracking(tracker);
  at::Tensor tensor = at::empty({40'001}, at::kByte);
  EXPECT_EQ(tracker.current(), 40'001);
  std::thread([&] { tensor.reset(); }).join();
  EXPECT_EQ(tracker.current(), 0);
  EXPECT_EQ(tracker.peak(), 40'001);
}

TEST(HostCache, LeavesSmallTensorsAndOtherThreadsAlone) {
  CacheHostMemory cache;
  EXPECT_EQ(detail::host_cache_class(100), detail::kNotCached);
  std::thread([] { EXPECT_EQ(detail::host_cache_class(1 << 20), detail::kNotCached); }).join();
}

}  // namespace
}  // namespace tessera
