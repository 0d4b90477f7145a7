// What a dry run, which has no tokens, takes for the rows that routers send to each expert.

#include "tessera/expert_parallel/dry_load.h"

#include <numeric>

#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include "tessera/nn/sample_scope.h"

namespace tessera::experts {
namespace {

using testing::ElementsAre;

TEST(DryLoad, IsEvenUnlessAScopeSaysOtherwise) {
  EXPECT_THAT(dry_load(11, 4, 2, 0), ElementsAre(3, 3, 3, 2));
  {
    const DryRoutingScope fewest({.load = DryLoad::Fewest, .per_token = 2});
    EXPECT_THAT(dry_load(11, 4, 2, 0), ElementsAre(0, 0, 6, 5)) << "all that are sent go to others";
    EXPECT_THAT(dry_load(11, 4, 4, 0), ElementsAre(3, 3, 3, 2)) << "of whom there are none";
    const nn::SampleScope documents({.padding = at::zeros({1, 11}, at::kBool)});
    EXPECT_THAT(dry_load(11, 4, 2, 0), ElementsAre(0, 0, 0, 0)) << "padding is sent to nobody";
    EXPECT_THAT(dry_load(11, 4, 4, 0), ElementsAre(0, 0, 0, 0));
  }
  EXPECT_THAT(dry_load(11, 4, 2, 0), ElementsAre(3, 3, 3, 2));
}

TEST(DryLoad, ATokenSendsAnExpertOneRowAtTheMost) {
  const DryRoutingScope most({.load = DryLoad::Most, .per_token = 3});
  EXPECT_THAT(dry_load(12, 4, 1, 2), ElementsAre(3, 3, 4, 2)) << "four tokens";
  EXPECT_THAT(dry_load(12, 4, 2, 1), ElementsAre(2, 2, 4, 4));
  EXPECT_THAT(dry_load(12, 6, 3, 1), ElementsAre(0, 0, 0, 4, 4, 4));
  EXPECT_THAT(dry_load(12, 4, 1, 2, /*routed_by=*/2), ElementsAre(2, 1, 8, 1)) << "a part of the rows of eight tokens, which lie by expert";
}

TEST(DryLoad, ACapacityBoundsIt) {
  const DryRoutingScope most({.load = DryLoad::Most, .per_token = 1, .capacity_factor = 1.5});
  EXPECT_THAT(dry_load(12, 4, 1, 0), ElementsAre(6, 2, 2, 2)) << "of three even rows half as many more, and one for what is rounded up";
  const DryRoutingScope fewest({.load = DryLoad::Fewest, .per_token = 1, .capacity_factor = 1});
  EXPECT_THAT(dry_load(12, 4, 1, 0), ElementsAre(0, 1, 1, 1)) << "all tokens ask for one of the others, and the rest is dropped";
}

}  // namespace
}  // namespace tessera::experts
