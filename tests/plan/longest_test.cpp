// How long sequences may be, and what a rank needs where more ranks share longer ones.

#include "tessera/plan/longest.h"

#include <cstdio>

#include <gmock/gmock.h>

#include "tessera/core/error.h"
#include "tessera/plan/dry_run.h"
#include "tests/train/fixture.h"

namespace tessera {
namespace {

using Sets = std::vector<std::string>;

class LongSequences : public testing_support::TrainFixture {
 protected:
  static constexpr int64_t kDim = 64, kKeys = 16, kLayers = 6;  ///< kKeys: features of all keys

  Config cut(int64_t length, int ranks, const std::string& method, Sets more = {}) const {
    Sets sets{"model.dim=" + std::to_string(kDim),
              "model.layers=" + std::to_string(kLayers),
              "model.kv_heads=1",
              "model.ffn_dim=192",
              "data.seq_len=" + std::to_string(length),
              "batch.global_size=1",
              "batch.micro_size=1",
              "mesh.cp=" + std::to_string(ranks),
              "recompute.ffn_tile=1024"};
    if (ranks > 1) sets.push_back("context.method=" + method);
    sets.insert(sets.end(), more.begin(), more.end());
    return config("llama", sets);
  }
};

/// Activations of a rank that holds as many columns (so many that the megabyte in which attention's kernel works does not count), and beside them what its
/// method says it holds.
TEST_F(LongSequences, ARankNeedsWhatItsColumnsNeed) {
  constexpr int64_t kColumns = 8192, kFloat = 4, u = kColumns * kKeys;
  constexpr auto kActivations = static_cast<size_t>(MemoryCategory::Activations), kComm = static_cast<size_t>(MemoryCategory::Comm);
  const auto peak = [&](int ranks, const std::string& method, const Sets& more) {
    return plan::largest_class(plan::dry_run(cut(kColumns * ranks, ranks, method, more), ranks)).peak_bytes;
  };
  for (const Sets& more : {Sets{}, Sets{"recompute.mode=full"}, Sets{"data.documents=lines"}}) {
    const auto alone = peak(1, "", more);
    for (const int ranks : {2, 8}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks " << testing::PrintToString(more));
      const auto ring = peak(ranks, "ring", more);
      std::printf("%d ranks: activations %.3f of one rank's, in messages %.1f u\n", ranks,
                  static_cast<double>(ring[kActivations]) / static_cast<double>(alone[kActivations]), static_cast<double>(ring[kComm]) / (u * kFloat));
      EXPECT_LE(static_cast<double>(ring[kActivations]), 1.05 * static_cast<double>(alone[kActivations]));
      EXPECT_LE(ring[kComm] - alone[kComm], 10 * u * kFloat) << "4u of blocks, 6u of their gradients' sums";
    }
  }
}

TEST_F(LongSequences, TheLongestGrowsWithTheRanks) {
  const auto longest = [&](int ranks, const Sets& more) {
    Sets sets{"run.memory_limit_bytes=100000000"};
    sets.insert(sets.end(), more.begin(), more.end());
    return plan::longest_sequence(cut(64, ranks, "ring", sets), ranks);
  };
  const auto alone = longest(1, {});
  EXPECT_LE(alone.peak, 100000000);
  EXPECT_GT(alone.peak, 99000000) << "no shorter than it has to be";
  for (const int ranks : {2, 8}) {
    const double grown = static_cast<double>(longest(ranks, {}).seq_len) / static_cast<double>(alone.seq_len);
    std::printf("%d ranks: %.2f times as long\n", ranks, grown);
    EXPECT_GE(grown, 0.9 * ranks);
  }
  EXPECT_GT(alone.seq_len, longest(1, {"recompute.ffn_tile=0"}).seq_len * 13 / 10) << "what tiles are for";
}

/// A size that takes what is left is what it comes to: three columns are cut, not one.
TEST_F(LongSequences, TheFirstThatIsTriedHasAColumnForEveryRank) {
  const auto longest = [&](const std::string& cp) {
    return plan::longest_sequence(cut(64, 3, "ring", {"mesh.cp=" + cp, "run.memory_limit_bytes=20000000"}), 3);
  };
  EXPECT_EQ(longest("-1").seq_len, longest("3").seq_len);
}

TEST_F(LongSequences, RefusesWhereThereIsNothingToFind) {
  const auto refusal = [&](const Sets& sets) -> std::string {
    try {
      plan::longest_sequence(cut(64, 2, "ring", sets), 2);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal({}), testing::HasSubstr("run.memory_limit_bytes is not set"));
  EXPECT_THAT(refusal({"run.memory_limit_bytes=1000"}), testing::HasSubstr("4 tokens alone need"));
}

}  // namespace
}  // namespace tessera
