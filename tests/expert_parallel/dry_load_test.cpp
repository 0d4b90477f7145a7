// What a dry run, which has no tokens, takes for the rows that routers send to each expert.

#include "tessera/expert_parallel/dry_load.h"

#include <numeric>

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "tessera/nn/sample_scope.h"

namespace tessera::experts {
namespace {

using testing::ElementsAre;

/// All of so many rows.
DryRows all_of(int64_t rows) { return {.all = rows, .begin = 0, .size = rows}; }

TEST(DryLoad, IsEvenUnlessAScopeSaysOtherwise) {
  EXPECT_THAT(dry_load(all_of(11), 4, 2, 0), ElementsAre(3, 3, 3, 2));
  {
    const DryRoutingScope fewest({.load = DryLoad::Fewest, .per_token = 2});
    EXPECT_THAT(dry_load(all_of(11), 4, 2, 0), ElementsAre(0, 0, 6, 5)) << "all that are sent go to others";
    EXPECT_THAT(dry_load(all_of(11), 4, 4, 0), ElementsAre(3, 3, 3, 2)) << "of whom there are none";
    const nn::SampleScope documents({.padding = at::zeros({1, 11}, at::kBool)});
    EXPECT_THAT(dry_load(all_of(11), 4, 2, 0), ElementsAre(0, 0, 0, 0)) << "padding is sent to nobody";
    EXPECT_THAT(dry_load(all_of(11), 4, 4, 0), ElementsAre(0, 0, 0, 0));
  }
  EXPECT_THAT(dry_load(all_of(11), 4, 2, 0), ElementsAre(3, 3, 3, 2));
}

TEST(DryLoad, ATokenSendsAnExpertOneRowAtTheMost) {
  const DryRoutingScope most({.load = DryLoad::Most, .per_token = 3});
  EXPECT_THAT(dry_load(all_of(12), 4, 1, 2), ElementsAre(3, 3, 4, 2)) << "four tokens";
  EXPECT_THAT(dry_load(all_of(12), 4, 2, 1), ElementsAre(2, 2, 4, 4));
  EXPECT_THAT(dry_load(all_of(12), 6, 3, 1), ElementsAre(0, 0, 0, 4, 4, 4));
  EXPECT_THAT(dry_load({.all = 24, .begin = 0, .size = 12}, 4, 1, 2), ElementsAre(2, 1, 8, 1)) << "a part of the rows of eight tokens, which lie by expert";
}

TEST(DryLoad, ACapacityBoundsIt) {
  const DryRoutingScope most({.load = DryLoad::Most, .per_token = 1, .capacity_factor = 1.5});
  EXPECT_THAT(dry_load(all_of(12), 4, 1, 0), ElementsAre(6, 2, 2, 2)) << "of three even rows half as many more, and one for what is rounded up";
  const DryRoutingScope fewest({.load = DryLoad::Fewest, .per_token = 1, .capacity_factor = 1});
  EXPECT_THAT(dry_load(all_of(12), 4, 1, 0), ElementsAre(0, 1, 1, 1)) << "all tokens ask for one of the others, and the rest is dropped";
}

/// Of experts that lie on every rank, too, a capacity leaves as many rows as one choice of all tokens gets, and those lie in front.
TEST(DryLoad, ACapacityMayDropRowsOfExpertsThatAllHave) {
  {
    const DryRoutingScope fewest({.load = DryLoad::Fewest, .per_token = 1, .capacity_factor = 1});
    EXPECT_THAT(dry_load(all_of(13), 4, 4, 0), ElementsAre(1, 1, 1, 0));
    EXPECT_THAT(dry_load({.all = 13, .begin = 0, .size = 2}, 4, 4, 0), ElementsAre(1, 1, 0, 0));
    EXPECT_THAT(dry_load({.all = 13, .begin = 2, .size = 2}, 4, 4, 0), ElementsAre(1, 0, 0, 0));
    EXPECT_THAT(dry_load({.all = 13, .begin = 4, .size = 2}, 4, 4, 0), ElementsAre(0, 0, 0, 0));
    EXPECT_EQ(dry_sizes(/*blocks=*/1), nn::DrySizes::Least);
  }
  const DryRoutingScope most({.load = DryLoad::Most, .per_token = 1, .capacity_factor = 1});
  EXPECT_THAT(dry_load(all_of(13), 4, 4, 0), ElementsAre(4, 3, 3, 3));
  EXPECT_EQ(dry_sizes(1), nn::DrySizes::Most);
  EXPECT_TRUE(dry_rows_may_drop());
}

TEST(DryLoad, SaysWhichSizesARunMayHaveOtherwise) {
  const auto sizes = [](const DryRouting& routing, int64_t blocks) {
    const DryRoutingScope scope(routing);
    return dry_sizes(blocks);
  };
  EXPECT_EQ(sizes({.load = DryLoad::Even, .capacity_factor = 1}, 2), nn::DrySizes::Known) << "a plan takes them for granted";
  EXPECT_EQ(sizes({.load = DryLoad::Most}, 1), nn::DrySizes::Known) << "all rows come back to where they were";
  EXPECT_EQ(sizes({.load = DryLoad::Most}, 2), nn::DrySizes::Most);
  EXPECT_EQ(sizes({.load = DryLoad::Fewest}, 2), nn::DrySizes::Least);
  EXPECT_EQ(sizes({.load = DryLoad::Most, .alike = true, .capacity_factor = 1}, 2), nn::DrySizes::Known);
  const nn::SampleScope documents({.padding = at::zeros({1, 6}, at::kBool)});
  EXPECT_EQ(sizes({.load = DryLoad::Most, .alike = true}, 1), nn::DrySizes::Most) << "some may be padding";
}

/// Rows lie by expert, so a part of them has those of some experts.
TEST(DryLoad, OfAPartIsWhatLiesThere) {
  EXPECT_THAT(dry_load({.all = 12, .begin = 0, .size = 6}, 4, 2, 0), ElementsAre(3, 3, 0, 0));
  EXPECT_THAT(dry_load({.all = 12, .begin = 6, .size = 6}, 4, 2, 0), ElementsAre(0, 0, 3, 3));
  EXPECT_THAT(dry_load({.all = 11, .begin = 4, .size = 4}, 4, 2, 0), ElementsAre(0, 2, 2, 0)) << "of 3, 3, 3 and 2";
  EXPECT_THAT(dry_load({.all = 0, .begin = 0, .size = 0}, 4, 2, 0), ElementsAre(0, 0, 0, 0));
}

/// Experts that take as many tokens each have what they have, whatever is asked for; only how much of it is padding nobody knows.
TEST(DryLoad, OfExpertsThatHaveAlikeIsCertain) {
  const DryRows first{.all = 12, .begin = 0, .size = 6}, second{.all = 12, .begin = 6, .size = 6};
  for (const DryLoad asked : {DryLoad::Fewest, DryLoad::Even, DryLoad::Most}) {
    const DryRoutingScope alike({.load = asked, .alike = true, .per_token = 2, .capacity_factor = 1});
    EXPECT_THAT(dry_load(all_of(12), 4, 2, 0), ElementsAre(3, 3, 3, 3));
    EXPECT_THAT(dry_load(first, 4, 2, 1), ElementsAre(3, 3, 0, 0));
    EXPECT_THAT(dry_load(second, 4, 2, 1), ElementsAre(0, 0, 3, 3));
  }
  const nn::SampleScope documents({.padding = at::zeros({1, 6}, at::kBool)});
  {
    const DryRoutingScope most({.load = DryLoad::Most, .alike = true, .per_token = 2});
    EXPECT_THAT(dry_load(all_of(12), 4, 2, 1), ElementsAre(3, 3, 3, 3)) << "no padding is most";
    EXPECT_THAT(dry_load(first, 4, 2, 0), ElementsAre(3, 3, 0, 0));
    EXPECT_THAT(dry_load(first, 4, 2, 1), ElementsAre(2, 2, 1, 1)) << "each has one or two, where others have as many in front";
    EXPECT_THAT(dry_load(second, 4, 2, 0), ElementsAre(0, 0, 3, 3)) << "no expert of the first two reaches so far";
  }
  const DryRoutingScope fewest({.load = DryLoad::Fewest, .alike = true, .per_token = 2});
  EXPECT_THAT(dry_load(all_of(12), 4, 2, 1), ElementsAre(0, 0, 0, 0)) << "all may be padding";
}

}  // namespace
}  // namespace tessera::experts
