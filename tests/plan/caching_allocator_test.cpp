// What an accelerator's allocator reserves, by the rules that libtorch documents of it, counted by hand.

#include "tessera/plan/caching_allocator.h"

#include <map>
#include <random>

#include <gmock/gmock.h>

#include "tessera/memory/memory.h"

namespace tessera::plan {
namespace {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

TEST(CachingAllocator, SmallTensorsShareSegmentsOfTwoMiB) {
  CachingAllocator allocator;
  allocator.allocate(1, 100);
  EXPECT_EQ(allocator.reserved(), 2 * kMiB);
  EXPECT_EQ(allocator.alive(), 512) << "cut in steps of 512 bytes";
  allocator.allocate(2, kMiB);
  allocator.allocate(3, kMiB - 512);
  EXPECT_EQ(allocator.reserved(), 2 * kMiB) << "512 bytes, a MiB and the rest fill the segment";
  allocator.allocate(4, 1);
  EXPECT_EQ(allocator.reserved(), 4 * kMiB);
}

TEST(CachingAllocator, LargerOnesShareSegmentsOfTwentyMiBAndTheLargestHaveTheirOwn) {
  CachingAllocator allocator;
  allocator.allocate(1, kMiB + 1);
  EXPECT_EQ(allocator.reserved(), 20 * kMiB);
  allocator.allocate(2, 9 * kMiB);
  EXPECT_EQ(allocator.reserved(), 20 * kMiB);
  allocator.allocate(3, 10 * kMiB);  // 9 MiB less 512 bytes are left of the first
  EXPECT_EQ(allocator.reserved(), 30 * kMiB) << "from 10 MiB on in steps of 2 MiB";
  allocator.allocate(4, 10 * kMiB + 1);
  EXPECT_EQ(allocator.reserved(), 42 * kMiB);
}

TEST(CachingAllocator, WhatIsLeftOfALargeBlockIsCutOffIfItIsMoreThanAMiB) {
  CachingAllocator allocator;
  allocator.allocate(1, 64 * kMiB);
  allocator.release(1);
  allocator.allocate(2, 63 * kMiB);
  EXPECT_EQ(allocator.alive(), 64 * kMiB) << "a MiB that is left stays with it";
  allocator.release(2);
  allocator.allocate(3, 62 * kMiB);
  EXPECT_EQ(allocator.alive(), 62 * kMiB);
  allocator.allocate(4, 2 * kMiB);
  EXPECT_EQ(allocator.reserved(), 64 * kMiB);
}

TEST(CachingAllocator, HolesThatNothingFitsAreReserved) {
  CachingAllocator allocator;
  allocator.allocate(1, 100 * kMiB);
  allocator.release(1);
  allocator.allocate(2, 40 * kMiB);  // out of the 100
  allocator.allocate(3, 80 * kMiB);  // 60 are left, too few
  EXPECT_EQ(allocator.reserved(), 180 * kMiB);
  EXPECT_EQ(allocator.alive(), 120 * kMiB);
  allocator.release(2);
  allocator.allocate(4, 100 * kMiB);
  EXPECT_EQ(allocator.reserved(), 180 * kMiB) << "the two parts have become one block again";
}

TEST(CachingAllocator, TheSmallestBlockThatFitsIsTaken) {
  CachingAllocator allocator;
  allocator.allocate(1, 40 * kMiB);
  allocator.allocate(2, 20 * kMiB);
  allocator.release(1);
  allocator.release(2);
  allocator.allocate(3, 20 * kMiB);
  allocator.allocate(4, 40 * kMiB);
  EXPECT_EQ(allocator.reserved(), 60 * kMiB);
}

TEST(CachingAllocator, UnderALimitFreeSegmentsAreGivenBackBeforeItIsPassed) {
  CachingAllocator unlimited, limited(100 * kMiB);
  for (CachingAllocator* allocator : {&unlimited, &limited}) {
    allocator->allocate(1, 60 * kMiB);
    allocator->release(1);
    allocator->allocate(2, 90 * kMiB);
  }
  EXPECT_EQ(unlimited.peak(), 150 * kMiB);
  EXPECT_EQ(limited.peak(), 90 * kMiB);
  limited.allocate(3, 20 * kMiB);
  EXPECT_EQ(limited.peak(), 110 * kMiB) << "and what passes it all the same is told";
}

TEST(CachingAllocator, ASegmentOfWhichAPartIsInUseStays) {
  CachingAllocator allocator(100 * kMiB);
  allocator.allocate(1, 60 * kMiB);
  allocator.release(1);
  allocator.allocate(2, 10 * kMiB);  // a part of the 60
  allocator.allocate(3, 60 * kMiB);
  EXPECT_EQ(allocator.peak(), 120 * kMiB);
}

TEST(CachingAllocator, ReadsWhatATrackerTells) {
  const auto change = [](int64_t id, int64_t bytes, MemoryCategory category, bool on_host = false) {
    return Event{.what = MemoryChange{.category = category, .bytes = bytes, .on_host = on_host}, .reads = {}, .writes = {id}};
  };
  CachingAllocator allocator;
  allocator.read(change(1, 60 * kMiB, MemoryCategory::Parameters));
  allocator.read(change(2, 60 * kMiB, MemoryCategory::Parameters, /*on_host=*/true));
  EXPECT_EQ(allocator.reserved(), 60 * kMiB) << "the host has an allocator of its own";
  allocator.read(change(1, -60 * kMiB, MemoryCategory::Parameters));
  allocator.read(change(1, 60 * kMiB, MemoryCategory::Gradients));
  allocator.read(change(3, 60 * kMiB, MemoryCategory::Other));
  EXPECT_EQ(allocator.reserved(), 120 * kMiB) << "what only changed its category was never free";
  allocator.read(change(1, -60 * kMiB, MemoryCategory::Gradients));
  allocator.read(change(4, 60 * kMiB, MemoryCategory::Other));
  EXPECT_EQ(allocator.reserved(), 120 * kMiB);
}

TEST(CachingAllocator, ReservesAllThatIsAliveAndGivesEverythingBack) {
  std::mt19937 random(3);
  for (int round = 0; round < 20; ++round) {
    CachingAllocator allocator;
    std::map<int64_t, int64_t> alive;
    int64_t bytes = 0;
    for (int64_t id = 1; id < 400; ++id) {
      if (!alive.empty() && random() % 3 == 0) {
        const auto gone = std::next(alive.begin(), static_cast<int64_t>(random() % alive.size()));
        bytes -= gone->second;
        allocator.release(gone->first);
        alive.erase(gone);
      }
      const auto size = static_cast<int64_t>(random() % (uint64_t{1} << (random() % 27)));
      allocator.allocate(id, size);
      alive[id] = size;
      bytes += size;
      ASSERT_GE(allocator.alive(), bytes);
      ASSERT_GE(allocator.reserved(), allocator.alive());
      ASSERT_EQ(allocator.reserved() % (2 * kMiB), 0);
    }
    const int64_t peak = allocator.peak();
    for (const auto& [id, size] : alive) allocator.release(id);
    EXPECT_EQ(allocator.alive(), 0);
    for (int64_t id = 1; id < 400; ++id) {  // all of it is there again, whole
      if (alive.contains(id)) allocator.allocate(id, alive[id]);
    }
    EXPECT_LE(allocator.peak(), peak + peak / 2);
  }
}

}  // namespace
}  // namespace tessera::plan
