#include "tessera/checkpoint/staging.h"

#include <atomic>
#include <chrono>
#include <thread>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include "tessera/memory/memory.h"

namespace tessera::checkpoint {
namespace {

std::string bytes_of(const at::Tensor& tensor) {
  const auto packed = tensor.cpu().contiguous();
  return {static_cast<const char*>(packed.const_data_ptr()), packed.nbytes()};
}

std::string take_all(Staging& staging) {
  std::string all;
  while (auto chunk = staging.take()) all.append(reinterpret_cast<const char*>(chunk->bytes().data()), chunk->bytes().size());
  return all;
}

TEST(Staging, EveryByteArrivesInOrderWhateverTheLimit) {
  const std::vector<at::Tensor> tensors{at::arange(1001, at::kFloat), at::full({}, 7, at::kLong), at::empty({0, 3}),
                                        at::arange(12, at::kFloat).view({3, 4}).t(), at::arange(5).to(at::kBFloat16)};
  std::string expected;
  for (const auto& tensor : tensors) expected += bytes_of(tensor);
  for (const int64_t limit : {1, 2, 7, 100, 4096, 1 << 20}) {
    Staging staging(limit);
    std::string got;
    std::thread taker([&] { got = take_all(staging); });
    for (const auto& tensor : tensors) EXPECT_TRUE(staging.put(tensor));
    staging.finish();
    taker.join();
    EXPECT_EQ(got, expected) << limit;
  }
}

TEST(Staging, NeverHoldsMoreThanItsLimit) {
  constexpr int64_t kLimit = 64;
  Staging staging(kLimit);
  std::atomic<int64_t> put = 0;
  std::thread giver([&] {
    for (int i = 0; i < 32; ++i) {
      staging.put(at::full({8}, i, at::kByte));
      put += 8;
    }
    staging.finish();
  });
  int64_t taken = 0;
  while (auto chunk = staging.take()) {
    const auto size = static_cast<int64_t>(chunk->bytes().size());
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    EXPECT_LE(put.load(), taken + kLimit);
    taken += size;
  }
  giver.join();
  EXPECT_EQ(taken, 32 * 8);
}

TEST(Staging, ATakerThatGivesUpLetsTheOtherGo) {
  Staging staging(16);
  std::thread taker([&] {
    staging.take();
    staging.stop();
  });
  EXPECT_FALSE(staging.put(at::full({1000}, 1, at::kByte)));
  taker.join();
  EXPECT_FALSE(staging.put(at::full({1}, 1, at::kByte)));
  EXPECT_FALSE(staging.take().has_value());
}

TEST(Staging, CountsWhatItHolds) {
  MemoryTracker tracker;
  const TrackMemory track(tracker);
  const auto tensor = at::full({1000}, 1, at::kByte);
  const int64_t before = tracker.current(MemoryCategory::Other);
  Staging staging(1 << 20);
  staging.put(tensor);
  staging.finish();
  EXPECT_EQ(tracker.current(MemoryCategory::Other), before + 1000);
  std::thread([&] { EXPECT_EQ(take_all(staging).size(), 1000); }).join();
  EXPECT_EQ(tracker.current(MemoryCategory::Other), before) << "freed by the other thread, taken off this rank's account";
}

TEST(Staging, WhatWasPutMayChangeAtOnce) {
  Staging staging(1 << 20);
  const auto tensor = at::full({100}, 1, at::kFloat);
  staging.put(tensor);
  tensor.fill_(2);
  staging.finish();
  EXPECT_EQ(take_all(staging), bytes_of(at::full({100}, 1, at::kFloat)));
}

}  // namespace
}  // namespace tessera::checkpoint
