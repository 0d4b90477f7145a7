#include "tessera/checkpoint/gather_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/inject.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"

namespace tessera::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(GatherJson, BringsWhatEveryRankSays) {
  comm::run_ranks(3, [](comm::World& world) {
    const auto all = gather_json(world.group(), {{"rank", world.rank()}, {"text", std::string(static_cast<size_t>(100 * world.rank()), 'a')}});
    ASSERT_EQ(all.size(), 3);
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(all[static_cast<size_t>(rank)].at("rank"), rank);
    EXPECT_EQ(all[2].at("text").get<std::string>().size(), 200);
    for (const auto& nothing : gather_json(world.group(), nullptr)) EXPECT_TRUE(nothing.is_null());
  });
}

/// What the ranks say where `fault` happens to rank 1.
std::string failure_of(const std::string& fault, const std::function<void(comm::World&)>& body) {
  const auto faults = std::make_shared<comm::Decorator>(comm::fault_injection(comm::parse_faults(fault), 1, 0));
  const comm::Decorator injected = [faults](std::shared_ptr<comm::Engine> inner, const comm::GroupInfo& group) {
    return group.rank == 1 ? (*faults)(std::move(inner), group) : inner;
  };
  try {
    comm::run_ranks(2, body, {.timeout = std::chrono::seconds(5), .decorators = {injected}});
  } catch (const CommError& error) {
    return error.what();
  }
  return "no failure";
}

TEST(GatherJson, UsesNothingThatArrivedOtherwiseThanItWasSent) {
  const auto once = [](comm::World& world) { gather_json(world.group(), {{"rank", world.rank()}}); };
  EXPECT_THAT(failure_of("rank=1,count=1,do=corrupt", once), AllOf(HasSubstr("rank 0 of group world"), HasSubstr("arrived damaged: a text of -")));
  EXPECT_THAT(failure_of("rank=1,count=2,do=corrupt", once), AllOf(HasSubstr("rank 0 of group world"), HasSubstr("are others than were sent")));
  EXPECT_THAT(failure_of("rank=1,count=1,do=skip", once), HasSubstr("arrived damaged: a text of "));
}

TEST(GatherJson, RanksInDifferentExchangesAreToldApart) {
  const auto apart = [](comm::World& world) {
    if (world.rank() == 0) gather_json(world.group(), {{"step", 1}});
    if (world.rank() == 1) gather_json(world.group(), nlohmann::json::array({1}));
  };
  EXPECT_THAT(failure_of("rank=1,count=100,do=error", apart), HasSubstr("tells of something else than rank"));
}

}  // namespace
}  // namespace tessera::checkpoint
