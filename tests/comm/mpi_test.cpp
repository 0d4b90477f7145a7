#include <atomic>
#include <memory>
#include <set>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/factory.h"
#include "tessera/comm/backends/mpi/plugin/lane.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/tags.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tests/comm/mpirun.h"
#include "tests/comm/values.h"

namespace tessera::comm {
namespace {

using namespace testing_support;
using namespace std::chrono_literals;
using ::testing::HasSubstr;

void check_sums(const Group& group) {
  const int n = group.size(), rank = group.rank();
  for (const auto dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kInt, at::kLong, at::kByte, at::kShort}) {
    for (const int64_t length : {0, 1, 7, 1000}) {
      auto sum = values(rank, {length}, dtype);
      all_reduce(group, sum);
      expect_equal(sum, sum_over(n, {length}, dtype));
    }
    auto part = at::empty({3, 2}, at::TensorOptions(dtype));
    reduce_scatter(group, part, values(rank, {3 * n, 2}, dtype));
    expect_equal(part, sum_over(n, {3 * n, 2}, dtype).narrow(0, 3 * rank, 3));
  }
  auto most = values(rank, {5}), least = most.clone(), product = at::full({5}, 2.0f);
  all_reduce(group, most, Op::Max);
  all_reduce(group, least, Op::Min);
  all_reduce(group, product, Op::Product);
  expect_equal(most, values(n - 1, {5}));
  expect_equal(least, values(0, {5}));
  expect_equal(product, at::full({5}, std::pow(2.0f, n)));
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    auto with_nan = at::full({2 * n}, rank == 0 ? NAN : float(rank), dtype), part = at::empty({2}, at::TensorOptions(dtype));
    reduce_scatter(group, part, with_nan, Op::Min);
    all_reduce(group, with_nan, Op::Max);
    EXPECT_TRUE(with_nan.isnan().all().item<bool>() && part.isnan().all().item<bool>());
  }
  // Rounded once: 1 + n small numbers, each of which bf16 would drop beside 1.
  auto rounded = at::full({1}, rank == 0 ? 1.0f : 0.00390625f, at::kBFloat16);
  all_reduce(group, rounded);
  expect_equal(rounded, at::full({1}, 1.0f + 0.00390625f * (n - 1)).to(at::kBFloat16));
  EXPECT_THROW(all_reduce(group, at::zeros({2}, at::kComplexFloat)), CommError);
  for (int root = 0; root < n; ++root) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      auto tensor = values(rank, {3}, dtype);
      reduce(group, tensor, root);
      if (rank == root) expect_equal(tensor, sum_over(n, {3}, dtype));
    }
  }
}

void check_moves(const Group& group) {
  const int n = group.size(), rank = group.rank();
  for (const auto dtype : {at::kFloat, at::kBFloat16, at::kBool, at::kFloat8_e4m3fn, at::kComplexFloat, at::kComplexDouble}) {
    for (const int64_t rows : {0, 1, 3}) {
      auto out = at::empty({n * rows, 2}, at::TensorOptions(dtype));
      all_gather(group, out, values(rank, {rows, 2}, dtype));
      for (int other = 0; other < n; ++other) expect_equal(out.narrow(0, other * rows, rows), values(other, {rows, 2}, dtype));
    }
    auto shared = values(rank, {4}, dtype);
    broadcast(group, shared, n - 1);
    expect_equal(shared, values(n - 1, {4}, dtype));
  }
  for (int root = 0; root < n; ++root) {
    auto whole = at::empty({n, 2});
    gather(group, rank == root ? whole : at::Tensor(), values(rank, {1, 2}), root);
    if (rank == root) {
      for (int other = 0; other < n; ++other) expect_equal(whole.narrow(0, other, 1), values(other, {1, 2}));
    }
    auto part = at::empty({1, 3});
    scatter(group, part, rank == root ? values(5, {n, 3}) : at::Tensor(), root);
    expect_equal(part, values(5, {n, 3}).narrow(0, rank, 1));
  }
  // Rank r sends (r + t) % 3 rows to rank t.
  std::vector<int64_t> splits;
  std::vector<at::Tensor> sent, expected;
  for (int other = 0; other < n; ++other) {
    splits.push_back((rank + other) % 3);
    sent.push_back(values(10 * rank + other, {splits.back(), 2}));
    expected.push_back(values(10 * other + rank, {splits.back(), 2}));
  }
  auto dealt = at::empty_like(at::cat(expected));
  all_to_all(group, dealt, at::cat(sent), splits, splits);
  expect_equal(dealt, at::cat(expected));
}

void check_messages(const Group& group) {
  const int n = group.size(), rank = group.rank(), next = (rank + 1) % n, previous = (rank + n - 1) % n;
  auto sum = at::ones({300000});
  auto pending = all_reduce_async(group, sum);
  auto sent = send_async(group, at::full({200000}, float(rank)), next, 3);
  auto first = at::empty({1}), received = at::empty({200000});
  auto late = send_async(group, at::full({1}, 7.0f), next, 9);
  recv(group, first, previous, 9);  // tags, not order
  recv(group, received, previous, 3);
  expect_equal(first, at::full({1}, 7.0f));
  expect_equal(received, at::full({200000}, float(previous)));
  sent.wait();
  late.wait();
  for (const auto give_up = std::chrono::steady_clock::now() + 10s; !pending.done() && std::chrono::steady_clock::now() < give_up;) std::this_thread::yield();
  pending.wait();
  expect_equal(sum, at::full({300000}, float(n)));
  barrier(group);
}

TEST(Mpi, EveryCollectiveInTheWorldAndInGroups) {
  under_mpirun(3, "Mpi.EveryCollectiveInTheWorldAndInGroups", [](World& world) {
    ASSERT_EQ(world.size(), 3);
    std::vector<Group> groups{world.group(), world.subgroup({2, 0, 1}, "turned")};
    if (world.rank() != 1) groups.push_back(world.subgroup({2, 0}, "pair"));
    for (const auto& group : groups) {
      check_sums(group);
      check_moves(group);
      check_messages(group);
    }
  });
}

TEST(MpiLanes, NoTagIsAboveWhatMpiTakes) {
  const auto lane = [](int tag, int most) { return mpi::lane_of({.op = Operation::Send, .peer = 1, .tag = tag}, "pp", most); };
  for (const int tag : {0, 1, 2, 100}) {
    EXPECT_FALSE(lane(tag, 100).of_collectives);
    EXPECT_EQ(lane(tag, 100).tag, tag);
  }
  const auto plan = lane(kPlanTag, 32767), hand_on = lane(kHandOnTag, 32767);
  EXPECT_TRUE(plan.of_collectives && hand_on.of_collectives);
  const std::set<int> apart{mpi::kRootedTag, plan.tag, hand_on.tag};
  EXPECT_EQ(apart.size(), 3);
  EXPECT_GE(*apart.begin(), 0);
  EXPECT_LE(*apart.rbegin(), 32767);
  try {
    lane(101, 100);
    FAIL() << "taken";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(
        error.what(),
        "comm.backend = mpi: send to rank 1 of group pp: tag 101 is above 100, the largest that this MPI takes (MPI_TAG_UB); take fewer micro-batches where "
        "stages of a pipeline send, or set comm.backend = auto");
  }
}

// Collectives made of messages, by a plan and by the engine, beside a caller's messages under the same numbers: none is taken for another.
void check_small_tags(const Group& group) {
  const int n = group.size(), rank = group.rank(), next = (rank + 1) % n, previous = (rank + n - 1) % n;
  std::vector<at::Tensor> came;
  std::vector<Pending> pending;
  for (const int tag : {0, 1, 2, 32767}) {
    came.push_back(at::zeros({4}));
    pending.push_back(recv_async(group, came.back(), previous, tag));
  }
  auto sum = values(rank, {n, 4});
  all_reduce(group, sum);
  expect_equal(sum, sum_over(n, {n, 4}));
  const auto whole = at::empty({n, 4});
  gather(group, rank == 0 ? whole : at::Tensor(), values(rank, {1, 4}), 0);
  for (int other = 0; rank == 0 && other < n; ++other) expect_equal(whole.narrow(0, other, 1), values(other, {1, 4}));
  const auto handed = at::zeros({4});
  const auto coming = group.engine()->start({.op = Operation::Recv, .outputs = {handed}, .peer = previous, .tag = kHandOnTag});
  group.engine()->start({.op = Operation::Send, .inputs = {at::full({4}, -1.0f)}, .peer = next, .tag = kHandOnTag})->wait();
  coming->wait();
  expect_equal(handed, at::full({4}, -1.0f));
  for (const int tag : {0, 1, 2, 32767}) send(group, at::full({4}, float(tag)), next, tag);
  for (auto& one : pending) one.wait();
  for (size_t i = 0; const int tag : {0, 1, 2, 32767}) expect_equal(came[i++], at::full({4}, float(tag)));
}

TEST(Mpi, WhatCollectivesSendNeedsNoLargeTags) {
  if (is_copy()) {
    auto world = World::from_environment({.backend = "mpi", .timeout = 20s, .algorithm = "ring"});
    world.guard([&] {
      const auto group = world.group();
      check_small_tags(group);
      for (const bool sends : {true, false}) {
        try {
          const auto tensor = at::zeros({4});
          sends ? send(group, tensor, 1 - group.rank(), 32768) : recv(group, tensor, 1 - group.rank(), 4194303);
          ADD_FAILURE() << "taken";
        } catch (const ConfigError& error) {
          EXPECT_THAT(error.what(),
                      HasSubstr(sends ? ": tag 32768 is above 32767, the largest that this MPI takes (MPI_TAG_UB)" : ": tag 4194303 is above 32767,"));
        }
      }
      check_small_tags(group);  // a refusal leaves the group whole
    });
    return;
  }
  if (lacks_mpi()) GTEST_SKIP() << "no MPI";
  const auto finished = run_mpirun(2, "Mpi.WhatCollectivesSendNeedsNoLargeTags", least_mpi());
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
}

TEST(Mpi, AFailingRankEndsTheOthersWaits) {
  const std::string name = "Mpi.AFailingRankEndsTheOthersWaits";
  if (is_copy()) {
    auto world = World::from_environment({.backend = "mpi", .timeout = 30s});
    world.guard([&] {
      auto tensor = at::ones({4});
      all_reduce(world.group(), tensor);
      if (world.rank() == 1) throw std::runtime_error("out of paper");
      const auto start = std::chrono::steady_clock::now();
      try {
        all_reduce(world.group(), tensor);
      } catch (const CommError& error) {
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
        std::fprintf(stderr, "SEEN after %.1f s: %s\n", waited.count(), error.what());
        std::this_thread::sleep_for(200ms);  // mpirun ends all once one has failed
        throw;
      }
    });
    return;
  }
  if (lacks_mpi()) GTEST_SKIP() << "no MPI";
  const auto start = std::chrono::steady_clock::now();
  const auto finished = run_mpirun(2, name);
  EXPECT_NE(finished.exit_code, 0);
  EXPECT_THAT(finished.output, HasSubstr("out of paper"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 25s) << finished.output;
}

TEST(Mpi, ATimeoutIsAnErrorAndTheEndIsNotWaitedFor) {
  if (is_copy()) {
    auto world = World::from_environment({.backend = "mpi", .timeout = 20s});
    if (world.rank() == 1) return;
    const auto tensor = at::ones({4});
    const Call call{.op = Operation::AllReduce, .inputs = {tensor}, .outputs = {tensor}, .reduction = Op::Sum, .timeout = 300ms};
    const auto start = std::chrono::steady_clock::now();
    try {
      world.group().engine()->start(call)->wait();
    } catch (const std::exception& error) {
      const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
      std::fprintf(stderr, "%s %s\n", waited < 5s ? "SOON" : "LATE", error.what());
    }
    return;
  }
  if (lacks_mpi()) GTEST_SKIP() << "no MPI";
  const auto start = std::chrono::steady_clock::now();
  const auto finished = run_mpirun(2, "Mpi.ATimeoutIsAnErrorAndTheEndIsNotWaitedFor");
  EXPECT_THAT(finished.output, HasSubstr("SOON timed out after 300 ms"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, 25s) << finished.output;
}

// A gather whose second receive cannot be asked for: what the first one brings comes all the same, into memory that is still its own.
TEST(Mpi, ACallThatFailsKeepsWhatItHasBegun) {
  if (is_copy()) {
    auto world = World::from_environment({.backend = "mpi", .timeout = 20s});
    const auto group = world.group();
    const auto part = at::full({4}, 7.0f), token = at::zeros({1});
    if (world.rank() == 1) {
      recv(group, token, 0);
      gather(group, {}, part, 0);
      send(group, token, 0);
    }
    if (world.rank() != 0) return;
    auto* const memory = new std::vector<float>(4, -1.0f);  // for as long as whoever keeps it
    const auto freed = std::make_shared<std::atomic<bool>>(false);
    auto whole = at::from_blob(memory->data(), {4}, [freed](void*) { *freed = true; });
    const auto larger_than_mpi_counts = at::from_blob(memory->data(), {int64_t{1} << 31}, at::kByte);
    std::string said = "nothing failed";
    try {
      const Call call{.op = Operation::Gather, .inputs = {part}, .outputs = {part.clone(), std::move(whole), larger_than_mpi_counts}, .peer = 0};
      group.engine()->start(call);
    } catch (const std::exception& error) {
      said = error.what();
    }
    const bool kept = !*freed;
    send(group, token, 1);
    recv(group, token, 1);
    std::fprintf(stderr, "%s %g: %s\n", kept && !*freed ? "KEPT" : "FREED", memory->front(), said.c_str());
    return;
  }
  if (lacks_mpi()) GTEST_SKIP() << "no MPI";
  const auto finished = run_mpirun(3, "Mpi.ACallThatFailsKeepsWhatItHasBegun");
  EXPECT_THAT(finished.output, HasSubstr("KEPT 7: MPI moves at most 2147483647 elements"));
}

TEST(Mpi, AutoLearnsTheAddressThroughIt) {
  if (is_copy()) {
    for (int repeat = 0; repeat < 2; ++repeat) {  // one process, two worlds
      auto world = World::from_environment({.timeout = 20s});
      auto sum = at::ones({2});
      all_reduce(world.group(), sum);
      EXPECT_EQ(sum[0].item<float>(), 2);
      EXPECT_TRUE(world.leave());
    }
    return;
  }
  if (lacks_mpi()) GTEST_SKIP() << "no MPI";
  const auto finished = run_mpirun(2, "Mpi.AutoLearnsTheAddressThroughIt");
  EXPECT_EQ(finished.exit_code, 0) << finished.output;
}

}  // namespace
}  // namespace tessera::comm
