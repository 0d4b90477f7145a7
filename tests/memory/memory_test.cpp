#include "tessera/memory/memory.h"

#include <thread>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/CPUAllocator.h>
#include <gtest/gtest.h>

#include "tests/memory/tensors.h"

namespace tessera {
namespace {

using namespace testing_support;

TEST(Memory, CountsNothingUntilAsked) {
  MemoryTracker tracker;
  const auto tensor = floats(kib);
  EXPECT_EQ(tracker.current(), 0);
  {
    const TrackMemory track(tracker);
    const auto inside = floats(2 * kib);
    EXPECT_EQ(tracker.current(), 2 * kib);
  }
  const auto after = floats(kib);
  EXPECT_EQ(tracker.current(), 0);
  EXPECT_EQ(tracker.peak(), 2 * kib);
}

TEST(Memory, CountsMetaTensorsAsIfTheyWereReal) {
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kMeta)}) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    auto a = floats(4 * kib, device);
    auto b = a.clone();
    auto c = at::zeros({3, 5}, at::TensorOptions(device).dtype(at::kLong));
    EXPECT_EQ(tracker.current(), 8 * kib + 120);
    auto view = a.narrow(0, 0, 4);
    EXPECT_EQ(tracker.current(), 8 * kib + 120) << "a view has no storage of its own";
    a.reset();
    EXPECT_EQ(tracker.current(), 8 * kib + 120) << "the view keeps it";
    view.reset();
    EXPECT_EQ(tracker.current(), 4 * kib + 120);
    auto none = at::empty({0}, at::TensorOptions(device));
    auto scalar = at::ones({}, at::TensorOptions(device).dtype(at::kDouble));
    EXPECT_EQ(tracker.current(), 4 * kib + 128);
  }
}

TEST(Memory, TellsTheHostFromTheDevice) {
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kMeta)}) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    tracker.set_limit(8 * kib);
    const auto on_device = floats(2 * kib, device);
    constexpr auto optimizer = static_cast<size_t>(MemoryCategory::Optimizer), gradients = static_cast<size_t>(MemoryCategory::Gradients);
    at::Tensor state;
    {
      const HostMemory beside;
      const MemoryScope scope(MemoryCategory::Optimizer);
      const HostMemory nothing(false);
      state = floats(16 * kib, device);  // more than the device's limit
      const auto passing = floats(kib, device);
    }
    {
      const HostMemory nothing(false);
      const auto more = floats(kib, device);
    }
    EXPECT_EQ(tracker.current(), 2 * kib);
    EXPECT_EQ(tracker.peak(), 3 * kib);
    EXPECT_EQ(tracker.current(MemoryCategory::Optimizer), 0);
    EXPECT_EQ(tracker.host_by_category()[optimizer], 16 * kib);
    EXPECT_EQ(tracker.host_peak_by_category()[optimizer], 17 * kib);
    tracker.retag(state, MemoryCategory::Gradients);
    EXPECT_EQ(tracker.host_by_category()[gradients], 16 * kib) << "it stays where it is";
    {
      const HostMemory beside;
      const auto less = floats(kib / 2, device);
    }
    EXPECT_EQ(tracker.host_peak_by_category()[optimizer], 17 * kib) << "what came later was less";
    tracker.reset_peak();
    EXPECT_EQ(tracker.host_peak_by_category(), tracker.host_by_category());
    state.reset();
    EXPECT_EQ(tracker.host_by_category(), MemoryByCategory{});
    EXPECT_EQ(tracker.current(), 2 * kib);
  }
}

TEST(Memory, AContextCarriesThePlace) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  std::optional<HostMemory> beside(std::in_place);
  const auto context = MemoryContext::current();
  beside.reset();
  at::Tensor theirs;
  std::thread([&] {
    const MemoryContext::Guard guard(context);
    theirs = floats(kib);
  }).join();
  EXPECT_EQ(tracker.current(), 0);
  EXPECT_EQ(tracker.host_by_category()[static_cast<size_t>(MemoryCategory::Other)], kib);
}

TEST(Memory, CountsResizedStorage) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  auto tensor = floats(4 * kib);
  tensor.resize_({4096});
  EXPECT_EQ(tracker.current(), 16 * kib);
  EXPECT_EQ(tracker.peak(), 20 * kib) << "old and new storage while resizing";
}

// oneDNN takes its scratch space this way.
TEST(Memory, RawAllocationsAreCountedAndFreed) {
  MemoryTracker tracker;
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  void* const untracked = allocator.raw_allocate(64);
  void* tracked = nullptr;
  {
    const TrackMemory track(tracker);
    tracked = allocator.raw_allocate(kib);
    EXPECT_EQ(tracker.current(), kib);
  }
  allocator.raw_deallocate(untracked);
  EXPECT_EQ(tracker.current(), kib);
  allocator.raw_deallocate(tracked);
  EXPECT_EQ(tracker.current(), 0);
  const TrackMemory track(tracker);
  const auto product = at::matmul(at::ones({64, 64}, at::kBFloat16), at::ones({64, 64}, at::kBFloat16));
  EXPECT_EQ(product[3][5].item<float>(), 64);
}

TEST(Memory, PeakByCategoryIsThatOfTheMoment) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  at::Tensor weight, gradient;
  {
    const MemoryScope scope(MemoryCategory::Parameters);
    weight = floats(4 * kib);
    {
      const MemoryScope inner(MemoryCategory::Gradients);
      gradient = floats(2 * kib);
    }
    EXPECT_EQ(floats(kib).nbytes(), kib);
  }
  auto other = floats(10 * kib);
  other.reset();
  gradient.reset();
  const auto small = floats(kib);
  EXPECT_EQ(tracker.peak(), 16 * kib);
  EXPECT_EQ(tracker.at_peak(MemoryCategory::Parameters), 4 * kib);
  EXPECT_EQ(tracker.at_peak(MemoryCategory::Gradients), 2 * kib);
  EXPECT_EQ(tracker.at_peak(MemoryCategory::Other), 10 * kib);
  EXPECT_EQ(tracker.current(MemoryCategory::Gradients), 0);
  EXPECT_EQ(tracker.num_allocations(), 5);
  tracker.reset_peak();
  EXPECT_EQ(tracker.peak(), 5 * kib);
  EXPECT_EQ(tracker.at_peak(MemoryCategory::Other), kib);
}

TEST(Memory, RetagMovesBytes) {
  MemoryTracker tracker, other;
  const TrackMemory track(tracker);
  auto tensor = floats(kib);
  tracker.retag(tensor.view({2, -1})[0], MemoryCategory::Outputs);
  EXPECT_EQ(tracker.current(MemoryCategory::Outputs), kib) << "the whole storage moves, through any view";
  EXPECT_EQ(tracker.current(MemoryCategory::Other), 0);
  other.retag(tensor, MemoryCategory::Comm);
  tracker.retag(at::Tensor(), MemoryCategory::Comm);
  EXPECT_EQ(tracker.current(MemoryCategory::Outputs), kib);
  EXPECT_EQ(other.current(), 0);
  tensor.reset();
  EXPECT_EQ(tracker.current(MemoryCategory::Outputs), 0);
}

TEST(Memory, TrackersNest) {
  MemoryTracker outer, inner;
  const TrackMemory track_outer(outer);
  const auto a = floats(kib);
  at::Tensor b;
  {
    const TrackMemory track_inner(inner);
    b = floats(2 * kib);
  }
  const auto c = floats(4 * kib);
  EXPECT_EQ(outer.current(), 5 * kib);
  EXPECT_EQ(inner.current(), 2 * kib);
  b.reset();
  EXPECT_EQ(outer.current(), 5 * kib);
  EXPECT_EQ(inner.current(), 0);
}

TEST(Memory, FreedOnAnotherThreadAndAfterTheTracker) {
  at::Tensor survivor;
  {
    MemoryTracker tracker;
    {
      const TrackMemory track(tracker);
      survivor = floats(kib);
      auto tensor = floats(2 * kib);
      std::thread([moved = std::move(tensor)]() mutable { moved.reset(); }).join();
    }
    EXPECT_EQ(tracker.current(), kib);
  }
  survivor.reset();  // must not touch a dead tracker (the address sanitizer watches)
}

TEST(Memory, ContextIsCarriedToAnotherThread) {
  MemoryTracker tracker;
  at::Tensor made;
  {
    const TrackMemory track(tracker);
    const MemoryScope scope(MemoryCategory::Comm);
    const auto context = MemoryContext::current();
    std::thread([&] {
      const auto uncounted = floats(8 * kib);
      {
        const MemoryContext::Guard guard(context);
        made = floats(kib);
      }
      const auto again_uncounted = floats(8 * kib);
    }).join();
  }
  EXPECT_EQ(tracker.current(MemoryCategory::Comm), kib);
  EXPECT_EQ(tracker.peak(), kib);
}

TEST(Memory, RanksAsThreadsCountApart) {
  std::vector<std::thread> ranks;
  std::vector<MemoryTracker> trackers(3);
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const TrackMemory track(trackers[rank]);
      for (int i = 0; i < 100; ++i) floats((rank + 1) * kib);
    });
  }
  for (auto& rank : ranks) rank.join();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(trackers[rank].peak(), (rank + 1) * kib);
    EXPECT_EQ(trackers[rank].current(), 0);
    EXPECT_EQ(trackers[rank].num_allocations(), 100);
  }
}

/// A training step of two layers: what autograd and operators allocate inside is the same on both devices.
int64_t peak_of_step(at::Device device) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  const auto options = at::TensorOptions(device);
  auto w1 = at::empty({64, 128}, options).fill_(0.01).set_requires_grad(true);
  auto w2 = at::empty({128, 32}, options).fill_(0.01).set_requires_grad(true);
  const auto x = at::ones({16, 64}, options);
  for (int step = 0; step < 2; ++step) {
    auto loss = at::log_softmax(at::silu(x.matmul(w1)).matmul(w2), -1).square().mean();
    loss.backward();
    at::NoGradGuard no_grad;
    w1.sub_(w1.grad(), 0.1);
    w2.sub_(w2.grad(), 0.1);
    w1.mutable_grad().reset();
    w2.mutable_grad().reset();
  }
  return tracker.peak();
}

TEST(Memory, DryStepPeaksLikeTheRealOne) {
  EXPECT_EQ(peak_of_step(at::kCPU), peak_of_step(at::kMeta));
  EXPECT_GT(peak_of_step(at::kMeta), 2 * (64 * 128 + 128 * 32) * 4);
}

TEST(Memory, ResidentMemoryIsReported) {
  EXPECT_GT(resident_bytes(), 1 << 20);
  const int64_t now = resident_bytes();
  EXPECT_GE(peak_resident_bytes() + (1 << 20), now) << "the kernel counts in batches";
}

TEST(Memory, CategoryNames) {
  EXPECT_EQ(to_string(MemoryCategory::Parameters), "params");
  EXPECT_EQ(to_string(MemoryCategory::Other), "other");
}

}  // namespace
}  // namespace tessera
