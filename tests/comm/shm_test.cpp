// What the shared-memory engine promises beyond what collectives_test.cpp asks of every engine.
#include <atomic>
#include <fstream>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/memory/memory.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

at::Tensor ramp(int rank, int64_t length, at::ScalarType dtype) {
  const auto index = at::arange(length, at::kLong);
  if (at::isIntegralType(dtype, true)) return ((index * (rank + 3)) % 11 - 2).to(dtype);
  return ((index % 1013).to(at::kDouble) * 0.37 + 1.0 + rank * 0.11).mul(at::where(index % 3 == 0, -1, 1)).to(dtype);
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  return a.numel() == 0 || at::equal(a.contiguous().view(at::kByte), b.contiguous().view(at::kByte));
}

at::Tensor combine(const at::Tensor& a, const at::Tensor& b, Op op) {
  switch (op) {
    case Op::Sum:
      return a.scalar_type() == at::kBool ? at::logical_or(a, b) : a + b;
    case Op::Product:
      return a.scalar_type() == at::kBool ? at::logical_and(a, b) : a * b;
    case Op::Min:
      return at::minimum(a, b);
    case Op::Max:
      return at::maximum(a, b);
  }
  throw std::logic_error("unknown");
}

// The ranks' values in rank order; short floats in fp32, rounded once.
at::Tensor reference(int n, int64_t length, at::ScalarType dtype, Op op) {
  const bool is_short = dtype == at::kHalf || dtype == at::kBFloat16;
  const auto widened = [&](int rank) { return is_short ? ramp(rank, length, dtype).to(at::kFloat) : ramp(rank, length, dtype); };
  auto result = widened(0);
  for (int rank = 1; rank < n; ++rank) result = combine(result, widened(rank), op);
  return result.to(dtype);
}

void expect_reductions(World& world, at::ArrayRef<int64_t> lengths) {
  const int n = world.size();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kShort, at::kInt, at::kLong, at::kByte, at::kBool}) {
    for (const auto op : {Op::Sum, Op::Product, Op::Min, Op::Max}) {
      for (const int64_t length : lengths) {
        const auto expected = reference(n, length, dtype, op);
        auto all = ramp(world.rank(), length, dtype);
        all_reduce(world.group(), all, op);
        EXPECT_TRUE(same_bits(all, expected)) << "all_reduce " << dtype << " op " << static_cast<int>(op) << " of " << length;
        auto one = ramp(world.rank(), length, dtype);
        reduce(world.group(), one, n - 1, op);
        if (world.rank() == n - 1) EXPECT_TRUE(same_bits(one, expected)) << "reduce " << dtype << " op " << static_cast<int>(op) << " of " << length;
        if (length % n != 0) continue;
        auto part = at::empty({length / n}, dtype);
        reduce_scatter(world.group(), part, ramp(world.rank(), length, dtype), op);
        EXPECT_TRUE(same_bits(part, expected.narrow(0, world.rank() * (length / n), length / n))) << "reduce_scatter " << dtype << " of " << length;
      }
    }
  }
}

class Shm : public ::testing::TestWithParam<int> {
 protected:
  static RunOptions options() { return {.backend = "shm"}; }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Shm, ::testing::Values(1, 2, 3, 5, 8));

TEST_P(Shm, ReducesEveryDtypeByEveryOpInRankOrder) {
  run_ranks(GetParam(), [](World& world) { expect_reductions(world, {0, 1, 3, 17, 1000, 30 * 1009}); }, options());
}

TEST_P(Shm, AnElementsBitsDoNotDependOnItsBucket) {
  run_ranks(
      GetParam(),
      [](World& world) {
        for (const auto dtype : {at::kFloat, at::kBFloat16}) {
          auto whole = ramp(world.rank(), 300007, dtype);
          const auto original = whole.clone();
          all_reduce(world.group(), whole);
          for (const auto [begin, length] : {std::pair<int64_t, int64_t>{0, 5}, {77, 1000}, {12345, 70000}, {299000, 1007}}) {
            auto part = original.narrow(0, begin, length).clone();
            all_reduce(world.group(), part);
            EXPECT_TRUE(same_bits(part, whole.narrow(0, begin, length))) << begin << " + " << length;
          }
        }
      },
      options());
}

TEST_P(Shm, NaNsAndInfinitiesPass) {
  run_ranks(
      GetParam(),
      [](World& world) {
        const bool last = world.rank() == world.size() - 1;
        for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
          for (const auto op : {Op::Sum, Op::Product, Op::Min, Op::Max}) {
            auto tensor = at::tensor({last ? NAN : 1.0f, last ? INFINITY : 2.0f, 65504.0f}).to(dtype);
            all_reduce(world.group(), tensor, op);
            EXPECT_TRUE(tensor[0].isnan().item<bool>()) << dtype << " op " << static_cast<int>(op);
            if (op == Op::Max) EXPECT_TRUE(tensor[1].isinf().item<bool>());
          }
        }
      },
      options());
}

TEST_P(Shm, SumsComplexNumbers) {
  run_ranks(
      GetParam(),
      [](World& world) {
        auto tensor = at::complex(at::full({5}, 1.0f), at::full({5}, static_cast<float>(world.rank())));
        all_reduce(world.group(), tensor);
        EXPECT_TRUE(at::equal(tensor, at::complex(at::full({5}, float(world.size())), at::full({5}, 0.5f * world.size() * (world.size() - 1)))));
      },
      options());
}

// Rank 0 waits for what it started on one group only after the others' order on another.
TEST(ShmGroups, MayBeUsedInDifferentOrder) {
  run_ranks(2,
            [](World& world) {
              const auto one = world.subgroup({0, 1}, "one"), two = world.subgroup({0, 1}, "two");
              for (int round = 0; round < 20; ++round) {
                auto a = at::ones({70001}), b = at::ones({10});
                std::vector<Pending> pending;
                if (world.rank() == 0) {
                  pending.push_back(all_reduce_async(one, a));
                  all_reduce(two, b);
                } else {
                  pending.push_back(all_reduce_async(two, b));
                  all_reduce(one, a);
                }
                pending[0].wait();
                EXPECT_EQ(a.sum().item<float>(), 2 * 70001) << round;
                EXPECT_EQ(b.sum().item<float>(), 20) << round;
              }
            },
            {.backend = "shm"});
}

TEST(ShmMessages, CrossWithoutDeadlockHoweverLarge) {
  run_ranks(3,
            [](World& world) {
              const auto group = world.group();
              const int right = (world.rank() + 1) % 3, left = (world.rank() + 2) % 3;
              for (const int64_t length : {0, 1, 1000, 1000003}) {
                auto got = at::empty({length}), other = at::empty({length});
                // All send before any receives, and take the second tag first.
                auto first = send_async(group, ramp(world.rank(), length, at::kFloat), right, 1);
                auto second = send_async(group, ramp(world.rank() + 10, length, at::kFloat), right, 2);
                recv(group, other, left, 2);
                recv(group, got, left, 1);
                first.wait();
                second.wait();
                EXPECT_TRUE(same_bits(got, ramp(left, length, at::kFloat)));
                EXPECT_TRUE(same_bits(other, ramp(left + 10, length, at::kFloat)));
              }
            },
            {.backend = "shm"});
}

TEST(ShmMessages, MoveWhileTheSenderIsInACollective) {
  run_ranks(2,
            [](World& world) {
              const auto group = world.group();
              auto big = at::ones({1000003}), small = at::ones({1});
              if (world.rank() == 0) {
                auto sent = send_async(group, big, 1);
                all_reduce(group, small);
                sent.wait();
              } else {
                auto got = at::zeros({1000003});
                recv(group, got, 0);
                all_reduce(group, small);
                EXPECT_TRUE(at::equal(got, big));
              }
            },
            {.backend = "shm"});
}

/// Memory whose tensor can be seen to be freed, and that stays readable then: what is written later shows.
class WatchedMemory {
 public:
  explicit WatchedMemory(int64_t length) : values_(static_cast<size_t>(length), -1.0f) {}
  at::Tensor tensor() {
    return at::from_blob(values_.data(), {static_cast<int64_t>(values_.size())}, [this](void*) { freed_ = true; });
  }
  at::Tensor contents() { return at::from_blob(values_.data(), {static_cast<int64_t>(values_.size())}); }
  bool freed() const { return freed_; }
  bool freed_soon() const {
    for (int i = 0; i < 1000 && !freed_; ++i) std::this_thread::sleep_for(10ms);
    return freed_;
  }

 private:
  std::vector<float> values_;
  std::atomic<bool> freed_ = false;
};

TEST(ShmMessages, ThatNobodyWaitsForKeepTheirTensors) {
  for (const int64_t length : {1000, 1000003}) {  // a message that fits into the ring, and one that does not
    run_ranks(2,
              [length](World& world) {
                const auto group = world.group();
                const auto sent = ramp(7, length, at::kFloat);
                WatchedMemory memory(length);
                if (world.rank() == 0) memory.contents().copy_(sent);
                if (world.rank() == 1) {
                  (void)recv_async(group, memory.tensor(), 0, 1);
                  EXPECT_FALSE(memory.freed()) << "what comes later would be written over whatever is there then";
                }
                barrier(group);
                if (world.rank() == 0) {
                  (void)send_async(group, memory.tensor(), 1, 1);
                  send(group, sent, 1, 2);
                } else {
                  auto got = at::empty({length});
                  recv(group, got, 0, 2);
                  EXPECT_TRUE(same_bits(got, sent)) << "the dropped message takes its own place, not the next one's";
                  EXPECT_TRUE(same_bits(memory.contents(), sent));
                }
                EXPECT_TRUE(memory.freed_soon());
              },
              {.backend = "shm"});
  }
}

TEST(ShmMessages, OfAnotherSizeAreRefused) {
  EXPECT_THAT(
      [] {
        run_ranks(2,
                  [](World& world) {
                    auto tensor = at::zeros({4});
                    if (world.rank() == 0) send(world.group(), tensor, 1, 3);
                    if (world.rank() == 1) recv(world.group(), tensor.narrow(0, 0, 2), 0, 3);
                  },
                  {.backend = "shm"});
      },
      ::testing::ThrowsMessage<CommError>(HasSubstr("recv of group world, rank 1 of 2: the message of tag 3 has 16 bytes where 8 are received")));
}

std::string refusal_in_group(const std::function<void(const Group&)>& body) {
  try {
    run_ranks(2, [&](World& world) { body(world.group()); }, {.timeout = 500ms, .backend = "shm"});
  } catch (const CommError& error) {
    return error.what();
  }
  return "nothing";
}

TEST(ShmRefuses, WhatItCannotReduceAndWhatDisagrees) {
  EXPECT_THAT(refusal_in_group([](const Group& group) { all_reduce(group, at::zeros({4}, at::kFloat8_e4m3fn)); }),
              HasSubstr("shared memory moves Float8_e4m3fn but does not reduce it; reduce it as bfloat16 or float32"));
  EXPECT_THAT(refusal_in_group([](const Group& group) { all_reduce(group, at::zeros({4}, at::kComplexFloat), Op::Max); }),
              HasSubstr("complex numbers by sum alone"));
  EXPECT_THAT(refusal_in_group([](const Group& group) { all_reduce(group, at::zeros({4 + group.rank()})); }),
              AllOf(HasSubstr("calls all_reduce (sum of float32) of 20 bytes"), HasSubstr("calls all_reduce (sum of float32) of 16 bytes")));
  EXPECT_THAT(refusal_in_group([](const Group& group) {
                if (group.rank() == 0) std::this_thread::sleep_for(1s);
                barrier(group);
              }),
              AllOf(HasSubstr("barrier of group world, rank 1 of 2: timed out after "), HasSubstr(" s waiting for rank 0")));
}

TEST(ShmEmpty, IsSharedAmongProcessesAndCounted) {
  run_rank_processes(
      2, "ShmEmpty.IsSharedAmongProcessesAndCounted",
      [](World& world) {
        const auto group = world.group();
        MemoryTracker tracker;
        const TrackMemory tracking(tracker);
        {
          const MemoryScope scope(MemoryCategory::Gradients);
          const auto buffer = empty(group, {500, 1001});
          ASSERT_TRUE(group.engine()->empty(1, at::TensorOptions()).defined());
          EXPECT_EQ(tracker.current(MemoryCategory::Gradients), 500 * 1001 * 4);
          tracker.retag(buffer, MemoryCategory::Comm);
          EXPECT_EQ(tracker.current(MemoryCategory::Comm), 500 * 1001 * 4);
          buffer.copy_(ramp(world.rank(), 500 * 1001, at::kFloat).view({500, 1001}));
          all_reduce(group, buffer);
          EXPECT_TRUE(same_bits(buffer.view(-1), reference(2, 500 * 1001, at::kFloat, Op::Sum)));
          auto plain = ramp(world.rank(), 500 * 1001, at::kFloat);  // staged: the same bits
          all_reduce(group, plain);
          EXPECT_TRUE(same_bits(buffer.view(-1), plain));
          EXPECT_EQ(empty(group, {0, 3}).numel(), 0);
        }
        EXPECT_EQ(tracker.current(MemoryCategory::Comm), 0);
        barrier(group);
      },
      60, "shm");
}

TEST(ShmProcesses, ReduceAsThreadsDo) {
  run_rank_processes(3, "ShmProcesses.ReduceAsThreadsDo", [](World& world) { expect_reductions(world, {1, 1000, 70001 * 3}); }, 60, "shm");
}

/// Rank 1 has addresses for memory of its own, and none for that of others.
TEST(ShmProcesses, StageTogetherWhereOneCannotMapTheOthers) {
  run_rank_processes(
      3, "ShmProcesses.StageTogetherWhereOneCannotMapTheOthers",
      [](World& world) {
        if (world.rank() == 1) {
          rlim_t pages = 0;
          std::ifstream("/proc/self/statm") >> pages;
          const auto page = static_cast<rlim_t>(::sysconf(_SC_PAGESIZE)), memory = static_cast<rlim_t>(::sysconf(_SC_PHYS_PAGES)) * page;
          const rlimit limit{pages * page + memory / 2, RLIM_INFINITY};
          ASSERT_EQ(::setrlimit(RLIMIT_AS, &limit), 0);
        }
        const auto group = world.group();
        for (int i = 0; i < 3; ++i) {
          auto buffer = empty(group, {300, 1001});
          buffer.copy_(ramp(world.rank(), 300 * 1001, at::kFloat).view({300, 1001}));
          all_reduce(group, buffer);
          EXPECT_TRUE(same_bits(buffer, reference(3, 300 * 1001, at::kFloat, Op::Sum).view({300, 1001})));
          auto dealt = at::empty({300, 1001});
          all_to_all(group, dealt, buffer.fill_(float(world.rank())));
          for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(dealt.narrow(0, 100 * rank, 100).eq(rank).all().item<bool>());
        }
      },
      60, "shm");
}

TEST(ShmEmpty, IsPlainMemoryAmongThreads) {
  run_ranks(2, [](World& world) { EXPECT_EQ(empty(world.group(), {3, 4}, at::kDouble).sizes(), (std::vector<int64_t>{3, 4})); }, {.backend = "shm"});
  EXPECT_EQ(empty(Group::self(), {0}).numel(), 0);
}

}  // namespace
}  // namespace tessera::comm
