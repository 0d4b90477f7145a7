#include "tessera/pipeline/chain_split.h"

#include <bit>
#include <limits>
#include <numeric>

#include <gmock/gmock.h>

#include "tessera/core/error.h"

namespace tessera::pipeline {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::vector<std::string> links(int64_t blocks) {
  std::vector<std::string> names{"embed_tokens"};
  for (int64_t block = 0; block < blocks; ++block) names.push_back("layers." + std::to_string(block));
  names.emplace_back("head");
  return names;
}

/// Held against every cut there is.
TEST(ChainSplit, ByCostNoOtherCutHasACheaperSlowestStage) {
  const auto slowest = [](const std::vector<double>& costs, const std::vector<std::pair<int64_t, int64_t>>& runs) {
    double most = 0;
    for (const auto& [begin, end] : runs) most = std::max(most, std::accumulate(costs.begin() + begin, costs.begin() + end, 0.0));
    return most;
  };
  for (const auto& costs : std::vector<std::vector<double>>{{0, 1, 1, 1, 1, 9}, {5, 1, 1, 1}, {1, 2, 3, 4, 5, 6, 7}, {3}, {0, 0, 0}, {2, 2, 2, 2, 2}}) {
    const auto links = std::ssize(costs);
    for (int stages = 1; stages <= links; ++stages) {
      const auto runs = split_by_cost(costs, stages);
      ASSERT_EQ(std::ssize(runs), stages);
      double best = std::numeric_limits<double>::infinity();
      for (unsigned cuts = 0; cuts < 1U << (links - 1); ++cuts) {
        if (std::popcount(cuts) != stages - 1) continue;
        std::vector<std::pair<int64_t, int64_t>> other;
        int64_t begin = 0;
        for (int64_t i = 1; i <= links; ++i) {
          if (i < links && (cuts >> (i - 1) & 1U) == 0) continue;
          other.emplace_back(begin, i);
          begin = i;
        }
        best = std::min(best, slowest(costs, other));
      }
      EXPECT_EQ(slowest(costs, runs), best);
      int64_t end = 0;
      for (const auto& run : runs) {
        EXPECT_EQ(run.first, end);
        EXPECT_LT(run.first, run.second) << "every stage has a link";
        end = run.second;
      }
      EXPECT_EQ(end, links);
    }
  }
}

std::string chain_refusal(int stages, const std::vector<std::string>& split) {
  try {
    split_chain(links(4), stages, split);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "(accepted)";
}

TEST(ChainSplit, EveryLinkCountsTheSame) {
  const auto runs = split_chain(links(126), 16, {"auto"});  // 405B: 126 blocks
  for (size_t stage = 0; stage < runs.size(); ++stage) EXPECT_THAT(runs[stage], Pair(8 * static_cast<int64_t>(stage), 8 * static_cast<int64_t>(stage) + 8));
  EXPECT_THAT(split_chain(links(3), 3, {"auto"}), ElementsAre(Pair(0, 2), Pair(2, 4), Pair(4, 5)));
  EXPECT_THAT(split_chain(links(4), 6, {"auto"}).back(), Pair(5, 6));
  EXPECT_THAT(split_chain(links(4), 1, {"auto"}), ElementsAre(Pair(0, 6)));
}

TEST(ChainSplit, ByCountsAndByNames) {
  const std::vector<std::pair<int64_t, int64_t>> runs{{0, 1}, {1, 4}, {4, 6}};
  EXPECT_EQ(split_chain(links(4), 3, {"1", "3", "2"}), runs);
  EXPECT_EQ(split_chain(links(4), 3, {"layers.0", "layers.3"}), runs);
  EXPECT_THAT(split_chain(links(4), 2, {"head"}), ElementsAre(Pair(0, 5), Pair(5, 6)));
}

TEST(ChainSplit, RefusesWhatDoesNotFit) {
  EXPECT_THAT(chain_refusal(7, {"auto"}), AllOf(HasSubstr("7 stages"), HasSubstr("at most 6 stages")));
  EXPECT_THAT(chain_refusal(3, {"1,4,1"}), HasSubstr("as strings: pipeline.split = [\"1\", \"4\", \"1\"]"));
  EXPECT_THAT(chain_refusal(2, {"layers.9"}), HasSubstr("the model's chain has no link 'layers.9'; the nearest is 'layers."));
  EXPECT_THAT(chain_refusal(3, {"layers.2", "layers.1"}), HasSubstr("'layers.1' does not come behind what is named before it"));
  EXPECT_THAT(chain_refusal(2, {"embed_tokens"}), HasSubstr("is where the first stage begins anyway"));
  EXPECT_THAT(chain_refusal(3, {"layers.1"}), HasSubstr("makes 2 stages, and mesh.pp x pipeline.virtual_stages = 3; name 2 links, or set auto"));
  EXPECT_THAT(chain_refusal(2, {"3", "4"}), HasSubstr("adds up to 7 links, and the model has 6"));
  EXPECT_THAT(chain_refusal(2, {"6"}), HasSubstr("names 1 stages"));
  EXPECT_THAT(chain_refusal(2, {"6", "0"}), HasSubstr("at least one link"));
  EXPECT_THAT(chain_refusal(2, {"9223372036854775807", "1"}), HasSubstr("a stage of 9223372036854775807 links, and the model has 6"));
  EXPECT_THAT(chain_refusal(2, {"3", "99999999999999999999"}), HasSubstr("a stage of 99999999999999999999 links, and the model has 6"));
  EXPECT_THAT(chain_refusal(2, {"3", "layers.2"}), HasSubstr("stands among numbers"));
  EXPECT_THAT(chain_refusal(3, {"cost", "cost"}), HasSubstr("'cost' deals all links by itself, and stands alone"));
  EXPECT_THAT(chain_refusal(2, {"layers.2", "auto"}), HasSubstr("'auto' deals all links by itself, and stands alone"));
}

}  // namespace
}  // namespace tessera::pipeline
