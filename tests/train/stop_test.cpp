#include "tessera/train/stop.h"

#include <array>
#include <optional>
#include <thread>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/comm/testing.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

TEST(StopSignals, KeepTheFirst) {
  EXPECT_EQ(StopSignals().received(), 0);
  const StopSignals signals{SIGTERM, SIGINT};
  ::raise(SIGINT);
  EXPECT_EQ(signals.received(), SIGINT);
  ::raise(SIGTERM);
  EXPECT_EQ(signals.received(), SIGINT);
}

TEST(StopSignals, StartAnewAndRestoreWhatWasThere) {
  struct sigaction before{}, after{};
  ::sigaction(SIGTERM, nullptr, &before);
  {
    const StopSignals signals;
    ::raise(SIGTERM);
    EXPECT_EQ(signals.received(), SIGTERM);
  }
  ::sigaction(SIGTERM, nullptr, &after);
  EXPECT_EQ(before.sa_handler, after.sa_handler);
  const StopSignals again;
  EXPECT_EQ(again.received(), 0);
  EXPECT_THROW(StopSignals(), InternalError);
}

TEST(StopSignals, MayLeaveOneIgnored) {
  struct sigaction before{}, interrupt{}, after{};
  ::sigaction(SIGTERM, nullptr, &before);
  ::sigaction(SIGINT, nullptr, &interrupt);
  {
    StopSignals signals{SIGTERM, SIGINT};
    signals.leave_ignored(SIGTERM);
    ::raise(SIGTERM);
    EXPECT_EQ(signals.received(), SIGTERM) << "until it goes";
  }
  ::sigaction(SIGTERM, &before, &after);
  EXPECT_EQ(after.sa_handler, SIG_IGN);
  ::sigaction(SIGINT, nullptr, &after);
  EXPECT_EQ(after.sa_handler, interrupt.sa_handler);
}

TEST(StopSignals, OneRequestMayComeTwice) {
  const StopSignals signals({SIGTERM}, std::chrono::hours(1));
  for (int i = 0; i < 3; ++i) ::raise(SIGTERM);
  EXPECT_EQ(signals.received(), SIGTERM);
}

TEST(StopSignals, TheSecondEndsTheProcess) {
  const pid_t child = ::fork();
  if (child == 0) {
    const StopSignals signals({SIGTERM}, std::chrono::nanoseconds(0));
    ::raise(SIGTERM);
    if (signals.received() != SIGTERM) ::_exit(3);
    ::raise(SIGTERM);
    ::_exit(4);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM) << status;
}

TEST(StopVote, EndsAllBeforeTheSameRound) {
  constexpr int kRanks = 3, kRounds = 1000;
  std::array<int, kRanks> ended{}, asked{};
  std::array<std::optional<StopRequest>, kRanks> told;
  comm::run_ranks(kRanks, [&](comm::World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    StopVote vote(world.group(), [&, rank] { return ++asked[rank] == 4 && rank == 2 ? SIGTERM : 0; });
    while (ended[rank] < kRounds && !vote.stops()) ++ended[rank];
    told[rank] = vote.request();
  });
  EXPECT_GE(ended[0], 3) << "the fourth time is not before the fourth round";
  EXPECT_LT(ended[0], kRounds);
  for (size_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(ended[rank], ended[0]);
    EXPECT_EQ(asked[rank], 4);
    ASSERT_TRUE(told[rank].has_value());
    EXPECT_EQ(told[rank]->rank, 2);
    EXPECT_EQ(told[rank]->signal, SIGTERM);
  }
}

/// Rounds are of one rank's length, or another's: before how many ranks ask again they have to agree.
TEST(StopVote, IsHeldAboutOnceASecond) {
  std::array<int, 2> asked{};
  comm::run_ranks(2, [&](comm::World& world) {
    const auto rank = static_cast<size_t>(world.rank());
    StopVote vote(world.group(), [&, rank] { return ++asked[rank], 0; });
    for (int round = 0; round < 40; ++round) {
      EXPECT_FALSE(vote.stops());
      std::this_thread::sleep_for(std::chrono::milliseconds(rank == 0 ? 1 : 30));
    }
  });
  EXPECT_EQ(asked[0], asked[1]);
  EXPECT_GE(asked[0], 3);   // before rounds 0, 1, 3, 7, 15, 31 where nobody is slower
  EXPECT_LE(asked[0], 39);  // not before each
}

}  // namespace
}  // namespace tessera
