#include "tessera/comm/collectives.h"

#include <cmath>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tests/comm/values.h"
#include "tests/test_device.h"

namespace tessera::comm {
namespace {

using namespace testing_support;

// The world sizes at which ranks matter: alone, even, odd, more than cores.
class Collectives : public ::testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  static int size() { return std::get<1>(GetParam()); }
  static void run(const std::function<void(World&)>& body) { run_ranks(size(), body, {.backend = std::get<0>(GetParam())}); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Collectives, ::testing::Combine(::testing::Values("gloo", "shm"), ::testing::Values(1, 2, 3, 5, 8)),
                         [](const auto& info) { return std::get<0>(info.param) + "_" + std::to_string(std::get<1>(info.param)); });

// Distinct small integers: sums are exact in every dtype here.

TEST_P(Collectives, AllReduceOfEveryOpAndLength) {
  const int n = size();
  run([n](World& world) {
    const auto group = world.group();
    for (const int64_t length : {0, 1, 7, 1000}) {
      auto sum = values(group.rank(), {length});
      all_reduce(group, sum);
      expect_equal(sum, sum_over(n, {length}));
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

TEST_P(Collectives, SumsInEveryArithmeticDtype) {
  const int n = size();
  run([n](World& world) {
    for (const auto dtype : {at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte}) {
      auto sum = values(world.rank(), {2, 5}, dtype);
      all_reduce(world.group(), sum);
      expect_equal(sum, sum_over(n, {2, 5}, dtype));
    }
  });
}

TEST_P(Collectives, TruthValuesAreOrAndAnd) {
  const int n = size();
  run([n](World& world) {
    for (const auto& [op, all] : std::vector<std::pair<Op, bool>>{{Op::Sum, false}, {Op::Max, false}, {Op::Product, true}, {Op::Min, true}}) {
      // Said by all, by one rank, by nobody.
      at::Tensor said = at::zeros({3}, at::kBool);
      said[0] = true;
      said[1] = world.rank() == n - 1;
      all_reduce(world.group(), said, op);
      EXPECT_EQ(said.view(at::kByte).to(at::kLong).sum().item<int64_t>(), all && n > 1 ? 1 : 2) << to_string(op);
      EXPECT_TRUE(at::equal(said, at::tensor({1, all && n > 1 ? 0 : 1, 0}, at::kLong).to(at::kBool))) << to_string(op);
    }
  });
}

// Wherever the NaN is, and in whichever part of the tensor.
TEST_P(Collectives, AMinimumOrMaximumWithANaNIsNaN) {
  const int n = size();
  run([n](World& world) {
    const auto group = world.group();
    const auto with_nan = [&](int where, int64_t length, at::ScalarType dtype) {
      auto given = (values(group.rank(), {length}) - 3).to(dtype);
      if (group.rank() == where) given.slice(0, 0, length, 3).fill_(NAN);
      return given;
    };
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      for (int where = 0; where < n; ++where) {
        for (const auto op : {Op::Min, Op::Max}) {
          const int64_t length = 6 * n;
          auto expected = (values(op == Op::Max ? n - 1 : 0, {length}) - 3).to(dtype);
          expected.slice(0, 0, length, 3).fill_(NAN);
          auto all = with_nan(where, length, dtype), at_root = all.clone(), part = at::empty({6}, at::TensorOptions(dtype));
          reduce_scatter(group, part, all, op);
          all_reduce(group, all, op);
          reduce(group, at_root, n - 1, op);
          EXPECT_TRUE(at::allclose(all, expected, 0, 0, /*equal_nan=*/true)) << dtype << " on rank " << where;
          EXPECT_TRUE(at::allclose(part, expected.narrow(0, 6 * group.rank(), 6), 0, 0, /*equal_nan=*/true)) << dtype << " on rank " << where;
          if (group.rank() == n - 1) EXPECT_TRUE(at::allclose(at_root, expected, 0, 0, /*equal_nan=*/true)) << dtype << " on rank " << where;
        }
      }
    }
  });
}

TEST_P(Collectives, MinimaAndMaximaAreInTheOrderOfTheNumbers) {
  const int n = size();
  run([n](World& world) {
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
      const auto numbers = at::tensor({-INFINITY, -2.5f, -6e-8f, 0.0f, 6e-8f, 1.0f, INFINITY}).to(dtype);
      for (const auto op : {Op::Min, Op::Max}) {
        const auto mine = numbers.roll(world.rank());
        auto most = mine.clone(), expected = numbers.clone();
        for (int rank = 1; rank < n; ++rank) expected = op == Op::Max ? at::maximum(expected, numbers.roll(rank)) : at::minimum(expected, numbers.roll(rank));
        all_reduce(world.group(), most, op);
        expect_equal(most, expected);
      }
    }
  });
}

TEST_P(Collectives, ReduceLeavesTheSumAtTheRoot) {
  const int n = size();
  run([n](World& world) {
    for (const int root : {0, n - 1}) {
      auto tensor = values(world.rank(), {3, 3});
      reduce(world.group(), tensor, root);
      if (world.rank() == root) expect_equal(tensor, sum_over(n, {3, 3}));
    }
  });
}

TEST_P(Collectives, AllGatherStacksRows) {
  const int n = size();
  run([n](World& world) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kBool, at::kShort, at::kFloat8_e4m3fn, at::kComplexFloat, at::kComplexDouble}) {
      for (const int64_t rows : {0, 1, 3}) {
        std::vector<at::Tensor> parts;
        for (int rank = 0; rank < n; ++rank) parts.push_back(values(rank, {rows, 2}, dtype));
        auto out = at::empty({n * rows, 2}, at::TensorOptions(dtype));
        all_gather(world.group(), out, parts[world.rank()]);
        for (int rank = 0; rank < n; ++rank) expect_equal(out.narrow(0, rank * rows, rows), parts[rank]);
      }
    }
  });
}

TEST_P(Collectives, AllGatherUnevenKeepsEveryShape) {
  const int n = size();
  run([n](World& world) {
    for (const auto dtype : {at::kFloat, at::kFloat8_e5m2}) {
      std::vector<at::Tensor> outs, parts;
      for (int rank = 0; rank < n; ++rank) {
        parts.push_back(values(rank, {rank, 3}, dtype));  // rank 0 gives nothing
        outs.push_back(at::zeros({rank, 3}).to(dtype));
      }
      all_gather_uneven(world.group(), outs, parts[world.rank()]);
      for (int rank = 0; rank < n; ++rank) expect_equal(outs[rank], parts[rank]);
    }
  });
}

TEST_P(Collectives, ReduceScatterLeavesEachItsPart) {
  const int n = size();
  run([n](World& world) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      for (const int64_t rows : {0, 1, 3}) {
        const auto in = values(world.rank(), {n * rows, 2}, dtype);
        auto out = at::empty({rows, 2}, at::TensorOptions(dtype));
        reduce_scatter(world.group(), out, in);
        expect_equal(out, sum_over(n, {n * rows, 2}, dtype).narrow(0, world.rank() * rows, rows));
        expect_equal(in, values(world.rank(), {n * rows, 2}, dtype));  // only read
      }
    }
  });
}

TEST_P(Collectives, GatherAndScatterInPlace) {
  const int n = size();
  run([n](World& world) {
    for (const int64_t part : {1, 7, 1024, 40000}) {  // shm: in one slot, staged in several
      const auto own = [&](const at::Tensor& whole) { return whole.narrow(0, world.rank() * part, part); };
      auto summed = values(world.rank(), {n * part});
      reduce_scatter(world.group(), own(summed), summed);
      expect_equal(own(summed), own(sum_over(n, {n * part})));
      auto gathered = at::zeros({n * part});
      own(gathered).copy_(own(sum_over(n, {n * part})));
      all_gather(world.group(), gathered, own(gathered));
      expect_equal(gathered, sum_over(n, {n * part}));
    }
  });
}

TEST_P(Collectives, ReduceScatterUnevenLeavesEachItsPart) {
  const int n = size();
  run([n](World& world) {
    std::vector<at::Tensor> ins;
    for (int part = 0; part < n; ++part) ins.push_back(values(world.rank() + 3 * part, {part, 2}));
    auto out = at::empty({world.rank(), 2});
    reduce_scatter_uneven(world.group(), out, ins);
    auto expected = at::zeros({world.rank(), 2});
    for (int rank = 0; rank < n; ++rank) expected += values(rank + 3 * world.rank(), {world.rank(), 2});
    expect_equal(out, expected);
  });
}

TEST_P(Collectives, AllToAllEvenAndUneven) {
  const int n = size();
  run([n](World& world) {
    const int rank = world.rank();
    // Rank r sends rank t the number 100 r + t.
    for (const auto dtype : {at::kFloat, at::kShort}) {
      auto out = at::empty({n, 1}, at::TensorOptions(dtype));
      all_to_all(world.group(), out, (at::arange(n) + 100 * rank).view({n, 1}).to(dtype));
      expect_equal(out, (at::arange(n) * 100 + rank).view({n, 1}).to(dtype));
    }
    // Rank r sends (r + t) % 3 rows to rank t.
    std::vector<int64_t> to(n), from(n);
    for (int other = 0; other < n; ++other) to[other] = from[other] = (rank + other) % 3;
    std::vector<at::Tensor> sent, expected;
    for (int other = 0; other < n; ++other) {
      sent.push_back(values(10 * rank + other, {to[other], 2}));
      expected.push_back(values(10 * other + rank, {from[other], 2}));
    }
    const auto in = at::cat(sent);
    auto out = at::empty({at::cat(expected).size(0), 2});
    all_to_all(world.group(), out, in, from, to);
    expect_equal(out, at::cat(expected));
  });
}

TEST_P(Collectives, BroadcastGatherScatter) {
  const int n = size();
  run([n](World& world) {
    const auto group = world.group();
    for (const auto dtype : {at::kFloat, at::kFloat8_e4m3fn}) {
      for (const int root : {0, n - 1}) {
        auto everywhere = values(world.rank(), {2, 3}, dtype);
        broadcast(group, everywhere, root);
        expect_equal(everywhere, values(root, {2, 3}, dtype));

        const bool is_root = world.rank() == root;
        auto whole = is_root ? at::empty({2 * n, 3}, at::TensorOptions(dtype)) : at::Tensor();
        gather(group, whole, values(world.rank(), {2, 3}, dtype), root);
        if (is_root) {
          for (int rank = 0; rank < n; ++rank) expect_equal(whole.narrow(0, 2 * rank, 2), values(rank, {2, 3}, dtype));
        }
        auto part = at::empty({2, 3}, at::TensorOptions(dtype));
        scatter(group, part, whole, root);
        expect_equal(part, values(world.rank(), {2, 3}, dtype));
      }
    }
  });
}

TEST_P(Collectives, SendAndRecvAroundARing) {
  const int n = size();
  if (n == 1) GTEST_SKIP() << "nobody to send to";
  run([n](World& world) {
    const auto group = world.group();
    const int right = (world.rank() + 1) % n, left = (world.rank() + n - 1) % n;
    auto first = at::empty({4}, at::kFloat8_e4m3fn), second = at::empty({0, 2});
    // Received in another order than sent: the tag tells them apart.
    auto b = recv_async(group, second, left, 8), a = recv_async(group, first, left, 7);
    auto c = send_async(group, values(world.rank(), {4}, at::kFloat8_e4m3fn), right, 7), d = send_async(group, at::empty({0, 2}), right, 8);
    for (auto* pending : {&a, &b, &c, &d}) pending->wait();
    expect_equal(first, values(left, {4}, at::kFloat8_e4m3fn));
  });
}

// Also what is too large to lie somewhere until it is asked for.
TEST_P(Collectives, ASendThatNobodyWaitsForArrives) {
  if (size() == 1) GTEST_SKIP() << "nobody to send to";
  const auto body = [](World& world) {
    const auto group = world.group();
    for (const int64_t length : {3, 1'000'000}) {
      if (world.rank() == 0) {
        for (const int tag : {4, 5}) send_async(group, at::full({length}, float(tag)), 1, tag) = Pending();
      }
      barrier(group);
      for (const int tag : {5, 4}) {
        auto received = at::zeros({length});
        if (world.rank() == 1) recv(group, received, 0, tag);
        if (world.rank() == 1) expect_equal(received, at::full({length}, float(tag)));
      }
    }
    if (world.rank() == 0) send_async(group, at::ones({1'000'000}), 1, 6) = Pending();  // which nobody takes, and nobody's end waits for
  };
  run_ranks(size(), body, {.timeout = std::chrono::seconds(20), .backend = std::get<0>(GetParam())});
}

TEST_P(Collectives, AsynchronousOnesInterleave) {
  const int n = size();
  run([n](World& world) {
    const auto group = world.group();
    std::vector<at::Tensor> sums;
    std::vector<Pending> pendings;
    auto gathered = at::empty({n * 5});
    for (int i = 0; i < 10; ++i) {
      sums.push_back(values(world.rank() + i, {100}));
      pendings.push_back(all_reduce_async(group, sums.back()));
    }
    pendings.push_back(all_gather_async(group, gathered, at::full({5}, float(world.rank()))));
    for (size_t i = pendings.size(); i-- > 0;) pendings[i].wait();
    for (auto& pending : pendings) {
      EXPECT_TRUE(pending.done());
      pending.wait();  // a second wait does nothing
    }
    for (int i = 0; i < 10; ++i) expect_equal(sums[i], sum_over(n, {100}) + float(n * i));
    expect_equal(gathered, at::arange(n).repeat_interleave(5).to(at::kFloat));
    barrier(group);
  });
}

TEST_P(Collectives, ReadInputsOfAnyStridesAndWriteIntoLeaves) {
  const int n = size();
  run([n](World& world) {
    const auto in = values(world.rank(), {4, 3}).t();
    auto out = at::empty({3 * n, 4}).requires_grad_();
    all_gather(world.group(), out, in);
    for (int rank = 0; rank < n; ++rank) expect_equal(out.detach().narrow(0, 3 * rank, 3), values(rank, {4, 3}).t());
    EXPECT_FALSE(out.grad_fn());
  });
}

// conj() and imag() of a complex tensor leave the sign to whoever reads.
/// libtorch's counter of writes, by which autograd refuses a tensor that it has saved.
TEST_P(Collectives, CountAsWritesWhereTheCallerWaits) {
  if (size() == 1) return;  // nothing is written, or copied by an operator
  run([n = size()](World& world) {
    const auto group = world.group();
    const auto writes = [](at::IntArrayRef sizes, const std::function<void(const at::Tensor&)>& call) {
      const at::Tensor out = at::zeros(sizes), view = out.view({-1});
      const int64_t before = view._version();
      call(out);
      return view._version() - before;
    };
    const at::Tensor one = at::ones({1}), each = at::ones({n});
    EXPECT_GT(writes({n}, [&](const at::Tensor& out) { all_reduce(group, out); }), 0);
    EXPECT_GT(writes({n}, [&](const at::Tensor& out) { broadcast(group, out, 0); }), 0);
    EXPECT_GT(writes({n}, [&](const at::Tensor& out) { all_gather(group, out, one); }), 0);
    EXPECT_GT(writes({1}, [&](const at::Tensor& out) { reduce_scatter(group, out, each); }), 0);
    EXPECT_GT(writes({n}, [&](const at::Tensor& out) { all_to_all(group, out, each); }), 0);
    if (tessera::testing_support::test_device().is_cpu()) {  // beside a device results are copied back
      EXPECT_EQ(writes({n}, [&](const at::Tensor& out) { all_reduce_async(group, out).wait(); }), 0) << "as under parameters that a graph holds";
    }
    const at::InferenceMode inference;
    all_reduce(group, at::ones({n}));
  });
}

TEST_P(Collectives, ReadLazilyConjugatedAndNegatedInputs) {
  const int n = size();
  run([n](World& world) {
    const auto complex = [](int rank) { return at::complex(values(rank, {4}), values(rank + 1, {4})); };
    const auto conjugated = at::conj(complex(world.rank()));
    ASSERT_TRUE(conjugated.is_conj() && at::imag(conjugated).is_neg());
    const auto out = at::empty({n, 4}, at::kComplexFloat), negated = at::empty({n, 4});
    all_gather(world.group(), out, conjugated);
    all_gather(world.group(), negated, at::imag(conjugated));
    for (int rank = 0; rank < n; ++rank) {
      EXPECT_TRUE(at::equal(out[rank], at::conj(complex(rank))));
      EXPECT_TRUE(at::equal(negated[rank], -values(rank + 1, {4})));
    }
  });
}

std::string refusal(const std::function<void(const Group&)>& body) {
  std::string text;
  run_ranks(2, [&](World& world) {
    try {
      body(world.group());
    } catch (const InternalError& error) {
      if (world.rank() == 0) text = error.what();
    }
  });
  return text;
}

/// Of equal parts the size counts alone, and a tensor of no rows has rows of no size.
TEST(Collectives, AllToAllGoesByPartsNotByShapes) {
  run_ranks(2, [](World& world) {
    const auto own = static_cast<float>(world.rank());
    const at::Tensor parts = at::zeros({4, 3});
    all_to_all(world.group(), parts, at::full({2, 2, 3}, own));
    EXPECT_TRUE(at::equal(parts, at::cat({at::full({2, 3}, 0.0F), at::full({2, 3}, 1.0F)})));
    // Rank 0 gives two rows to rank 1, and none of them come back.
    const bool gives = world.rank() == 0;
    const at::Tensor in = gives ? at::full({2, 3}, 5.0F) : at::empty({0}), out = gives ? at::empty({0}) : at::zeros({2, 3});
    const std::vector<int64_t> none{0, 0};
    all_to_all(world.group(), out, in, gives ? none : std::vector<int64_t>{2, 0}, gives ? std::vector<int64_t>{0, 2} : none);
    if (!gives) EXPECT_TRUE(at::equal(out, at::full({2, 3}, 5.0F)));
  });
}

TEST(CollectivesRefuse, WhatTheyCannotWriteOrDeal) {
  using ::testing::HasSubstr;
  EXPECT_THAT(refusal([](const Group& group) { all_reduce(group, at::zeros({4, 3}).t()); }),
              HasSubstr("all_reduce of group world writes a tensor that is not contiguous: [3, 4] Float on cpu with strides [1, 3]"));
  EXPECT_THAT(refusal([](const Group& group) { broadcast(group, at::conj(at::zeros({4}, at::kComplexFloat)), 0); }),
              HasSubstr("broadcast of group world writes a view that is conjugated or negated (conj, imag): [4] ComplexFloat on cpu"));
  EXPECT_THAT(refusal([](const Group& group) { all_gather(group, at::zeros({5}), at::zeros({2})); }),
              HasSubstr("all_gather of group world of 2: [5] Float on cpu is not 2 times [2] Float on cpu"));
  EXPECT_THAT(refusal([](const Group& group) { reduce_scatter(group, at::zeros({2}), at::zeros({4}, at::kDouble)); }), HasSubstr("[4] Double on cpu"));
  EXPECT_THAT(refusal([](const Group& group) { all_to_all(group, at::zeros({3}), at::zeros({3})); }), HasSubstr("3 rows cannot be dealt equally over 2 ranks"));
  EXPECT_THAT(refusal([](const Group& group) { all_to_all(group, at::zeros({4}), at::zeros({4}), {2, 2}, {3, 2}); }),
              HasSubstr("splits [3, 2] do not deal 4 rows"));
  EXPECT_THAT(refusal([](const Group& group) { all_to_all(group, at::zeros({4}, at::kInt), at::zeros({4})); }),
              HasSubstr("all_to_all of group world of 2: equal parts of [4] Float on cpu do not fit [4] Int on cpu"));
  EXPECT_THAT(refusal([](const Group& group) { all_to_all(group, at::zeros({2, 6}), at::zeros({4, 4})); }),
              HasSubstr("equal parts of [4, 4] Float on cpu do not fit [2, 6] Float on cpu"));
  EXPECT_THAT(refusal([](const Group& group) { all_to_all(group, at::zeros({2, 6}), at::zeros({2, 3}), {1, 1}, {1, 1}); }),
              HasSubstr("rows of [2, 3] Float on cpu do not fit [2, 6] Float on cpu"));
  EXPECT_THAT(refusal([](const Group& group) { all_to_all(group, at::zeros({4}), at::zeros({4}), {2, 2}, {3, 1}); }),
              HasSubstr("rank 0 gives itself 3 rows and expects 2"));
  EXPECT_THAT(refusal([](const Group& group) {
                std::vector<at::Tensor> outs{at::zeros({2}), at::zeros({2})};
                outs[1 - group.rank()] = at::zeros({2}, at::kLong);
                all_gather_uneven(group, outs, at::zeros({2}));
              }),
              HasSubstr("all_gather_uneven of group world: rank 1's part is [2] Long on cpu where this rank has [2] Float on cpu"));
  EXPECT_THAT(refusal([](const Group& group) {
                std::vector<at::Tensor> ins{at::zeros({2}), at::zeros({2})};
                ins[1 - group.rank()] = at::zeros({2}, at::kDouble);
                reduce_scatter_uneven(group, at::zeros({2}), ins);
              }),
              HasSubstr("reduce_scatter_uneven of group world: rank 1's part is [2] Double on cpu"));
  EXPECT_THAT(refusal([](const Group& group) { broadcast(group, at::zeros({4}), 2); }), HasSubstr("rank 2 is not one of its 2"));
  EXPECT_THAT(refusal([](const Group& group) { send(group, at::zeros({4}), group.rank()); }), HasSubstr("sends to itself"));
  EXPECT_THAT(refusal([](const Group& group) { send(group, at::zeros({4}), 1 - group.rank(), 4194304); }),
              HasSubstr("send of group world: tag 4194304 is not one of 0 to 4194303; those above are of the messages of which collectives are made"));
  EXPECT_THAT(refusal([](const Group& group) { recv(group, at::zeros({4}), 1 - group.rank(), -1); }), HasSubstr("recv of group world: tag -1 is not one of"));
  EXPECT_THAT(refusal([](const Group& group) { all_gather_uneven(group, {at::zeros({1})}, at::zeros({1})); }), HasSubstr("gets 1 tensors"));
}

TEST(CollectivesRefuse, ARankAloneThatGivesItselfOtherRowsThanItExpects) {
  run_ranks(1, [](World& world) {
    EXPECT_THROW(all_to_all(world.group(), at::zeros({4}), at::zeros({1}), {4}, {1}), InternalError);
    EXPECT_THROW(all_to_all(world.group(), at::zeros({2}, at::kLong), at::zeros({2})), InternalError);
  });
}

}  // namespace
}  // namespace tessera::comm
