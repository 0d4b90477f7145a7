#include <map>
#include <mutex>

#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tests/test_device.h"

/// What each method sends, counted by the recorder, against the formulas of docs/long-context.md.
namespace tessera {
namespace {

using namespace testing_support;

struct Sent {
  int64_t forward = 0, backward = 0, fp32 = 0;  ///< elements; fp32: of 16-bit tensors, those that travel wide
  bool operator==(const Sent&) const = default;
};

std::vector<Sent> sent(const AttentionCase& c, const SequenceCut& cut, const ContextParallelOptions& options) {
  const Passes whole = on_one_device(c, at::kBFloat16);
  const nn::AttentionReach reach{.causal = c.causal, .window = c.window};
  std::vector<Sent> all(static_cast<size_t>(cut.ranks()));
  comm::run_ranks(cut.ranks(), [&](comm::World& world) {
    const auto records = std::make_shared<comm::Recorder>();
    const comm::GroupInfo info{.name = "cp", .rank = world.rank(), .size = cut.ranks(), .ranks = {}, .timeout = std::chrono::seconds(60)};
    const comm::Group group(info, comm::make_record_engine(records, info, world.group().engine()));
    const at::Tensor columns = cut.positions(world.rank(), testing_support::test_device());
    Attending model(reach);
    nn::assign_paths(*model);
    const auto context = context_parallel(model, group, options, "core");
    context->set_cut(cut);
    std::vector<at::Tensor> leaves;
    for (size_t i = 0; i < 3; ++i) leaves.push_back(whole.in[i].index_select(1, columns).requires_grad_());
    const at::Tensor out = model(leaves[0], leaves[1], leaves[2], std::nullopt);
    const size_t forward = records->records().size();
    out.backward(whole.in[3].index_select(1, columns));
    const auto passes = records->records();
    Sent& own = all[static_cast<size_t>(world.rank())];
    for (size_t i = 0; i < passes.size(); ++i) {
      const auto& record = passes[i];
      const int64_t elements = record.sent_bytes / static_cast<int64_t>(c10::elementSize(record.dtype));
      (i < forward ? own.forward : own.backward) += elements;
      if (record.dtype == at::kFloat) own.fp32 += elements;
      EXPECT_EQ(record.site, "core");
    }
  });
  return all;
}

class ContextTraffic : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(ContextParallel, ContextTraffic, ::testing::Values(1, 2, 3, 4, 8));

TEST_P(ContextTraffic, OfTheRingIsKeysAndValuesOnceForwardAndWithTheirSumsBackward) {
  const int n = GetParam();
  const AttentionCase c{.length = 4 * n, .heads = 8, .kv_heads = 2};
  const int64_t u = c.batch * (c.length / n) * c.kv_heads * c.features;
  for (const ContextParallelOptions& options :
       {ContextParallelOptions{}, {.overlap = false}, {.method = ContextMethod::RingFull}, {.method = ContextMethod::AllGather}}) {
    for (const Sent& rank : sent(c, SequenceCut::head_tail(c.length, n), options)) {
      EXPECT_EQ(rank, (Sent{.forward = 2 * (n - 1) * u, .backward = 4 * (n - 1) * u, .fp32 = 2 * (n - 1) * u})) << to_string(options.method);
    }
  }
}

/// A part of 4 columns each: their own, those before, and those before these.
TEST_P(ContextTraffic, OfTheRingEndsWithTheWindow) {
  const int n = GetParam();
  for (const auto& [window, hops] : {std::pair{1, 0}, {5, 1}, {6, 2}}) {
    const AttentionCase c{.length = 4 * n, .heads = 8, .kv_heads = 2, .window = window};
    const int64_t u = c.batch * 4 * c.kv_heads * c.features, h = std::min(hops, n - 1);
    for (const ContextParallelOptions& options : {ContextParallelOptions{}, {.method = ContextMethod::RingFull}}) {
      for (const Sent& rank : sent(c, SequenceCut::contiguous(c.length, n), options)) {
        EXPECT_EQ(rank, (Sent{.forward = 2 * h * u, .backward = 4 * h * u, .fp32 = 2 * h * u})) << window;
      }
    }
  }
}

TEST_P(ContextTraffic, OfUlyssesIsHeadsForColumns) {
  const int n = GetParam();
  for (const int64_t kv_heads : {1, 8}) {
    const AttentionCase c{.length = 4 * n, .heads = 24, .kv_heads = kv_heads};
    if (n == 3 && kv_heads == 8) continue;  // ranks have 3 and 2 of them: every rank sends another amount
    const int64_t copied = std::max<int64_t>(n, kv_heads);
    const int64_t expected = c.batch * (c.length / n) * c.features * (2 * c.heads + 2 * copied) * (n - 1) / n;
    for (const Sent& rank : sent(c, SequenceCut::head_tail(c.length, n), {.method = ContextMethod::Ulysses})) {
      EXPECT_EQ(rank, (Sent{.forward = expected, .backward = expected, .fp32 = 0})) << kv_heads;
    }
  }
}

TEST(ContextTrafficOfBoth, IsTheSum) {
  const AttentionCase c{.length = 16, .heads = 8, .kv_heads = 2};
  const int64_t own = c.batch * (c.length / 4) * c.features;
  const int64_t exchange = own * (2 * c.heads + 2 * c.kv_heads) / 2;           // (n-1)/n of it, n = 2
  const int64_t u = c.batch * (c.length / 2) * (c.kv_heads / 2) * c.features;  // twice the columns, half the heads
  for (const Sent& rank : sent(c, SequenceCut::head_tail(16, 4), {.method = ContextMethod::UlyssesRing, .ulysses = 2})) {
    EXPECT_EQ(rank, (Sent{.forward = exchange + 2 * u, .backward = exchange + 4 * u, .fp32 = 2 * u}));
  }
}

}  // namespace
}  // namespace tessera
