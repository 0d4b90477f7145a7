#include "tessera/memory/history.h"

#include <thread>

#include <ATen/ATen.h>
#include <ATen/ThreadLocalState.h>
#include <c10/util/Exception.h>
#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/memory/ledger.h"
#include "tests/memory/tensors.h"

namespace tessera {
namespace {

using namespace testing_support;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

std::vector<int64_t> sizes_of(const std::vector<MemoryBlock>& blocks) {
  std::vector<int64_t> sizes;
  for (const auto& block : blocks) sizes.push_back(block.bytes);
  return sizes;
}

TEST(MemoryDetails, AreThoseOfWhatWasAliveAtThePeak) {
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kMeta)}) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    tracker.keep_details();
    EXPECT_THAT(tracker.largest_at_peak(), IsEmpty());
    auto stays = floats(8 * kib, device), dies = floats(4 * kib, device);
    {
      const MemoryScope scope(MemoryCategory::Activations);
      const MemoryLabel label("layers.0");
      dies = at::Tensor();
      auto at_peak = floats(16 * kib, device).view({64, 64});
      tracker.describe(at_peak, "scores");
    }
    const auto later = floats(2 * kib, device);
    const auto largest = tracker.largest_at_peak();
    EXPECT_THAT(sizes_of(largest), ElementsAre(16 * kib, 8 * kib)) << "what died before, or came later, was not there";
    EXPECT_EQ(largest[0].category, MemoryCategory::Activations);
    EXPECT_EQ(largest[0].module, "layers.0");
    EXPECT_EQ(place_text(largest[0]), "scores");
    EXPECT_EQ(shape_text(largest[0]), "[64, 64] Float");
    EXPECT_EQ(shape_text(largest[1]), "");
    tracker.reset_peak();
    EXPECT_THAT(sizes_of(tracker.largest_at_peak()), ElementsAre(8 * kib, 2 * kib));
  }
}

TEST(MemoryHistory, APeakIsAboveWhatWasAliveBefore) {
  const auto event = [](int64_t alive) { return MemoryEvent{.after = {alive}}; };
  MemoryHistory history;
  history.before = {8};
  EXPECT_EQ(history.peak(), nullptr);
  history.events = {event(6), event(8)};
  EXPECT_EQ(history.peak(), nullptr) << "as much as before is no peak of the step";
  history.events = {event(9), event(12), event(12)};
  EXPECT_EQ(history.peak(), &history.events[1]);
}

TEST(MemoryDetails, AreTenAtMostWhetherAliveOrDead) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  tracker.keep_details();
  std::vector<at::Tensor> tensors;
  for (int i = 1; i <= 30; ++i) tensors.push_back(floats(i * kib));
  std::vector<int64_t> expected;
  for (int i = 30; i > 20; --i) expected.push_back(i * kib);
  EXPECT_EQ(sizes_of(tracker.largest_at_peak()), expected);
  for (size_t i = 0; i < tensors.size(); i += 2) tensors[i].reset();
  EXPECT_EQ(sizes_of(tracker.largest_at_peak()), expected);
  tensors.clear();
  EXPECT_EQ(sizes_of(tracker.largest_at_peak()), expected);
}

TEST(MemoryDetails, NameWhatLiesOnAStorage) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  const auto unknown = floats(32 * kib);
  tracker.describe(unknown, "counted before details were kept");
  tracker.keep_details();
  auto bucket = floats(16 * kib);
  tracker.describe(bucket.narrow(0, 0, 16).view({4, 4}), "w1.weight");
  tracker.describe(bucket.narrow(0, 16, 16), "w2.weight");
  tracker.describe(at::Tensor());
  const auto largest = tracker.largest_at_peak();
  ASSERT_EQ(largest.size(), 1u);
  EXPECT_EQ(largest[0].name, "w1.weight and others");
  EXPECT_EQ(shape_text(largest[0]), "[4096] Float") << "of the storage";
  tracker.retag(bucket, MemoryCategory::Gradients);
  EXPECT_EQ(tracker.largest_at_peak()[0].category, MemoryCategory::Gradients);
  tracker.keep_details(false);
  bucket.reset();
  EXPECT_THAT(tracker.largest_at_peak(), IsEmpty());
}

TEST(MemoryLabel, NestsAndIsCarriedAlong) {
  EXPECT_EQ(MemoryLabel::current(), "");
  const MemoryLabel outer("layers.1");
  {
    const MemoryLabel inner("layers.1.attention"), nothing("");
    EXPECT_EQ(MemoryLabel::current(), "layers.1.attention");
    const auto context = MemoryContext::current();
    std::thread([&] {
      EXPECT_EQ(MemoryLabel::current(), "");
      const MemoryContext::Guard guard(context);
      EXPECT_EQ(MemoryLabel::current(), "layers.1.attention");
    }).join();
  }
  EXPECT_EQ(MemoryLabel::current(), "layers.1");
}

TEST(MemoryTimeline, HasEveryEventAndPhase) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  mark_memory("nobody listens");
  tracker.keep_details();
  auto before = floats(4 * kib);
  tracker.start_timeline();
  mark_memory("forward");
  at::Tensor made;
  {
    const MemoryScope scope(MemoryCategory::Activations);
    const MemoryLabel label("layers.0");
    made = floats(8 * kib);
  }
  mark_memory("backward");
  before.reset();
  made.reset();
  const auto history = tracker.end_timeline();
  EXPECT_EQ(total_of(history.before), 4 * kib);
  EXPECT_EQ(history.num_events, 3);
  EXPECT_EQ(history.events_per_point, 1);
  ASSERT_EQ(history.events.size(), 3u);
  EXPECT_EQ(history.events[0].bytes, 8 * kib);
  EXPECT_EQ(history.events[0].category, MemoryCategory::Activations);
  EXPECT_EQ(history.modules.at(static_cast<size_t>(history.events[0].module)), "layers.0");
  EXPECT_EQ(history.events[1].bytes, -4 * kib);
  EXPECT_EQ(history.events[1].module, 0);
  EXPECT_EQ(history.modules.at(static_cast<size_t>(history.events[2].module)), "layers.0") << "a release is of the module that allocated";
  EXPECT_EQ(total_of(history.events[2].after), 0);
  ASSERT_EQ(history.marks.size(), 2u);
  EXPECT_EQ(history.marks[0].name, "forward");
  EXPECT_EQ(history.marks[1].index, 1);
  ASSERT_NE(history.peak(), nullptr);
  EXPECT_EQ(history.peak()->index, 0);
  EXPECT_THAT(sizes_of(history.largest), ElementsAre(8 * kib, 4 * kib));
  EXPECT_THROW(tracker.end_timeline(), InternalError);
}

TEST(MemoryTimeline, WithoutEventsHasNoPeak) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  const auto before = floats(kib);
  tracker.start_timeline();
  const auto history = tracker.end_timeline();
  EXPECT_EQ(history.peak(), nullptr);
  EXPECT_EQ(total_of(history.before), kib);
  EXPECT_THAT(history.largest, IsEmpty()) << "no details were kept";
}

TEST(MemoryTimeline, KeepsThePeakWhenItHasToLeaveOut) {
  for (const int peak_at : {0, 1, 333, 498, 499}) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    tracker.start_timeline(/*most_events=*/16);
    at::Tensor held;
    for (int i = 0; i < 500; ++i) held = floats(i == peak_at ? 64 * kib : (1 + i % 7) * kib);
    const auto history = tracker.end_timeline();
    EXPECT_EQ(history.num_events, 999) << "500 allocations, and a release after all but the first";
    EXPECT_LE(history.events.size(), 17u);
    EXPECT_GE(history.events.size(), 8u);
    EXPECT_GT(history.events_per_point, 32);
    ASSERT_NE(history.peak(), nullptr);
    EXPECT_EQ(total_of(history.peak()->after), tracker.peak());
    for (size_t i = 1; i < history.events.size(); ++i) EXPECT_LT(history.events[i - 1].index, history.events[i].index);
  }
}

TEST(MemoryTimeline, ThinKeepsTheHighestOfEachGroup) {
  std::vector<MemoryEvent> events;
  for (const int64_t bytes : {1, 5, 2, 2, 9}) events.push_back({.index = static_cast<int64_t>(events.size()), .after = {bytes}});
  const auto kept = thin(events, 2);
  ASSERT_EQ(kept.size(), 3u);
  EXPECT_EQ(kept[0].index, 1);
  EXPECT_EQ(kept[1].index, 2) << "the first of equals";
  EXPECT_EQ(kept[2].index, 4);
  EXPECT_EQ(thin(events, 1).size(), 5u);
  EXPECT_THAT(thin({}, 3), IsEmpty());
}

TEST(MemoryLimit, RefusesWhatWouldPassItAndSaysWhatWasAlive) {
  for (const at::Device device : {at::Device(at::kCPU), at::Device(at::kMeta)}) {
    MemoryTracker tracker;
    const TrackMemory track(tracker);
    tracker.keep_details();
    tracker.set_limit(10 * kib);
    EXPECT_FALSE(tracker.refusal().has_value());
    const auto held = floats(8 * kib, device);
    EXPECT_NO_THROW(floats(2 * kib, device)) << "up to the limit";
    mark_memory("forward");
    {
      const MemoryScope scope(MemoryCategory::Activations);
      const MemoryLabel label("layers.2");
      EXPECT_THROW(floats(2 * kib + 4, device), c10::OutOfMemoryError);
    }
    EXPECT_EQ(tracker.current(), 8 * kib) << "what is refused is not counted";
    const auto refusal = tracker.refusal();
    ASSERT_TRUE(refusal.has_value());
    EXPECT_EQ(refusal->requested, 2 * kib + 4);
    EXPECT_EQ(refusal->limit, 10 * kib);
    EXPECT_EQ(refusal->category, MemoryCategory::Activations);
    EXPECT_EQ(refusal->module, "layers.2");
    EXPECT_EQ(refusal->phase, "forward");
    EXPECT_EQ(total_of(refusal->in_use), 8 * kib);
    EXPECT_THAT(sizes_of(refusal->largest), ElementsAre(8 * kib));
    tracker.set_limit(0);
    EXPECT_NO_THROW(floats(64 * kib, device));
  }
}

TEST(MemoryLimit, PassesThroughOperatorsAndBackward) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  const auto weight = at::ones({64, 64}).set_requires_grad(true);
  const auto loss = at::silu(at::ones({64, 64}).matmul(weight)).sum();
  tracker.set_limit(tracker.current() + 8 * kib);
  EXPECT_THROW(loss.backward(), c10::OutOfMemoryError) << "of the same type, through the autograd engine";
  tracker.set_limit(tracker.current());
  EXPECT_THROW(at::matmul(weight.detach(), weight.detach()), c10::OutOfMemoryError);
}

TEST(MemoryLimit, HoldsForOneRankOfSeveral) {
  MemoryTracker small, large;
  small.set_limit(kib);
  std::thread([&] {
    const TrackMemory track(large);
    EXPECT_NO_THROW(floats(8 * kib));
  }).join();
  const TrackMemory track(small);
  EXPECT_THROW(floats(8 * kib), c10::OutOfMemoryError);
}

// What this build cannot have: a device's allocator tells of its blocks by the same calls.
TEST(MemoryOfDevices, IsCountedByAddressAndRefusedByTheDevice) {
  MemoryTracker tracker;
  int block = 0;
  {
    const TrackMemory track(tracker);
    const MemoryScope scope(MemoryCategory::Activations);
    tracker.set_limit(kib);
    detail::count_device_memory(&block, 4 * kib);
    EXPECT_EQ(tracker.current(MemoryCategory::Activations), 4 * kib) << "the device knows its own limit";
    detail::device_refused(16 * kib);
  }
  detail::uncount_device_memory(&block);
  EXPECT_EQ(tracker.current(), 0);
  ASSERT_TRUE(tracker.refusal().has_value());
  EXPECT_EQ(tracker.refusal()->limit, 0);
  EXPECT_EQ(tracker.refusal()->requested, 16 * kib);
  EXPECT_EQ(total_of(tracker.refusal()->in_use), 4 * kib);
  EXPECT_NO_THROW(track_device(at::kCPU));
  EXPECT_NO_THROW(track_device(at::kMeta));
  try {
    track_device(at::kXPU);
    FAIL() << "nothing of that kind is built";
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("memory on xpu"));
  }
}

// Autograd works on a thread of its own for each device, and takes along what libtorch knows of the caller.
TEST(MemoryOfDevices, IsCountedOnTheThreadThatCalledBackward) {
  MemoryTracker tracker;
  int block = 0, later = 0;
  at::ThreadLocalState caller;
  {
    const TrackMemory track(tracker);
    const MemoryScope scope(MemoryCategory::Activations);
    caller = at::ThreadLocalState();
    std::thread([&] {
      detail::count_device_memory(&later, kib);
      const at::ThreadLocalStateGuard guard(caller);
      detail::count_device_memory(&block, 4 * kib);
    }).join();
    EXPECT_EQ(tracker.current(MemoryCategory::Activations), 4 * kib) << "and nothing of a thread that works for nobody";
    detail::uncount_device_memory(&block);
    tracker.keep_details();
    tracker.reset_peak();
    at::Tensor on_the_host;
    std::thread([&] {
      const at::ThreadLocalStateGuard guard(caller);
      const MemoryScope own(MemoryCategory::Gradients);
      const MemoryLabel label("layers.0");
      detail::count_device_memory(&block, 4 * kib);
      EXPECT_EQ(tracker.largest_at_peak().front().module, "layers.0");
      const auto bytes = [] { return at::empty({2 * kib}, at::TensorOptions(at::kCPU).dtype(at::kByte)); };
      const at::Tensor of_a_cpu = bytes();
      EXPECT_EQ(tracker.current(), 4 * kib) << "a CPU's backward stays on its thread";
      tracker.compute_on(at::Device(at::kCUDA, 0));
      on_the_host = bytes();
    }).join();
    EXPECT_EQ(tracker.current(MemoryCategory::Gradients), 4 * kib);
    EXPECT_EQ(tracker.host_by_category()[static_cast<size_t>(MemoryCategory::Gradients)], 2 * kib);
    detail::uncount_device_memory(&block);
    EXPECT_EQ(tracker.current(), 0);
  }
  std::thread([&] {
    const at::ThreadLocalStateGuard guard(caller);
    detail::count_device_memory(&later, kib);
  }).join();
  EXPECT_EQ(tracker.current(), 0) << "the caller counts no more";
}

TEST(MemoryTables, HaveALineForEach) {
  EXPECT_EQ(category_table({{"now", {1024, 0, 0, 2048}}, {"then", {}}}),
            "                           now            then\n"
            "  params              1.00 KiB             0 B\n"
            "  gradients                0 B             0 B\n"
            "  optimizer                0 B             0 B\n"
            "  activations         2.00 KiB             0 B\n"
            "  outputs                  0 B             0 B\n"
            "  comm                     0 B             0 B\n"
            "  other                    0 B             0 B\n"
            "  total               3.00 KiB             0 B\n");
  EXPECT_EQ(block_table({}), "");
  EXPECT_EQ(
      block_table({{.bytes = 2048, .category = MemoryCategory::Activations, .module = "layers.1", .name = {}, .shape = {16, 64}, .dtype = at::kBFloat16}}),
      "    2.00 KiB  [16, 64] BFloat16        activations  in layers.1\n");
}

}  // namespace
}  // namespace tessera
