#include "tessera/memory/memory.h"

#include <mutex>

#include <gtest/gtest.h>

#include "support.h"
#include "tessera/comm/backends/record.h"
#include "tessera/recompute/recompute.h"
#include "tests/test_device.h"

/// What a rank holds, and what happens when it is computed again.
namespace tessera {
namespace {

using namespace testing_support;

/// The most bytes alive in a forward and a backward pass of one rank.
int64_t peak(Attending& model, const AttentionCase& c, int64_t columns, at::Device device) {
  std::vector<at::Tensor> in;
  for (const int64_t heads : {c.heads, c.kv_heads, c.kv_heads, c.heads}) in.push_back(at::ones({c.batch, columns, heads, c.features}, device));
  MemoryTracker tracker;
  const TrackMemory tracking(tracker);
  pass(model, in);
  return tracker.peak();
}

int64_t peak_of_rank_0(const AttentionCase& c, int ranks, const ContextParallelOptions& options) {
  int64_t bytes = 0;
  comm::run_ranks(ranks, [&](comm::World& world) {
    const SequenceCut cut = SequenceCut::head_tail(c.length, ranks);
    Attending model;
    const auto context = context_parallel(model, world.group(), options, "core");
    context->set_cut(cut);
    const int64_t own = peak(model, c, cut.columns(world.rank()), at::kCPU);
    if (world.rank() == 0) bytes = own;
  });
  return bytes;
}

TEST(ContextMemory, OfARankIsFlatWhenSequenceAndRanksGrowTogether) {
  const int64_t own = 256;
  const AttentionCase alone{.batch = 1, .length = own, .heads = 4, .kv_heads = 2, .features = 16};
  const int64_t u = own * alone.kv_heads * alone.features * 4;  // bytes
  Attending model;
  const int64_t one = peak(model, alone, own, at::kCPU);
  for (const int ranks : {2, 4, 8}) {
    AttentionCase c = alone;
    c.length = own * ranks;
    // Two blocks of keys and values; in backward two shares of their gradients and what comes, besides the own; and a tile's gradient of all queries, which
    // alone is the result, beside their sum.
    EXPECT_LE(static_cast<double>(peak_of_rank_0(c, ranks, {})), 1.05 * static_cast<double>(one) + static_cast<double>(4 * u + 6 * u + 2 * u)) << ranks;
  }
}

TEST(ContextMemory, OfADryRunIsTheRealOnes) {
  const AttentionCase c{.batch = 1, .length = 96, .heads = 4, .kv_heads = 2};
  for (const ContextParallelOptions& options : {ContextParallelOptions{},
                                                {.method = ContextMethod::AllGather},
                                                {.method = ContextMethod::Ulysses},
                                                {.method = ContextMethod::UlyssesRing, .ulysses = 2}}) {
    const int64_t real = peak_of_rank_0(c, 4, options);
    const auto records = std::make_shared<comm::Recorder>();
    const auto world = comm::World::dry(4, /*rank=*/0, records);
    Attending model;
    const auto context = context_parallel(model, world.group(), options, "core");
    context->set_cut(SequenceCut::head_tail(c.length, 4));
    const int64_t dry = peak(model, c, c.length / 4, at::kMeta);
    EXPECT_EQ(dry, real) << to_string(options.method);
    EXPECT_FALSE(records->records().empty());
  }
}

TEST(ContextMemory, ADryRunOfPackedDocumentsCountsThemAsOne) {
  for (const int ranks : {1, 3}) {
    const auto world = comm::World::dry(ranks, /*rank=*/0, std::make_shared<comm::Recorder>());
    Attending model;
    const auto context = context_parallel(model, world.group(), {}, "core");
    context->set_cut(SequenceCut::head_tail(12, ranks));
    const at::Tensor x = at::empty({2, 12 / ranks, 4, 8}, at::kMeta);
    EXPECT_EQ(model(x, x, x, at::empty({2, 12 / ranks}, at::TensorOptions(at::kLong).device(at::kMeta))).sizes(), x.sizes());
  }
}

TEST(ContextRecompute, RepeatsItsMessagesAndGivesTheSameBits) {
  const AttentionCase c{.length = 21, .heads = 6, .kv_heads = 3};
  const Passes whole = on_one_device(c);
  for (const ContextMethod method : {ContextMethod::Ring, ContextMethod::Ulysses, ContextMethod::AllGather}) {
    comm::run_ranks(3, [&](comm::World& world) {
      const SequenceCut cut = SequenceCut::head_tail(21, 3);
      std::vector<at::Tensor> own;
      for (const at::Tensor& tensor : whole.in) own.push_back(tensor.index_select(1, cut.positions(world.rank(), testing_support::test_device())));
      Attending model;
      const auto context = context_parallel(model, world.group(), {.method = method}, "core");
      context->set_cut(cut);
      const auto plain = pass(model, own);
      const auto again = recompute(*model, {.modules = "core"});
      const auto repeated = pass(model, own);
      for (size_t i = 0; i < plain.size(); ++i) EXPECT_TRUE(at::equal(plain[i], repeated[i])) << to_string(method) << ' ' << i;
    });
  }
}

/// Ranks may have as many columns under both cuts, so that no shape tells.
TEST(ContextRecompute, RefusesAnotherCutThanTheForwardHad) {
  const AttentionCase c{.length = 20, .heads = 6, .kv_heads = 3};
  const Passes whole = on_one_device(c);
  comm::run_ranks(2, [&](comm::World& world) {
    const SequenceCut chosen = SequenceCut::head_tail(20, 2), rejected = SequenceCut::contiguous(20, 2);
    std::vector<at::Tensor> own;
    for (const at::Tensor& tensor : whole.in)
      own.push_back(tensor.detach().index_select(1, chosen.positions(world.rank(), testing_support::test_device())).requires_grad_());
    Attending model;
    const auto context = context_parallel(model, world.group(), {}, "core");
    const auto again = recompute(*model, {.modules = "core"});
    for (const bool said_again : {true, false}) {
      context->set_cut(chosen);
      const at::Tensor first = model(own[0], own[1], own[2], std::optional<at::Tensor>());
      context->set_cut(rejected);
      const at::Tensor second = model(own[0], own[1], own[2], std::optional<at::Tensor>());
      if (said_again) {
        second.sum().backward();
        context->set_cut(chosen);
        EXPECT_NO_THROW(first.sum().backward());
      } else {
        EXPECT_THAT([&] { first.sum().backward(); }, testing::ThrowsMessage<ConfigError>(testing::HasSubstr("under another cut than set_cut said last")));
      }
    }
  });
}

}  // namespace
}  // namespace tessera
