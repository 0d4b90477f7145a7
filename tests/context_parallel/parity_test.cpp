#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support.h"
#include "tests/comm/order_alone.h"
#include "tests/late_sends.h"
#include "tests/test_device.h"

/// Output and all gradients of each method, against one device that holds the whole sequence and its scores.
namespace tessera {
namespace {

using namespace testing_support;

constexpr double kFp32 = 1e-5, kBf16 = 2e-2;  // of a tensor's largest entry

struct NamedMethod {
  const char* name;
  ContextParallelOptions options;
};

std::vector<SequenceCut> cuts_of(int64_t length, int ranks) { return {SequenceCut::contiguous(length, ranks), SequenceCut::head_tail(length, ranks)}; }

class MethodParity : public ::testing::TestWithParam<std::tuple<NamedMethod, int>> {
 protected:
  ContextParallelOptions options() const {
    ContextParallelOptions options = std::get<0>(GetParam()).options;
    if (options.method == ContextMethod::UlyssesRing) options.ulysses = ranks() == 8 ? 4 : ranks() == 4 ? 2 : ranks() == 5 ? 1 : ranks();
    return options;
  }
  int ranks() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(ContextParallel, MethodParity,
                         ::testing::Combine(::testing::Values(NamedMethod{"ring", {}}, NamedMethod{"ring_full", {.method = ContextMethod::RingFull}},
                                                              NamedMethod{"ulysses", {.method = ContextMethod::Ulysses}},
                                                              NamedMethod{"ulysses_ring", {.method = ContextMethod::UlyssesRing}},
                                                              NamedMethod{"all_gather", {.method = ContextMethod::AllGather}}),
                                            ::testing::Values(1, 2, 3, 4, 5, 8)),
                         [](const auto& info) { return std::get<0>(info.param).name + std::to_string(std::get<1>(info.param)); });

TEST_P(MethodParity, OfAnyLengthAndCut) {
  std::vector<Job> jobs;
  for (const int64_t length : {8, 13}) {
    const AttentionCase c{.length = length, .heads = 8, .kv_heads = 8};
    for (const SequenceCut& cut : cuts_of(length, ranks())) jobs.push_back({c, cut});
  }
  jobs.push_back({{.length = 13, .heads = 8, .kv_heads = 8, .causal = false}, SequenceCut::head_tail(13, ranks())});
  EXPECT_THAT(parities(jobs, options()), ::testing::Each(::testing::Le(kFp32)));
}

TEST_P(MethodParity, OfGroupedHeadsIn32And16Bits) {
  const SequenceCut cut = SequenceCut::head_tail(21, ranks());
  const AttentionCase c{.length = 21, .heads = 12, .kv_heads = 3};
  EXPECT_THAT(parities({{c, cut}, {c, cut, at::kBFloat16}}, options()), ::testing::ElementsAre(::testing::Le(kFp32), ::testing::Le(kBf16)));
}

TEST_P(MethodParity, OfPackedDocuments) {
  AttentionCase c{.length = 19, .heads = 8, .kv_heads = 4};
  c.documents =
      at::tensor({0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 3, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 2, 2, 2}, at::kLong).view({2, -1});
  std::vector<Job> jobs;
  for (const SequenceCut& cut : cuts_of(19, ranks())) jobs.push_back({c, cut});
  c.causal = false;
  jobs.push_back({c, SequenceCut::head_tail(19, ranks())});
  EXPECT_THAT(parities(jobs, options()), ::testing::Each(::testing::Le(kFp32)));
}

/// Windows of less than a rank's part, of several of them, and nearly of all; with documents, too.
TEST_P(MethodParity, OfWindows) {
  std::vector<Job> jobs;
  for (const int64_t window : {1, 2, 6, 18}) {
    AttentionCase c{.length = 19, .heads = 8, .kv_heads = 4, .window = window};
    for (const SequenceCut& cut : cuts_of(19, ranks())) jobs.push_back({c, cut});
    if (window != 6) continue;
    c.documents = at::cat({at::zeros({2, 8}, at::kLong), at::ones({2, 11}, at::kLong)}, 1);
    for (const SequenceCut& cut : cuts_of(19, ranks())) jobs.push_back({c, cut});
  }
  const auto found = parities(jobs, options());
  EXPECT_THAT(found, ::testing::Each(::testing::Le(kFp32)));
}

TEST_P(MethodParity, OfLargeScores) {
  const AttentionCase c{.length = 17, .heads = 8, .kv_heads = 8, .offset = 50};  // scores of about 880, whose exponential is no fp32 number
  EXPECT_LE(parity(c, SequenceCut::head_tail(17, ranks()), options()), 2.5e-4) << "fp32 numbers are 6e-5 apart there, and each merge rounds";
}

TEST(UlyssesRing, OfEveryShape) {
  AttentionCase c{.length = 29, .heads = 6, .kv_heads = 2};
  c.documents = at::cat({at::zeros({2, 11}, at::kLong), at::ones({2, 18}, at::kLong)}, 1);
  for (const auto& [ranks, inner] : {std::pair{4, 2}, {6, 2}, {6, 3}, {6, 6}, {6, 1}}) {
    for (const SequenceCut& cut : cuts_of(29, ranks)) {
      EXPECT_LE(parity(c, cut, {.method = ContextMethod::UlyssesRing, .ulysses = inner}), kFp32) << ranks << " ranks, groups of " << inner;
    }
  }
}

TEST(Documents, DealtOneByOneAreTheSame) {
  AttentionCase c{.length = 26, .heads = 4, .kv_heads = 4};
  c.documents = at::repeat_interleave(at::arange(4), at::tensor({13, 1, 4, 8}, at::kLong)).expand({2, 26});
  for (const ContextMethod method : {ContextMethod::Ring, ContextMethod::Ulysses, ContextMethod::AllGather}) {
    for (const int ranks : {2, 3, 4}) {
      EXPECT_LE(parity(c, SequenceCut::head_tail(std::vector<int64_t>{13, 1, 4, 8}, ranks), {.method = method}), kFp32) << to_string(method) << ' ' << ranks;
    }
  }
}

TEST(Methods, AreTheSameOverGloo) {
  const AttentionCase c{.length = 19, .heads = 6, .kv_heads = 2};
  for (const ContextParallelOptions& options : {ContextParallelOptions{},
                                                {.method = ContextMethod::AllGather},
                                                {.method = ContextMethod::UlyssesRing, .ulysses = 2},
                                                {.method = ContextMethod::Ulysses}}) {
    EXPECT_LE(parity(c, SequenceCut::head_tail(19, 4), options, at::kFloat, {.backend = "gloo"}), kFp32) << to_string(options.method);
  }
}

/// As under NCCL. Each case is a run of its own, whose ranks have not met yet: rings of as many hops as a window asks for, up to all. A rank has four columns.
class MethodsByOrderAlone : public ::testing::TestWithParam<int> {
 protected:
  static constexpr int64_t kColumns = 4;
  /// With a window, or none, by which a ring of places of so many columns has that many hops.
  static void expect_parity(int ranks, const ContextParallelOptions& options, int64_t window) {
    const AttentionCase c{.batch = 1, .length = kColumns * ranks, .heads = 8, .kv_heads = 8, .features = 4, .window = window};
    const comm::RunOptions run{.decorators = {order_alone(std::chrono::seconds(5))}};
    EXPECT_LE(parity(c, SequenceCut::contiguous(c.length, ranks), options, at::kFloat, run), kFp32)
        << to_string(options.method) << " in groups of " << options.ulysses << ", window " << window;
  }
  static int64_t window_of(int hops, int64_t columns) { return columns * (hops - 1) + 2; }
};
INSTANTIATE_TEST_SUITE_P(ContextParallel, MethodsByOrderAlone, ::testing::Range(2, 9));

TEST_P(MethodsByOrderAlone, NobodyWaitsInACircle) {
  const int n = GetParam();
  for (const ContextMethod method : {ContextMethod::Ring, ContextMethod::RingFull}) {
    expect_parity(n, {.method = method}, /*window=*/0);
    for (int hops = 1; hops < n; ++hops) expect_parity(n, {.method = method}, window_of(hops, kColumns));
  }
  expect_parity(n, {.overlap = false}, /*window=*/0);
  for (const int64_t window : {int64_t{0}, window_of(1, kColumns)}) {
    expect_parity(n, {.method = ContextMethod::AllGather}, window);
    expect_parity(n, {.method = ContextMethod::Ulysses}, window);
  }
  for (int inner = 1; inner <= n; ++inner) {
    if (n % inner != 0) continue;
    for (int hops = 0; hops < n / inner; ++hops) {
      expect_parity(n, {.method = ContextMethod::UlyssesRing, .ulysses = inner}, hops == 0 ? 0 : window_of(hops, inner * kColumns));
    }
  }
}

TEST(Methods, WriteNoMemoryThatIsStillOnItsWay) {
  for (const ContextParallelOptions& options :
       {ContextParallelOptions{}, {.method = ContextMethod::RingFull}, {.method = ContextMethod::UlyssesRing, .ulysses = 1}}) {
    EXPECT_LE(parity({.length = 33}, SequenceCut::head_tail(33, 5), options, at::kFloat, {.decorators = {late_sends_of_rank_0()}}), kFp32);
  }
}

TEST(Methods, GiveTheBitsOfASecondRunAndOverlapChangesNone) {
  const AttentionCase c{.length = 23};
  const SequenceCut cut = SequenceCut::head_tail(23, 3);
  const Passes whole = on_one_device(c);
  comm::run_ranks(3, [&](comm::World& world) {
    std::vector<at::Tensor> own;
    for (const at::Tensor& tensor : whole.in) own.push_back(tensor.index_select(1, cut.positions(world.rank(), testing_support::test_device())));
    std::vector<std::vector<at::Tensor>> results;
    for (const bool overlap : {true, true, false}) {
      Attending model;
      const auto context = context_parallel(model, world.group(), {.overlap = overlap}, "core");
      context->set_cut(cut);
      results.push_back(pass(model, own));
    }
    for (size_t i = 0; i < results[0].size(); ++i) {
      EXPECT_TRUE(at::equal(results[0][i], results[1][i]) && at::equal(results[0][i], results[2][i])) << i;
    }
  });
}

/// Where a kernel rounds its gradients, as on devices, those of a rank's tiles are rounded once more than one tile of all is; on a CPU they come in fp32.
TEST(Methods, SixteenBitErrorsDoNotGrowWithRanks) {
  const double more = testing_support::test_device().is_cpu() ? 1.5 : 2;
  const AttentionCase c{.batch = 1, .length = 64, .heads = 8, .kv_heads = 8};
  for (const ContextMethod method : {ContextMethod::Ring, ContextMethod::AllGather, ContextMethod::Ulysses}) {
    const double one = parity(c, SequenceCut::head_tail(64, 1), {.method = method}, at::kBFloat16);
    for (const int ranks : {2, 4, 8}) {
      EXPECT_LE(parity(c, SequenceCut::head_tail(64, ranks), {.method = method}, at::kBFloat16), more * one) << to_string(method) << ' ' << ranks;
    }
  }
}

TEST(Documents, ATokenOfOneChangesNothingOfAnother) {
  for (const ContextParallelOptions& options : {ContextParallelOptions{},
                                                {.method = ContextMethod::RingFull},
                                                {.method = ContextMethod::Ulysses},
                                                {.method = ContextMethod::AllGather},
                                                {.method = ContextMethod::UlyssesRing, .ulysses = 2}}) {
    const AttentionCase c{.batch = 1, .length = 24, .heads = 4, .kv_heads = 2};
    const at::Tensor documents = at::cat({at::zeros({1, 12}, at::kLong), at::ones({1, 12}, at::kLong)}, 1);
    const SequenceCut cut = SequenceCut::head_tail(24, 4);
    std::vector<at::Tensor> before(4), after(4);
    for (auto* results : {&before, &after}) {
      auto in = inputs_of(c);
      if (results == &after) {
        for (size_t i = 0; i < 3; ++i) in[i].select(1, 5).add_(3);
      }
      comm::run_ranks(4, [&](comm::World& world) {
        const at::Tensor columns = cut.positions(world.rank(), testing_support::test_device());
        std::vector<at::Tensor> own;
        for (const at::Tensor& tensor : in) own.push_back(tensor.index_select(1, columns));
        Attending model;
        const auto context = context_parallel(model, world.group(), options, "core");
        context->set_cut(cut);
        (*results)[static_cast<size_t>(world.rank())] = pass(model, own, documents.index_select(1, columns))[0];
      });
    }
    for (int rank = 0; rank < 4; ++rank) {
      const at::Tensor columns = cut.positions(rank, testing_support::test_device()), second = (columns >= 12).nonzero().squeeze(1),
                       first = (columns < 12).nonzero().squeeze(1);
      const auto r = static_cast<size_t>(rank);
      EXPECT_TRUE(at::equal(before[r].index_select(1, second), after[r].index_select(1, second))) << to_string(options.method);
      if (columns.ge(5).bitwise_and(columns.lt(12)).any().item<bool>()) {
        EXPECT_FALSE(at::equal(before[r].index_select(1, first), after[r].index_select(1, first))) << "what changed is seen at all";
      }
    }
  }
}

}  // namespace
}  // namespace tessera
