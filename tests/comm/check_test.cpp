#include "tessera/comm/decorators/check.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/backends/factory.h"
#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

std::vector<std::string> backends() {
  auto names = engine_names();
  std::erase_if(names, [](const std::string& name) { return name != "gloo" && name != "shm"; });
  return names;
}

/// Backend and number of ranks.
class Check : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  std::string backend() const { return std::get<0>(GetParam()); }
  int n() const { return std::get<1>(GetParam()); }

  void run(const std::function<void(World&)>& body) const { run_ranks(n(), body, {.timeout = 20s, .decorators = {checking()}, .backend = backend()}); }

  /// What each rank's call says went wrong; empty where nothing did.
  std::vector<std::string> errors(const std::function<void(World&)>& body) const {
    std::vector<std::string> texts(n());
    run([&](World& world) {
      try {
        body(world);
      } catch (const CommError& error) {
        texts[world.rank()] = error.what();
      }
    });
    return texts;
  }

  /// "rank 0 asks", "ranks 0-3 ask": all but the last.
  std::string others_ask() const { return n() == 2 ? "rank 0 asks for " : "ranks 0-" + std::to_string(n() - 2) + " ask for "; }
  std::string last_asks() const { return "rank " + std::to_string(n() - 1) + " asks for "; }
  bool last(const World& world) const { return world.rank() == n() - 1; }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Check, ::testing::Combine(::testing::ValuesIn(backends()), ::testing::Values(2, 3, 5)),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param)); });

TEST_P(Check, NamesBothSidesOfDifferentOps) {
  const auto texts = errors([&](World& world) {
    auto tensor = at::ones({32});
    all_reduce(world.group(), tensor);
    const CallSite site(last(world) ? "layers.0" : "head");
    if (last(world)) {
      all_gather(world.group(), at::empty({4 * n(), 8}), at::ones({4, 8}));
    } else {
      all_reduce(world.group(), tensor);
    }
  });
  EXPECT_THAT(texts, Each("collective #2 of world: " + others_ask() + "all_reduce of [32] float32 (head); " + last_asks() + "all_gather of [" +
                          std::to_string(4 * n()) + ", 8] float32 (layers.0)"));
}

TEST_P(Check, ComparesShapeDtypeReductionAndRoot) {
  const auto all_reduce_of = [&](std::vector<int64_t> shape, at::ScalarType dtype, Op op) {
    return [=, this](World& world) {
      if (last(world)) {
        all_reduce(world.group(), at::ones(shape, dtype), op);
      } else {
        all_reduce(world.group(), at::ones({4, 2}));
      }
    };
  };
  const auto expected = [&](const std::string& theirs, const std::string& of_last) {
    return Each("collective #1 of world: " + others_ask() + theirs + "; " + last_asks() + of_last);
  };
  EXPECT_THAT(errors(all_reduce_of({8}, at::kFloat, Op::Sum)), expected("all_reduce of [4, 2] float32", "all_reduce of [8] float32"));
  EXPECT_THAT(errors(all_reduce_of({4, 2}, at::kInt, Op::Sum)), expected("all_reduce of [4, 2] float32", "all_reduce of [4, 2] int32"));
  EXPECT_THAT(errors(all_reduce_of({4, 2}, at::kFloat, Op::Max)), expected("all_reduce of [4, 2] float32", "all_reduce by max of [4, 2] float32"));
  EXPECT_THAT(errors([&](World& world) { broadcast(world.group(), at::ones({3}), last(world) ? 1 : 0); }),
              expected("broadcast from rank 0 of [3] float32", "broadcast from rank 1 of [3] float32"));
  EXPECT_THAT(errors([&](World& world) {
                if (last(world)) {
                  barrier(world.group());
                } else {
                  reduce(world.group(), at::ones({}), 1);
                }
              }),
              expected("reduce to rank 1 of [] float32", "barrier"));
}

/// An engine reduces their bytes, by max and min, which is not what the ranks have asked for.
TEST_P(Check, TruthValuesGoByTheirOwnName) {
  const auto reducing = [&](at::ScalarType dtype, Op op) {
    return [=, this](World& world) { all_reduce(world.group(), at::ones({3}, last(world) ? dtype : at::kBool), last(world) ? op : Op::Sum); };
  };
  const std::string mine = "collective #1 of world: " + others_ask() + "all_reduce of [3] bool; " + last_asks();
  EXPECT_THAT(errors(reducing(at::kByte, Op::Max)), Each(mine + "all_reduce by max of [3] uint8"));
  EXPECT_THAT(errors(reducing(at::kBool, Op::Max)), Each(mine + "all_reduce by max of [3] bool"));
  EXPECT_THAT(errors(reducing(at::kBool, Op::Product)), Each(mine + "all_reduce by product of [3] bool"));
  EXPECT_THAT(errors(reducing(at::kBool, Op::Sum)), Each(""));
}

TEST_P(Check, NamesWhoeverAsksForTheSameTogetherAndLongListsInPart) {
  const auto texts = errors([&](World& world) { all_reduce(world.group(), at::ones({world.rank() + 1})); });
  EXPECT_THAT(texts, Each(HasSubstr("rank 0 asks for all_reduce of [1] float32; rank 1 asks for all_reduce of [2] float32")));
  EXPECT_THAT(texts, Each(n() == 5 ? HasSubstr("[4] float32; and 1 further ways") : HasSubstr("")));
  const auto odd = errors([&](World& world) { all_reduce(world.group(), at::ones({world.rank() % 2 + 1})); });
  const std::string even_ranks = n() == 2 ? "rank 0 asks" : n() == 3 ? "ranks 0, 2 ask" : "ranks 0, 2, 4 ask";
  EXPECT_THAT(odd, Each(HasSubstr(": " + even_ranks + " for all_reduce of [1]")));
}

TEST_P(Check, ComparesTheRowsOfAnAllToAll) {
  // Each gives one row to everybody; the last gives rank 0 two, and rank 0 expects one.
  const auto texts = errors([&](World& world) {
    std::vector<int64_t> to(n(), 1);
    if (last(world)) to[0] = 2;
    const int64_t rows = last(world) ? n() + 1 : n();
    const CallSite site("experts");
    all_to_all(world.group(), at::empty({n(), 3}), at::ones({rows, 3}), {}, to);
  });
  EXPECT_THAT(texts, Each("collective #1 of world: all_to_all of rows [3] float32 (experts): rank " + std::to_string(n() - 1) +
                          " gives rank 0 2 rows, which expects 1"));
}

TEST_P(Check, AnAllToAllGoesByPartsNotByShapes) {
  const auto texts = errors([&](World& world) {
    all_to_all(world.group(), at::zeros({2 * n(), 3}), at::ones({n(), 2, 3}));
    // The first gives two rows to the last, and gets none; who moves nothing has rows of no shape.
    std::vector<int64_t> none(n(), 0), two(n(), 0), from(n(), 0);
    two[n() - 1] = from[0] = 2;
    const bool first = world.rank() == 0;
    all_to_all(world.group(), last(world) ? at::zeros({2, 3}) : at::empty({0}), first ? at::ones({2, 3}) : at::empty({0}), last(world) ? from : none,
               first ? two : none);
  });
  EXPECT_THAT(texts, Each(""));
  const auto wider = errors([&](World& world) {
    const std::vector<int64_t> one(n(), 1);
    const int64_t columns = last(world) ? 4 : 3;
    all_to_all(world.group(), at::empty({n(), columns}), at::ones({n(), columns}), one, one);
  });
  EXPECT_THAT(wider, Each(HasSubstr("which expects")));
}

TEST_P(Check, SaysTheRanksOfTheWorldInASubgroup) {
  const auto texts = errors([&](World& world) {
    std::vector<int> reversed;
    for (int rank = n() - 1; rank >= 0; --rank) reversed.push_back(rank);
    const auto group = world.subgroup(reversed, "tp");
    auto tensor = at::ones({last(world) ? 2 : 1});
    all_reduce(group, tensor);
  });
  EXPECT_THAT(texts, Each(HasSubstr("of tp: " + last_asks() + "all_reduce of [2]")));
}

TEST_P(Check, FindsAnAsynchronousCallWhereItIsMade) {
  const auto texts = errors([&](World& world) {
    auto first = at::ones({4}), second = at::ones({last(world) ? 5 : 4});
    auto pending = all_reduce_async(world.group(), first);
    try {
      auto wrong = all_reduce_async(world.group(), second);
    } catch (const CommError&) {
      pending.wait();  // what was right is done all the same
      EXPECT_EQ(first[0].item<float>(), n());
      throw;
    }
  });
  EXPECT_THAT(texts, Each(HasSubstr("collective #2 of world")));
}

TEST_P(Check, LetsEverythingPassThatAgrees) {
  run([&](World& world) {
    const auto group = world.group();
    const int rank = world.rank();
    auto sum = at::full({3, 2}, float(rank));
    auto pending = all_reduce_async(group, sum);
    auto gathered = at::empty({n(), 2});
    all_gather(group, gathered, at::full({1, 2}, float(rank)));
    pending.wait();
    EXPECT_TRUE(sum.equal(at::full({3, 2}, float(n() * (n() - 1) / 2))));
    EXPECT_TRUE(gathered.select(1, 0).equal(at::arange(n()).to(at::kFloat)));
    std::vector<at::Tensor> outs;
    for (int other = 0; other < n(); ++other) outs.push_back(at::empty({other, 3}));
    all_gather_uneven(group, outs, at::full({rank, 3}, float(rank)));
    EXPECT_TRUE(outs.back().equal(at::full({n() - 1, 3}, float(n() - 1))));
    auto part = at::empty({2});
    reduce_scatter(group, part, at::ones({2 * n()}));
    EXPECT_TRUE(part.equal(at::full({2}, float(n()))));
    auto root_only = rank == 1 ? at::empty({n(), 2}) : at::Tensor();
    gather(group, root_only, at::ones({1, 2}), 1);
    scatter(group, at::empty({1, 2}), root_only, 1);
    // Rank r gives t rows to rank t.
    std::vector<int64_t> to, from(n(), rank);
    for (int other = 0; other < n(); ++other) to.push_back(other);
    auto rows = at::empty({n() * rank});
    all_to_all(group, rows, at::full({n() * (n() - 1) / 2}, float(rank)), from, to);
    EXPECT_TRUE(rows.equal(at::arange(n()).repeat_interleave(rank).to(at::kFloat)));
    barrier(group);
  });
}

TEST_P(Check, MessagesOfEverySizeAndDtypeArriveWhole) {
  run([&](World& world) {
    const int right = (world.rank() + 1) % n(), left = (world.rank() + n() - 1) % n();
    for (const int64_t length : {0, 1, 255, 256, 257, 1280, 1281, 1'500'000}) {  // around the edges of the first parts, and above the largest
      if (length > 2000 && n() > 2) continue;
      for (const auto dtype : {at::kFloat, at::kBool}) {
        const auto values = [&](int rank) { return ((at::arange(length) + rank) % 7).to(dtype); };
        auto got = at::empty({length}, at::TensorOptions(dtype));
        auto receiving = recv_async(world.group(), got, left, 3);
        auto sending = send_async(world.group(), values(world.rank()), right, 3);
        sending.wait();
        receiving.wait();
        EXPECT_TRUE(got.equal(values(left))) << length;
      }
    }
    // One element, whose stride says nothing.
    auto one = at::empty({1, 2}).select(1, 0);
    auto receiving = recv_async(world.group(), one, left, 9);
    send(world.group(), at::full({1, 2}, 5.f).select(1, 1), right, 9);
    receiving.wait();
    EXPECT_EQ(one[0].item<float>(), 5);
    // Received in another order than sent.
    auto first = at::empty({2}), second = at::empty({2, 2});
    auto b = recv_async(world.group(), second, left, 8), a = recv_async(world.group(), first, left, 7);
    auto c = send_async(world.group(), at::full({2}, 7.f), right, 7), d = send_async(world.group(), at::full({2, 2}, 8.f), right, 8);
    for (auto* pending : {&b, &a, &c, &d}) pending->wait();
    EXPECT_EQ(first[0].item<float>(), 7);
    EXPECT_EQ(second[0][0].item<float>(), 8);
  });
}

TEST_P(Check, NamesBothSidesOfAMessage) {
  // Longer, shorter, of another dtype, of another shape and as long.
  const std::vector<std::pair<at::Tensor, std::string>> sent{
      {at::ones({100000}), "[100000] float32"}, {at::ones({2}), "[2] float32"}, {at::ones({8}, at::kInt), "[8] int32"}, {at::ones({4, 2}), "[4, 2] float32"}};
  for (const auto& [tensor, text] : sent) {
    std::string error;
    EXPECT_THROW(run([&, tensor = tensor](World& world) {
                   const CallSite site(world.rank() == 1 ? "layers.1" : "layers.0");
                   if (world.rank() == 1) {
                     send(world.group(), tensor, 0, 5);
                   } else if (world.rank() == 0) {
                     auto received = at::empty({8});
                     try {
                       recv(world.group(), received, 1, 5);
                     } catch (const CommError& caught) {
                       error = caught.what();
                       throw;
                     }
                   }
                 }),
                 CommError);
    EXPECT_EQ(error, "message of world with tag 5: rank 1 sends " + text + " (layers.1); rank 0 expects [8] float32 (layers.0)");
  }
}

TEST(CheckTimeout, IsHowARankEndsThatMakesNoCall) {
  for (const auto& backend : backends()) {
    const auto body = [](World& world) {
      auto tensor = at::ones({4});
      if (world.rank() != 2) all_reduce(world.group(), tensor);
    };
    EXPECT_THROW(run_ranks(3, body, {.timeout = 200ms, .decorators = {checking()}, .backend = backend}), CommError) << backend;
  }
}

}  // namespace
}  // namespace tessera::comm
