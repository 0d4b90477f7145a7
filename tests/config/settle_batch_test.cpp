#include "tessera/config/settle_batch.h"

#include <gmock/gmock.h>

#include "tests/config/rules.h"

namespace tessera {
namespace {

using config_rules::good;
using config_rules::refusal;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(SettleBatch, MakesOneSizeOfASharePerDataRank) {
  const auto settled = [](int64_t per_rank, int64_t global, int world, const auto& change) {
    Config config = good();
    config.batch.per_rank = per_rank;
    config.batch.global_size = global;
    change(config);
    settle_batch(config, world);
    EXPECT_EQ(config.batch.per_rank, 0);
    return config.batch.global_size;
  };
  const auto plain = [](Config&) {};
  EXPECT_EQ(settled(3, 0, 1, plain), 3);
  EXPECT_EQ(settled(3, 0, 5, plain), 15);
  EXPECT_EQ(settled(3, 15, 5, plain), 15) << "both, and equal";
  EXPECT_EQ(settled(0, 7, 5, plain), 7);
  EXPECT_EQ(settled(4, 0, 12, [](Config& c) { c.mesh.tp = 2, c.mesh.pp = 3; }), 8) << "ranks that layers are cut over see the same sequences";
  EXPECT_EQ(settled(4, 0, 6, [](Config& c) { c.zero.stage = 3, c.mesh.cp = 3; }), 8);
  const auto refused = [](int64_t per_rank, int64_t global, int world, int64_t micro = 1) -> std::string {
    Config config = good();
    config.batch = {.global_size = global, .micro_size = micro, .per_rank = per_rank};
    try {
      settle_batch(config, world);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "(accepted)";
  };
  EXPECT_EQ(refused(4, 8, 3),
            "batch.per_rank = 4: over 3 data ranks that is a step of 12 sequences, and batch.global_size = 8 says another; leave one of the two out");
  EXPECT_THAT(refused(-1, 0, 3), StartsWith("batch.per_rank = -1"));
  EXPECT_THAT(refused(3, 0, 3, 2), AllOf(StartsWith("batch.per_rank = 3"), HasSubstr("batch.micro_size = 2")));
  EXPECT_THAT(refused(1'000'000'000, 0, 3), StartsWith("batch.per_rank = 1000000000"));
  EXPECT_THAT(refusal([](Config& c) { c.batch.per_rank = 2; }), StartsWith("batch.per_rank = 2")) << "which nobody settled";
}

}  // namespace
}  // namespace tessera
