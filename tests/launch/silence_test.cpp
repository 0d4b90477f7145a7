#include <memory>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/launch/board.h"
#include "tessera/launch/round.h"

/// What nodes decide that do not hear of others, which may be dead or behind a cut link.
namespace tessera::launch {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

const Rules one_to_three{.min_nodes = 1, .max_nodes = 3, .join_timeout_s = 20};

/// Of two agents; this one may begin the next round.
class Stopped : public ::testing::Test {
 protected:
  Round concluded() const { return decide(round, {{"other", peer}}, self, one_to_three).proposal; }

  Round round{.phase = Phase::Stopping, .number = 1, .nnodes = "1:3", .nodes = {{.id = "me"}, {.id = "other"}}, .cause = Cause::Failure, .reason = "why"};
  Self self{.node = {.id = "me"}, .record = {.round = 1, .failures = {{0, 1 << 8, ""}}}, .serving = std::pair<int64_t, comm::Endpoint>{2, {}}};
  Peer peer{.record = {.round = 1, .clean = true}};
};

/// The first agent that hears of the newcomer ends its ranks, and the others' lose them before their own agent has heard.
TEST_F(Stopped, RanksThatFailAsANodeJoinsUseUpNoRestart) {
  EXPECT_EQ(concluded().phase, Phase::Finished) << "without one";
  round.cause = Cause::Join;
  EXPECT_EQ(concluded().phase, Phase::Running);
  EXPECT_EQ(concluded().restarts, 0);
  EXPECT_EQ(concluded().reason, "why");
  self.record.failures.front().wait_status = 2 << 8;
  EXPECT_EQ(concluded().exit_code, 2) << "bad input is bad with any number of nodes";
}

/// The agent that serves was paused, and finds the ranks that its own have lost before it hears of the other agent.
TEST_F(Stopped, RanksWhosePeersWereEndedInSilenceUseUpNoRestart) {
  peer.record.ended_alone = true;
  EXPECT_EQ(concluded().phase, Phase::Running);
  EXPECT_EQ(concluded().restarts, 0);
  EXPECT_THAT(concluded().reason, HasSubstr("node other (, rank 1) ended its ranks while the rendezvous did not answer"));
  peer.record.round = 0;
  EXPECT_EQ(concluded().phase, Phase::Finished) << "in another round";
  peer.record.round = 1;
  self.record.failures.front().wait_status = 2 << 8;
  EXPECT_EQ(concluded().exit_code, 2);
  EXPECT_TRUE(read_record(write_record(peer.record)).ended_alone);
}

/// Who came may have gone back to the store that was there before, whose nodes then go on.
TEST(Takeover, BeginsNothingBeforeAMajorityHasWrittenToItsStore) {
  const Round seen{.phase = Phase::Running, .number = 3, .nnodes = "1:3", .job = "j", .nodes = {{.id = "s"}, {.id = "me"}, {.id = "other"}}};
  for (const bool comes : {true, false}) {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    store->set("p/round", write_round(taken_over(seen, "s", 2)));
    Board mine(store, "p/", "me", {}), others(store, "p/", "other", {});
    const Self self{.node = {.id = "me"}, .job = "j", .record = {.round = 3}, .serving = std::pair<int64_t, comm::Endpoint>{4, {}}, .took_part = true};
    NodeReport record = self.record;
    Board::Clock::time_point now{};
    const auto look = [&] {
      ++record.beat;
      const View view = mine.exchange(record, std::nullopt, now += 1s);
      return decide(view.round, view.peers, self, one_to_three);
    };
    for (int k = 0; k < 12; ++k) EXPECT_EQ(look().act, Step::Act::Wait) << k;
    if (comes) others.exchange({.beat = 1}, std::nullopt, now);
    if (!comes) now += 2s;
    const Step step = look();
    EXPECT_EQ(step.proposal.phase, comes ? Phase::Running : Phase::Finished);
    if (!comes) EXPECT_THAT(step.proposal.reason, HasSubstr("1 node of 2 cannot tell whether the others go on without it"));
  }
}

/// It may have been larger than the one of which the node that took over had to see a majority.
TEST(Takeover, AsksForAMajorityOfTheLastRound) {
  const Round three{.phase = Phase::Running, .number = 1, .nodes = {{.id = "s"}, {.id = "a"}, {.id = "b"}}};
  Round five = three;
  five.number = 2;
  for (const char* id : {"c", "d"}) five.nodes.push_back({.id = id});
  EXPECT_EQ(caught_up(taken_over(three, "s", 2), five, "s")->quorum, 3);
  EXPECT_EQ(caught_up(taken_over(three, "s", 0), five, "s")->quorum, 0) << "its server is proven to be gone";
}

TEST(Takeover, CountsWhoComesNowAndNotWhoCameOnce) {
  Visits visits;
  visits.note({"before"}, 0);
  visits.note({"comes", "went"}, 2);
  visits.note({"comes"}, 9);
  EXPECT_FALSE(visits.comes("before", 9, one_to_three));
  EXPECT_TRUE(visits.comes("went", 9, one_to_three)) << "as far as we know";
  EXPECT_TRUE(visits.comes("comes", 20, one_to_three));
  EXPECT_FALSE(visits.comes("went", 20, one_to_three));
}

TEST(Alone, RanksAreEndedAndNotKilledAsTheySave) {
  Self self{.record = {.running = true}};
  EXPECT_EQ(decide_alone(self, 6, one_to_three).signal, SIGTERM);
  for (const bool interrupted : {false, true}) {
    self.record = {.running = true};
    self.asked = true;
    if (interrupted) self.interrupted = SIGTERM;
    for (const double silence_s : {6., 60.}) EXPECT_EQ(decide_alone(self, silence_s, one_to_three).act, Step::Act::Wait) << "the time that they were given";
    self.record = {.clean = true};
    EXPECT_EQ(decide_alone(self, 6, one_to_three).act, interrupted ? Step::Act::Leave : Step::Act::Wait);
    EXPECT_EQ(decide_alone(self, 60, one_to_three).act, Step::Act::Leave);
    EXPECT_EQ(decide_alone(self, 60, one_to_three).exit_code, interrupted ? 0 : 1);
  }
  self.record.clean = false;
  EXPECT_EQ(decide_alone(self, 6, one_to_three).exit_code, 1);
}

}  // namespace
}  // namespace tessera::launch
