#include <cmath>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/algorithms/choice.h"
#include "tessera/comm/algorithms/execute.h"
#include "tessera/comm/algorithms/message_plan.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/backends/record.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/algorithm.h"
#include "tessera/comm/decorators/standard.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tessera/core/rng.h"
#include "tessera/memory/memory.h"

namespace tessera::comm {
namespace {

bool equal_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() != b.numel() || a.scalar_type() != b.scalar_type()) return false;
  return a.numel() == 0 || a.contiguous().view(-1).view(at::kByte).equal(b.contiguous().view(-1).view(at::kByte));
}

// Small whole numbers that differ by rank: sums are exact, so every order gives the same bits.
at::Tensor scrambled(int rank, at::IntArrayRef shape, at::ScalarType dtype = at::kFloat) {
  return (at::arange(c10::multiply_integers(shape), at::kLong) * 3 % 7 + rank).reshape(shape).to(dtype);
}

// Worlds with a choice run over gloo, and over shm where this build has it.
std::vector<std::string> message_backends() {
  std::vector<std::string> names{"gloo"};
  if (has_engine("shm")) names.push_back("shm");
  return names;
}

// One group over the engine and one over plans, made of the same ranks.
struct Pair {
  Group engine, planned;
};

Pair make_pair_of(World& world, const std::string& algorithm, std::vector<int> hosts = {}) {
  auto engine = world.group();
  WorldOptions options;
  options.algorithm = algorithm;
  auto info = GroupInfo{.name = "planned", .rank = world.rank(), .size = world.size(), .timeout = std::chrono::seconds(60)};
  auto choice = std::make_shared<const AlgorithmChoice>(options);
  return {engine, Group(info, make_algorithm_engine(std::move(choice), std::move(hosts), info, engine.engine()))};
}

void compare(const Pair& groups, const std::function<at::Tensor(const Group&)>& collective, const std::string& what) {
  const auto expected = collective(groups.engine), actual = collective(groups.planned);
  EXPECT_TRUE(equal_bits(actual, expected)) << what << " on rank " << groups.engine.rank() << "\n" << actual << "\nexpected\n" << expected;
}

// What the op leaves on this rank, for one length of the whole (or of a part).
at::Tensor result_of(const Group& group, const std::string& op, int64_t length, int root, Op reduction = Op::Sum, at::ScalarType dtype = at::kFloat) {
  const int n = group.size(), rank = group.rank();
  const auto options = at::TensorOptions(dtype);
  if (op == "all_reduce" || op == "reduce" || op == "broadcast") {
    auto tensor = scrambled(rank, {length}, dtype);
    if (op == "all_reduce") all_reduce(group, tensor, reduction);
    if (op == "reduce") reduce(group, tensor, root, reduction);
    if (op == "broadcast") broadcast(group, tensor, root);
    return op == "reduce" && rank != root ? at::Tensor(at::zeros({0}, options)) : tensor;
  }
  if (op == "all_gather") {
    auto out = at::zeros({n * length, 2}, options);
    all_gather(group, out, scrambled(rank, {length, 2}, dtype));
    return out;
  }
  if (op == "reduce_scatter") {
    auto out = at::zeros({length}, options);
    reduce_scatter(group, out, scrambled(rank, {n * length}, dtype), reduction);
    return out;
  }
  if (op == "gather") {
    auto out = rank == root ? at::zeros({n * length}, options) : at::Tensor();
    gather(group, out, scrambled(rank, {length}, dtype), root);
    return rank == root ? out : at::zeros({0}, options);
  }
  if (op == "scatter") {
    auto out = at::zeros({length}, options);
    scatter(group, out, rank == root ? scrambled(rank, {n * length}, dtype) : at::Tensor(), root);
    return out;
  }
  if (op == "all_to_all") {
    auto out = at::zeros({n * length, 2}, options);
    all_to_all(group, out, scrambled(rank, {n * length, 2}, dtype));
    return out;
  }
  barrier(group);
  return at::zeros({0}, options);
}

struct Ranks : ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Of, Ranks, ::testing::Values(2, 3, 5, 8));

TEST_P(Ranks, EveryAlgorithmGivesTheEnginesResult) {
  const int n = GetParam();
  for (const auto& backend : message_backends()) {
    run_ranks(n,
              [n](World& world) {
                for (const auto& op : planned_ops()) {
                  for (const auto& algorithm : algorithms_for(op)) {
                    std::vector<int> hosts;
                    for (int rank = 0; rank < n; ++rank) hosts.push_back(rank / 2);  // the last one is alone where n is odd
                    const auto groups = make_pair_of(world, op + "=" + algorithm, hosts);
                    for (const int64_t length : {0, 1, 101}) {
                      const auto what = op + " by " + algorithm + " of " + std::to_string(length);
                      compare(groups, [&](const Group& group) { return result_of(group, op, length, n - 1); }, what);
                    }
                  }
                }
              },
              {.backend = backend});
  }
}

TEST_P(Ranks, EveryDtypeAndReduction) {
  const int n = GetParam();
  run_ranks(n, [n](World& world) {
    for (const std::string algorithm : {"ring", "halving_doubling", "double_binary_tree"}) {
      const auto groups = make_pair_of(world, "all_reduce=" + algorithm);
      for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte}) {
        for (const auto op : {Op::Sum, Op::Min, Op::Max}) {
          compare(groups, [&](const Group& group) { return result_of(group, "all_reduce", 2 * n + 1, 0, op, dtype); }, algorithm);
        }
      }
      auto product = at::full({n + 2}, 2.0);
      all_reduce(groups.planned, product, Op::Product);
      EXPECT_TRUE(product.equal(at::full({n + 2}, std::pow(2.0, n))));
    }
    for (const auto dtype : {at::kBool, at::kShort, at::kComplexFloat, at::kFloat8_e4m3fn}) {  // what is only moved
      const auto groups = make_pair_of(world, "all_gather=bruck,all_to_all=pairwise,broadcast=binomial_tree");
      for (const std::string op : {"all_gather", "all_to_all", "broadcast"}) {
        compare(groups, [&](const Group& group) { return result_of(group, op, 3, 0, Op::Sum, dtype); }, op);
      }
    }
  });
}

// Numbers whose sum depends on the order: ranks must agree on it bit by bit, and each run with itself.
TEST_P(Ranks, AllRanksGetTheSameBits) {
  const int n = GetParam();
  run_ranks(n, [n](World& world) {
    for (const auto& algorithm : algorithms_for("all_reduce")) {
      const auto group = make_pair_of(world, algorithm, std::vector<int>(n, 0)).planned;
      for (const auto dtype : {at::kFloat, at::kBFloat16}) {
        auto normal = at::empty({n, 257});
        CounterRng(1, "addends").fill_normal(normal.mutable_data_ptr<float>(), 0, normal.numel(), 0, 1);
        const auto all = normal.to(dtype);
        auto sum = all[world.rank()].clone(), again = sum.clone();
        all_reduce(group, sum);
        all_reduce(group, again);
        EXPECT_TRUE(equal_bits(sum, again));
        auto from_root = sum.clone();
        broadcast(world.group(), from_root, 0);
        EXPECT_TRUE(equal_bits(sum, from_root)) << algorithm;
        EXPECT_TRUE(at::allclose(sum.to(at::kFloat), all.to(at::kFloat).sum(0), dtype == at::kFloat ? 1e-5 : 4e-2, dtype == at::kFloat ? 1e-5 : 1e-1))
            << algorithm;
      }
      // The least of +0 and -0 is whichever stands first.
      auto zero = at::full({3}, world.rank() % 2 == 0 ? 0.0F : -0.0F);
      all_reduce(group, zero, Op::Min);
      auto from_root = zero.clone();
      broadcast(world.group(), from_root, 0);
      EXPECT_TRUE(equal_bits(zero, from_root)) << algorithm;
    }
  });
}

TEST_P(Ranks, UnevenRowsGoPairwiseAndElseByTheEngine) {
  const int n = GetParam();
  run_ranks(n, [n](World& world) {
    for (const std::string algorithm : {"pairwise", "direct", "bruck"}) {
      const auto groups = make_pair_of(world, "all_to_all=" + algorithm);
      std::vector<int64_t> to(n), from(n);
      int64_t rows = 0, arrivals = 0;
      for (int other = 0; other < n; ++other) {
        rows += to[other] = (world.rank() + 2 * other) % 3;
        arrivals += from[other] = (other + 2 * world.rank()) % 3;
      }
      compare(
          groups,
          [&](const Group& group) {
            auto out = at::zeros({arrivals, 2});
            all_to_all(group, out, scrambled(world.rank(), {rows, 2}), from, to);
            return out;
          },
          algorithm);
    }
  });
}

// Rank 0 gives equal parts each time, and gets uneven ones: calls that are alike but for what comes.
TEST(Executor, RowsThatComeAreNotThoseOfTheCallBefore) {
  run_ranks(2, [](World& world) {
    const auto groups = make_pair_of(world, "all_to_all=pairwise");
    for (const int64_t rows : {3, 1}) {  // from rank 1 to rank 0; the rest of its four it keeps
      const bool first = world.rank() == 0;
      const std::vector<int64_t> to = first ? std::vector<int64_t>() : std::vector<int64_t>{rows, 4 - rows};
      const std::vector<int64_t> from = first ? std::vector<int64_t>{2, rows} : std::vector<int64_t>{2, 4 - rows};
      compare(
          groups,
          [&](const Group& group) {
            auto out = at::zeros({from[0] + from[1], 2});
            all_to_all(group, out, scrambled(world.rank(), {4, 2}), from, to);
            return out;
          },
          "pairwise");
    }
  });
}

TEST(Executor, ManyAtOnceAreDoneInOrder) {
  run_ranks(3, [](World& world) {
    const auto groups = make_pair_of(world, "all_reduce=ring,broadcast=binomial_tree");
    std::vector<at::Tensor> tensors;
    std::vector<Pending> pending;
    for (int i = 0; i < 20; ++i) {
      tensors.push_back(scrambled(world.rank() + i, {31}));
      pending.push_back(all_reduce_async(groups.planned, tensors.back()));
    }
    auto root = scrambled(world.rank(), {5});
    broadcast(groups.planned, root, 1);  // waits its turn
    auto gathered = at::zeros({3});
    all_gather(groups.planned, gathered, at::full({1}, static_cast<float>(world.rank())));  // the engine's own
    for (auto& p : pending) p.wait();
    for (int i = 0; i < 20; ++i) EXPECT_TRUE(tensors[i].equal(scrambled(i, {31}) + scrambled(i + 1, {31}) + scrambled(i + 2, {31})));
    EXPECT_TRUE(root.equal(scrambled(1, {5})));
    EXPECT_TRUE(gathered.equal(at::arange(3, at::kFloat)));
  });
}

TEST(Executor, GathersAndScattersInPlace) {
  run_ranks(3, [](World& world) {
    const auto group = make_pair_of(world, "all_gather=ring,reduce_scatter=ring").planned;
    auto whole = at::zeros({6});
    whole.narrow(0, 2 * world.rank(), 2).fill_(world.rank() + 1);
    all_gather(group, whole, whole.narrow(0, 2 * world.rank(), 2));
    EXPECT_TRUE(whole.equal(at::tensor({1.0F, 1.0F, 2.0F, 2.0F, 3.0F, 3.0F})));
    auto summed = whole.narrow(0, 2 * world.rank(), 2);
    reduce_scatter(group, summed, whole);
    EXPECT_TRUE(summed.equal(at::full({2}, 3.0F * static_cast<float>(world.rank() + 1))));
  });
}

TEST(Executor, AFailedPeerEndsThePlanWithItsCause) {
  try {
    run_ranks(3, [](World& world) {
      const auto group = make_pair_of(world, "all_reduce=ring").planned;
      if (world.rank() == 1) throw ConfigError("out of disk");
      auto tensor = scrambled(world.rank(), {5});
      all_reduce(group, tensor);
    });
    FAIL() << "nothing was thrown";
  } catch (const ConfigError& error) {
    EXPECT_STREQ(error.what(), "rank 1: out of disk");
  }
}

// The scratch of the header's comment, and that the dry world holds as much.
TEST(Scratch, IsWhatADryRunCounts) {
  for (const std::string algorithm : {"ring", "bidirectional_ring", "recursive_doubling", "halving_doubling", "binomial_tree", "double_binary_tree"}) {
    constexpr int kRanks = 4;
    constexpr int64_t kElements = 1024;
    WorldOptions options{.backend = "gloo", .algorithm = algorithm};
    int64_t planned = 0;
    {
      MemoryTracker tracker;
      const TrackMemory track(tracker);
      const auto world = World::dry(kRanks, 1, std::make_shared<Recorder>(), options);
      const auto tensor = at::empty({kElements}, at::kMeta);
      tracker.reset_peak();
      const auto before = tracker.current();
      all_reduce(world.group(), tensor);
      planned = tracker.peak() - before;
    }
    const std::map<std::string, int64_t> documented{{"ring", kElements / kRanks},      {"bidirectional_ring", 2 * kElements / kRanks},
                                                    {"recursive_doubling", kElements}, {"halving_doubling", kElements / 2},
                                                    {"binomial_tree", kElements},      {"double_binary_tree", kElements}};
    EXPECT_LE(planned, 4 * documented.at(algorithm)) << algorithm;
    run_ranks(kRanks, [&](World& world) {
      const auto group = make_pair_of(world, algorithm).planned;
      const auto tensor = at::zeros({kElements});
      MemoryTracker tracker;
      const TrackMemory track(tracker);
      all_reduce(group, tensor);
      if (world.rank() == 1) EXPECT_EQ(tracker.peak_by_category()[static_cast<int>(MemoryCategory::Comm)], planned) << algorithm;
    });
  }
}

}  // namespace
}  // namespace tessera::comm
