#include "tessera/comm/backends/two_level/two_level.h"

#include <future>
#include <numeric>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/by_device.h"
#include "tessera/comm/backends/host_identity.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/backends/work_queue.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tests/comm/values.h"

namespace tessera::comm {
namespace {

using namespace testing_support;
using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Hosts, AreNumberedByTheirFirstMember) {
  const Hosts hosts({"b", "a", "b", "c", "b"});
  EXPECT_EQ(hosts.count(), 3);
  EXPECT_EQ(hosts.size(), 5);
  EXPECT_THAT(hosts.members(0), ElementsAre(0, 2, 4));
  EXPECT_THAT(hosts.members(1), ElementsAre(1));
  EXPECT_EQ(hosts.leader(2), 3);
  EXPECT_EQ(hosts.host(4), 0);
  EXPECT_EQ(hosts.local_rank(4), 2);
  EXPECT_EQ(hosts.most_members(), 3);
  EXPECT_FALSE(hosts.even());
  EXPECT_FALSE(hosts.adjacent(0));
  EXPECT_TRUE(hosts.adjacent(1));
  EXPECT_THAT(hosts.across(0), ElementsAre(0, 1, 3));
}

TEST(Hosts, AreEvenWhereAllHaveTheSameNumber) {
  const Hosts hosts({"a", "b", "b", "a"});
  EXPECT_TRUE(hosts.even());
  EXPECT_THAT(hosts.across(1), ElementsAre(3, 2));
  EXPECT_TRUE(Hosts({"a"}).even());
}

TEST(HostIdentity, IsThatOfTheHostNotOfTheProcess) {
  EXPECT_EQ(host_identity(), host_identity());
  EXPECT_THAT(host_identity(), AllOf(HasSubstr("/net:"), HasSubstr("/shm:"), Not(HasSubstr("none"))));
}

TEST(WorkQueue, RunsInOrderAndAtOnceWhereNobodyIsBefore) {
  WorkQueue queue;
  std::vector<int> order;
  const auto caller = std::this_thread::get_id();
  std::thread::id ran;
  queue.run([&] { ran = std::this_thread::get_id(), order.push_back(0); }, /*async=*/false)->wait();
  EXPECT_EQ(ran, caller);
  std::promise<void> go;
  const auto slow = queue.run([&] { go.get_future().wait(), order.push_back(1); }, true);
  const auto next = queue.run([&] { ran = std::this_thread::get_id(), order.push_back(2); }, false);
  EXPECT_FALSE(next->isCompleted());
  go.set_value();
  next->wait();
  EXPECT_NE(ran, caller);
  EXPECT_THAT(order, ElementsAre(0, 1, 2));
  EXPECT_THROW(queue.run([] { throw CommError("broken link"); }, true)->wait(), std::runtime_error);
}

TEST(WorkQueue, AbortEndsWhatHasNotBegun) {
  WorkQueue queue;
  std::promise<void> begun, go;
  const auto slow = queue.run([&] { begun.set_value(), go.get_future().wait(); }, true);
  const auto next = queue.run([] { FAIL() << "ran after the abort"; }, true);
  begun.get_future().wait();
  queue.abort();
  EXPECT_THROW(next->wait(), std::runtime_error);
  EXPECT_THROW(queue.run([] { FAIL() << "ran after the abort"; }, false)->wait(), std::runtime_error);
  go.set_value();
  EXPECT_TRUE(slow->wait());
}

class TwoLevel : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  int size() const { return static_cast<int>(GetParam().size()); }
  void run(const std::function<void(World&)>& body) const { run_ranks(size(), body, {.timeout = 20s, .backend = "auto", .hosts = GetParam()}); }
};
INSTANTIATE_TEST_SUITE_P(Maps, TwoLevel,
                         ::testing::Values(std::vector<int>{0, 0}, std::vector<int>{0, 1}, std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 1, 0},
                                           std::vector<int>{0, 1, 1, 0}, std::vector<int>{0, 0, 0, 1, 2}, std::vector<int>{2, 0, 1, 0, 1, 2, 0, 1}),
                         [](const auto& info) {
                           std::string name;
                           for (const int host : info.param) name += std::to_string(host);
                           return name;
                         });

TEST_P(TwoLevel, UsesWhatTheHostsAllow) {
  const Hosts hosts([&] {
    std::vector<std::string> names;
    for (const int host : GetParam()) names.push_back(std::to_string(host));
    return names;
  }());
  const auto expected = hosts.count() == 1 ? "shm" : hosts.count() == size() ? "gloo" : "two_level";
  run([&](World& world) {
    const auto undecorated = world.group().engine()->name();
    EXPECT_EQ(undecorated, expected);
  });
}

TEST_P(TwoLevel, AllReduceOfEveryOpAndLength) {
  const int n = size();
  run([n](World& world) {
    const auto group = world.group();
    for (const int64_t length : {0, 1, 7, 4096, 10007}) {
      for (const auto dtype : {at::kFloat, at::kBFloat16, at::kLong}) {
        auto sum = values(group.rank(), {length}, dtype);
        all_reduce(group, sum);
        expect_equal(sum, sum_over(n, {length}, dtype));
      }
      auto most = values(group.rank(), {length}), least = most.clone(), product = at::full({length}, 2.0f);
      all_reduce(group, most, Op::Max);
      all_reduce(group, least, Op::Min);
      all_reduce(group, product, Op::Product);
      expect_equal(most, values(n - 1, {length}));
      expect_equal(least, values(0, {length}));
      expect_equal(product, at::full({length}, std::pow(2.0f, n)));
    }
  });
}

/// As on one host (Collectives.CountAsWritesWhereTheCallerWaits), whatever collectives it is made of.
TEST_P(TwoLevel, AMaximumWithANaNIsNaN) {
  run([&](World& world) {
    for (const int64_t length : {7, 10000}) {
      for (int where = 0; where < size(); ++where) {
        auto most = at::full({length}, world.rank() == where ? NAN : float(world.rank()));
        all_reduce(world.group(), most, Op::Max);
        EXPECT_TRUE(most.isnan().all().item<bool>()) << "on rank " << where;
      }
    }
  });
}

TEST_P(TwoLevel, CountsWritesWhereTheCallerWaits) {
  run([n = size()](World& world) {
    const auto group = world.group();
    const at::Tensor out = at::zeros({n});
    const auto counts = [](const at::Tensor& tensor, const std::function<void()>& call) {
      const int64_t before = tensor._version();
      call();
      return tensor._version() - before;
    };
    EXPECT_EQ(counts(out, [&] { all_reduce_async(group, out).wait(); }), 0);
    EXPECT_EQ(counts(out, [&] { broadcast_async(group, out, 0).wait(); }), 0);
    EXPECT_EQ(counts(out, [&] { all_reduce(group, out); }), 1);
  });
}

TEST_P(TwoLevel, EveryRankGetsTheSameBits) {
  const int n = size();
  std::vector<at::Tensor> sums(n);
  run([&](World& world) {
    auto& sum = sums[world.rank()];
    at::manual_seed(0);
    sum = at::sin(at::arange(9001, at::kFloat) * (world.rank() + 1));
    all_reduce(world.group(), sum);
  });
  for (int rank = 1; rank < n; ++rank) EXPECT_TRUE(sums[rank].equal(sums[0])) << "rank " << rank;
}

TEST_P(TwoLevel, ReduceAndBroadcastFromEveryRoot) {
  const int n = size();
  run([n](World& world) {
    for (int root = 0; root < n; ++root) {
      auto tensor = values(world.rank(), {5, 3});
      reduce(world.group(), tensor, root);
      if (world.rank() == root) expect_equal(tensor, sum_over(n, {5, 3}));
      auto shared = values(world.rank(), {4}, at::kShort);
      broadcast(world.group(), shared, root);
      expect_equal(shared, values(root, {4}, at::kShort));
    }
  });
}

TEST_P(TwoLevel, AllGatherInGroupOrder) {
  const int n = size();
  run([n](World& world) {
    for (const auto dtype : {at::kFloat, at::kBool, at::kComplexDouble}) {
      for (const int64_t rows : {0, 1, 3}) {
        auto out = at::empty({n * rows, 2}, at::TensorOptions(dtype));
        all_gather(world.group(), out, values(world.rank(), {rows, 2}, dtype));
        for (int rank = 0; rank < n; ++rank) expect_equal(out.narrow(0, rank * rows, rows), values(rank, {rows, 2}, dtype));
      }
    }
  });
}

TEST_P(TwoLevel, ReduceScatterLeavesEachItsPart) {
  const int n = size();
  run([n](World& world) {
    for (const int64_t rows : {0, 1, 3}) {
      const auto in = values(world.rank(), {n * rows, 2});
      auto out = at::empty({rows, 2});
      reduce_scatter(world.group(), out, in);
      expect_equal(out, sum_over(n, {n * rows, 2}).narrow(0, world.rank() * rows, rows));
      expect_equal(in, values(world.rank(), {n * rows, 2}));
    }
  });
}

TEST_P(TwoLevel, GatherScatterAndAllToAll) {
  const int n = size();
  run([n](World& world) {
    const int rank = world.rank();
    for (const int root : {0, n - 1}) {
      auto whole = at::empty({n, 2});
      gather(world.group(), rank == root ? whole : at::Tensor(), values(rank, {1, 2}), root);
      if (rank == root) {
        for (int other = 0; other < n; ++other) expect_equal(whole.narrow(0, other, 1), values(other, {1, 2}));
      }
      auto part = at::empty({1, 3});
      scatter(world.group(), part, rank == root ? values(5, {n, 3}) : at::Tensor(), root);
      expect_equal(part, values(5, {n, 3}).narrow(0, rank, 1));
    }
    auto dealt = at::empty({n}, at::kLong);
    all_to_all(world.group(), dealt, at::arange(n) + 100 * rank);
    expect_equal(dealt, at::arange(n) * 100 + rank);
  });
}

TEST_P(TwoLevel, MessagesBesideCollectives) {
  const int n = size();
  run([n](World& world) {
    const int rank = world.rank(), next = (rank + 1) % n, previous = (rank + n - 1) % n;
    auto sum = at::ones({50000});
    auto pending = all_reduce_async(world.group(), sum);
    auto received = at::empty({40000});
    auto sent = send_async(world.group(), at::full({40000}, float(rank)), next, 3);  // everyone sends first
    recv(world.group(), received, previous, 3);
    sent.wait();
    expect_equal(received, at::full({40000}, float(previous)));
    pending.wait();
    expect_equal(sum, at::full({50000}, float(n)));
    barrier(world.group());
  });
}

// Posted before a reduce or sent before it: a message goes to whom it was meant for, and a root gets its sum.
TEST_P(TwoLevel, AReduceTakesNoMessageOfTheProgram) {
  const int n = size();
  run([n](World& world) {
    const auto group = world.group();
    const int rank = world.rank();
    for (int root = 0; root < n; ++root) {
      for (int sender = 0; sender < n; ++sender) {
        if (sender == root) continue;
        for (const bool sent_first : {false, true}) {
          const auto message = at::full({5, 3}, 100.0f + float(sender)), got = at::zeros({5, 3}), sum = values(rank, {5, 3});
          Pending sent, coming;
          if (rank == sender && sent_first) sent = send_async(group, message, root);
          if (rank == root && !sent_first) coming = recv_async(group, got, sender);
          reduce(group, sum, root);
          if (rank == sender && !sent_first) sent = send_async(group, message, root);
          if (rank == root && sent_first) coming = recv_async(group, got, sender);
          sent.wait();
          coming.wait();
          if (rank != root) continue;
          expect_equal(sum, sum_over(n, {5, 3}));
          expect_equal(got, message);
        }
      }
    }
  });
}

TEST_P(TwoLevel, AsynchronousCollectivesOfSeveralGroups) {
  const int n = size();
  run([n](World& world) {
    std::vector<int> all(n);
    std::iota(all.rbegin(), all.rend(), 0);
    const auto reversed = world.subgroup(all, "reversed");
    std::vector<at::Tensor> tensors;
    std::vector<Pending> pending;
    for (int i = 0; i < 6; ++i) {
      tensors.push_back(at::full({2000 + i}, float(i + world.rank())));
      pending.push_back(all_reduce_async(i % 2 ? reversed : world.group(), tensors.back()));
    }
    auto out = at::empty({n}, at::kLong);
    all_gather(reversed, out, at::full({1}, world.rank(), at::kLong));  // waits behind the others
    expect_equal(out, at::arange(n - 1, -1, -1));
    for (int i = 0; i < 6; ++i) {
      pending[i].wait();
      expect_equal(tensors[i], at::full({2000 + i}, float(n * i + n * (n - 1) / 2)));
    }
  });
}

TEST(TwoLevelFailure, EndsRanksThatWait) {
  for (const auto& hosts : {std::vector<int>{0, 0, 1, 1}, std::vector<int>{0, 1, 0}}) {
    const auto start = std::chrono::steady_clock::now();
    std::string seen;
    EXPECT_THROW(run_ranks(static_cast<int>(hosts.size()),
                           [&](World& world) {
                             auto tensor = at::ones({5000});
                             all_reduce(world.group(), tensor);
                             if (world.rank() == 1) throw std::runtime_error("out of paper");
                             auto pending = all_reduce_async(world.group(), tensor);
                             try {
                               barrier(world.group());
                             } catch (const CommError& error) {
                               if (world.rank() == 0) seen = error.what();
                               throw;
                             }
                           },
                           {.timeout = 20s, .backend = "auto", .hosts = hosts}),
                 std::runtime_error);
    EXPECT_THAT(seen, AllOf(HasSubstr("group world"), HasSubstr("waited"), HasSubstr("rank 1 failed: out of paper")));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 8s);
  }
}

TEST(TwoLevelFailure, ATimeoutIsThatOfTheGroup) {
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THROW(run_ranks(3,
                         [](World& world) {
                           auto tensor = at::ones({4});
                           if (world.rank() == 0) all_reduce(world.group(), tensor);
                         },
                         {.timeout = 500ms, .backend = "auto", .hosts = {0, 1, 0}}),
               CommError);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 8s);
}

TEST(ByDevice, SendsEachTensorToItsEngine) {
  const auto cpu = std::make_shared<Recorder>(), meta = std::make_shared<Recorder>();
  const GroupInfo info{.name = "both", .rank = 0, .size = 2};
  const Group group(info, make_by_device_engine(make_dry_engine(cpu, info), at::kMeta, make_dry_engine(meta, info)));
  const auto on_meta = at::TensorOptions(at::kMeta);
  for (const auto& options : {at::TensorOptions(), on_meta}) {
    const auto one = at::zeros({2}, options), two = at::zeros({4}, options);
    all_reduce(group, one);
    reduce(group, one, 1);
    broadcast(group, one, 0);
    all_gather(group, two, one);
    reduce_scatter(group, one, two);
    all_to_all(group, two, two);
    gather(group, two, one, 0);
    scatter(group, one, two, 0);
    send(group, one, 1);
    recv(group, one, 1);
  }
  barrier(group);
  const auto ops = [](const Recorder& recorder) {
    std::vector<std::string> names;
    for (const auto& record : recorder.records()) names.push_back(record.op);
    return names;
  };
  auto expected = ops(*meta);
  EXPECT_THAT(expected, ElementsAre("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "scatter", "send", "recv"));
  expected.push_back("barrier");
  EXPECT_EQ(ops(*cpu), expected);
}

}  // namespace
}  // namespace tessera::comm
