#include "tessera/launch/round.h"

#include <functional>
#include <memory>
#include <random>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/core/error.h"
#include "tessera/launch/board.h"

namespace tessera::launch {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

int status_of_exit(int code) { return code << 8; }

/// Agents of one job around one store, with a clock of the test's and workers that exist on paper only.
class Job {
 public:
  struct Agent {
    Self self;
    std::unique_ptr<Board> board;
    std::optional<View> view;
    bool alive = true;
    std::optional<Step> left;
    std::vector<int64_t> started;  ///< rounds
    comm::Endpoint master;         ///< of the last of them
    std::string server;            ///< whose store it uses
    c10::intrusive_ptr<c10d::HashStore> spare = c10::make_intrusive<c10d::HashStore>();
  };

  explicit Job(int count, Rules rules = {.min_nodes = 1, .max_nodes = 3}) : rules_(std::move(rules)) {
    rules_.place = "address h, port 1";
    rules_.run_id = "j";
    for (int i = 0; i < count; ++i) add();
  }

  Agent& add(int nproc = 2) {
    auto agent = std::make_unique<Agent>();
    const std::string id = "n" + std::to_string(agents.size());
    agent->self.node = {.id = id, .address = "10.0.0." + std::to_string(agents.size()), .nproc = nproc};
    agents.push_back(std::move(agent));
    if (serves_.empty()) serves_ = id;
    return *agents.back();
  }

  Agent& by_id(const std::string& id) { return *agents.at(std::stoul(id.substr(1))); }
  Agent& operator[](size_t i) { return *agents.at(i); }

  /// Every living agent looks and acts once per tenth of a second.
  void pass(double seconds) {
    for (int tick = 0; tick < seconds * 10; ++tick) {
      now_ += 100ms;
      for (const auto& agent : agents) {
        if (!agent->alive || agent->left || (is_slow && is_slow())) continue;
        act(*agent);
        if (server_dies_after_ && by_id(serves_).view->round.number > doomed_round_ && --*server_dies_after_ < 0) kill_server();
      }
    }
  }

  /// Whoever serves, and its store with it.
  void kill_server() {
    by_id(serves_).alive = false;
    server_dies_after_.reset();
  }

  /// It dies after so many looks of all, counted from now or from when a later round has begun.
  void doom_server(int looks, bool after_next_round) {
    doomed_round_ = by_id(serves_).view->round.number - (after_next_round ? 0 : 1);
    server_dies_after_ = looks;
  }

  const Round& round() {
    for (const auto& agent : agents) {
      if (agent->alive && agent->view) return agent->view->round;
    }
    throw std::logic_error("nobody is left");
  }

  std::vector<std::string> members() {
    std::vector<std::string> ids;
    for (const Node& node : round().nodes) ids.push_back(node.id);
    return ids;
  }

  int64_t living_members() {
    return std::ranges::count_if(round().nodes, [&](const Node& node) { return by_id(node.id).alive; });
  }

  /// Its agent begins another job, to which all that live are led.
  void begin_anew(size_t server) {
    serves_ = agents[server]->self.node.id;
    for (const auto& agent : agents) {
      if (agent->alive) use(*agent, serves_);
    }
  }

  static void fail(Agent& agent, Ending ending) {
    agent.self.record.failures.push_back(std::move(ending));
    agent.self.failed = true;
  }
  static void finish(Agent& agent) {
    agent.self.record.running = false;
    agent.self.record.done = agent.self.record.clean = true;
  }

  std::vector<std::unique_ptr<Agent>> agents;
  bool proven_gone = false;
  bool obedient = true;           ///< workers that are asked to end do so with 0
  bool stores_die = false;        ///< with their agents: the others then meet in a spare one
  std::function<bool()> is_slow;  ///< whether an agent does not come to look this time

 private:
  /// As Rendezvous does where a host that is gone says so. False: nobody serves yet.
  bool meet(Agent& agent) {
    if (agent.board && (by_id(agent.server).alive || !stores_die)) return true;
    if (!agent.view) return use(agent, serves_);
    const Round& seen = agent.view->round;
    for (const Node& node : seen.nodes) {
      if (node.id == agent.server || !by_id(node.id).alive) continue;
      c10d::Store& store = *by_id(node.id).spare;
      if (node.id == agent.self.node.id) {
        store.compareSet("job/round", "", write_round(taken_over(seen, agent.server, 0)));
        serves_ = node.id;
      } else if (!store.check({"job/round"})) {
        return false;
      } else if (const std::string there = store.get_to_str("job/round"); const auto wanted = caught_up(read_round(there), seen, agent.server)) {
        store.compareSet("job/round", there, write_round(*wanted));
      }
      return use(agent, node.id);
    }
    return false;
  }

  bool use(Agent& agent, const std::string& server) {
    if (stores_die && !by_id(server).alive) return false;
    agent.server = server;
    const std::string& id = agent.self.node.id;
    const Round initial{.nnodes = std::to_string(rules_.min_nodes) + ":" + std::to_string(rules_.max_nodes), .job = "drawn by " + id};
    agent.board = std::make_unique<Board>(by_id(server).spare, "job/", id, initial, [this](const std::vector<Node>& nodes) { return gone(nodes); });
    return true;
  }

  std::set<std::string> gone(const std::vector<Node>& nodes) {
    std::set<std::string> ids;
    for (const Node& node : nodes) {
      if (proven_gone && !by_id(node.id).alive) ids.insert(node.id);
    }
    return ids;
  }

  void act(Agent& agent) {
    if (!meet(agent)) return;
    std::optional<Proposal> proposal;
    for (int change = 0; change < 4; ++change) {
      ++agent.self.record.beat;
      agent.view = agent.board->exchange(agent.self.record, proposal, now_);
      proposal.reset();
      agent.self.unchanged_s = agent.view->unchanged_s;
      take_note(agent.self, agent.view->round);
      const Step step = decide(agent.view->round, agent.view->peers, agent.self, rules_);
      switch (step.act) {
        case Step::Act::Wait:
          agent.self.waited_s += 0.1;
          return;
        case Step::Act::Propose:
          proposal = Proposal{agent.view->round, step.proposal};
          break;
        case Step::Act::Serve:
          agent.self.serving = {step.number, {agent.self.node.address, ++port_}};
          break;
        case Step::Act::Start:
          agent.self.record = {
              .beat = agent.self.record.beat, .round = agent.view->round.number, .running = true, .attempts_before = agent.self.record.attempts_before};
          agent.self.failed = false;
          agent.started.push_back(agent.view->round.number);
          agent.master = agent.view->round.master;
          break;
        case Step::Act::Stop:
          agent.self.record.running = false;
          agent.self.record.clean = obedient && agent.self.record.failures.empty() && step.signal != SIGKILL;
          break;
        case Step::Act::Forget:
          agent.self = in_another_job(agent.self, agent.view->round);
          break;
        case Step::Act::Leave:
          agent.left = step;
          agent.self.record.left = true;
          agent.board->exchange(agent.self.record, std::nullopt, now_);
          return;
      }
    }
  }

  Rules rules_;
  std::string serves_;
  int port_ = 0;
  std::optional<int> server_dies_after_;
  int64_t doomed_round_ = 0;
  Board::Clock::time_point now_{};
};

TEST(Round, SurvivesItsText) {
  Round round{.phase = Phase::Stopping,
              .number = 3,
              .nnodes = "1:2",
              .job = "drawn",
              .nodes = {{"a", "::1", 2, 7, 1}},
              .restarts = 1,
              .master = {"h", 5},
              .cause = Cause::Lost,
              .signal = 15,
              .reason = "r",
              .last_lines = "\xff not UTF-8"};
  EXPECT_EQ(write_round(read_round(write_round(round))), write_round(round));
  const NodeReport record{.beat = 4, .round = 2, .running = true, .failures = {{1, 9, "comm x", "line"}}, .record_sentence = "s"};
  EXPECT_EQ(read_record(write_record(record)), record);
}

TEST(Round, RefusesWhatNoAgentWrote) {
  const Round good{.phase = Phase::Running, .number = 1, .nodes = {{"a", "::1", 2, 7, 1}, {"b", "::1", 1, 0, 0}}, .master = {"h", 5}};
  const auto refusal = [](const auto& read, const std::string& text) -> std::string {
    try {
      read(text);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "accepted";
  };
  const auto refused = [&](const auto& change) {
    Round round = good;
    change(round);
    return refusal(read_round, write_round(round));
  };
  EXPECT_EQ(refused([](Round&) {}), "accepted");
  EXPECT_THAT(refused([](Round& round) { round.phase = static_cast<Phase>(7); }), HasSubstr("the round in the store cannot be read: phase 7; another program"));
  EXPECT_THAT(refused([](Round& round) { round.cause = static_cast<Cause>(-1); }), HasSubstr("cause -1"));
  EXPECT_THAT(refused([](Round& round) { round.nodes[1].id = "a"; }), HasSubstr("node 'a' is there twice"));
  EXPECT_THAT(refused([](Round& round) { round.nodes[0].nproc = 0; }), HasSubstr("node 'a' has 0 ranks"));
  EXPECT_THAT(refused([](Round& round) { round.nodes[0].nproc = round.nodes[1].nproc = 1 << 20; }), HasSubstr("2097152 ranks"));
  EXPECT_THAT(refused([](Round& round) { round.master.port = 65536; }), HasSubstr("port 65536"));
  EXPECT_THAT(refused([](Round& round) { round.restarts = 2; }), HasSubstr("2 restarts in round 1"));

  const std::string record = write_record({.beat = 4, .failures = {{1, 9, "", ""}}});
  EXPECT_EQ(refusal(read_record, record), "accepted");
  for (const auto& [part, other] :
       {std::pair{"\"beat\":4", "\"beat\":18446744073709551615"}, {"\"rank\":1", "\"rank\":4294967297"}, {"\"rank\":1", "\"rank\":1.5"}, {"4", ""}}) {
    std::string damaged = record;
    damaged.replace(damaged.find(part), std::string(part).size(), other);
    EXPECT_THAT(refusal(read_record, damaged), HasSubstr("the record in the store cannot be read")) << damaged;
  }
}

TEST(Round, PlacesRanks) {
  const Round round{.nodes = {{"a", "", 2}, {"b", "", 1}, {"c", "", 3}}};
  EXPECT_EQ(place_of(round, "c")->first_rank, 3);
  EXPECT_EQ(place_of(round, "c")->node_rank, 2);
  EXPECT_EQ(place_of(round, "a")->world_size, 6);
  EXPECT_FALSE(place_of(round, "d"));
  EXPECT_EQ(ranks_of(round, "b"), "rank 2");
  EXPECT_EQ(ranks_of(round, "c"), "ranks 3-5");
}

TEST(Round, BeginsAtOnceWhenAllHaveCome) {
  for (const int count : {1, 2, 3, 5, 8}) {
    Job job(count, {.min_nodes = count, .max_nodes = count});
    job.pass(1);
    ASSERT_EQ(job.round().phase, Phase::Running) << count;
    EXPECT_EQ(static_cast<int>(job.members().size()), count);
    for (const auto& agent : job.agents) EXPECT_THAT(agent->started, ElementsAre(1));
  }
}

TEST(Round, WaitsForALastCall) {
  Job job(2);
  job.pass(2.5);
  EXPECT_EQ(job.round().phase, Phase::Joining);
  job.pass(1);
  EXPECT_EQ(job.round().phase, Phase::Running);
}

TEST(Round, EndsWellWhenAllRanksDo) {
  Job job(3);
  job.pass(1);
  Job::finish(job[0]);
  Job::finish(job[2]);
  job.pass(1);
  EXPECT_EQ(job.round().phase, Phase::Running);
  Job::finish(job[1]);
  job.pass(1);
  for (const auto& agent : job.agents) {
    ASSERT_TRUE(agent->left);
    EXPECT_EQ(agent->left->exit_code, 0);
    EXPECT_EQ(agent->left->sentence, "");
  }
}

TEST(Round, LastLinesOfAnAttemptAreShownOnce) {
  Job job(1, {.min_nodes = 1, .max_nodes = 1, .max_restarts = 1});
  job.pass(1);
  Job::fail(job[0], {0, status_of_exit(7), "", "last words"});
  job.pass(1);
  EXPECT_EQ(job.round().last_lines, "last lines of rank 0:\nlast words");
  Job::finish(job[0]);
  job.pass(1);
  ASSERT_TRUE(job[0].left);
  EXPECT_EQ(job[0].left->exit_code, 0);
  EXPECT_EQ(job.round().last_lines, "");
}

TEST(Round, RestartsAfterAFailureUntilNoneIsLeft) {
  Job job(2, {.min_nodes = 2, .max_nodes = 2, .max_restarts = 1});
  job.pass(1);
  Job::fail(job[1], {3, status_of_exit(7), "", "last words"});
  Job::fail(job[0], {0, status_of_exit(1), "comm lost a peer"});  // a consequence, though seen by the first node
  job.pass(1);
  EXPECT_EQ(job.round().number, 2);
  EXPECT_EQ(job.round().restarts, 1);
  EXPECT_EQ(job.round().job, "drawn by n0") << "as it began";
  EXPECT_EQ(job.round().reason, "rank 3 failed with exit code 7; restart 1 of 1");
  EXPECT_EQ(job.round().last_lines, "last lines of rank 3:\nlast words");
  Job::fail(job[0], {1, SIGSEGV, ""});
  job.pass(1);
  for (const auto& agent : job.agents) {
    ASSERT_TRUE(agent->left);
    EXPECT_EQ(agent->left->exit_code, 1);
    EXPECT_EQ(agent->left->sentence, "rank 1 was ended by SIGSEGV (segmentation fault); restarted 1 time before");
  }
}

TEST(Round, TakesTheRecordsSentenceForALostConnection) {
  Job job(2, {.min_nodes = 2, .max_nodes = 2});
  job.pass(1);
  Job::fail(job[0], {0, status_of_exit(1), "comm timed out"});
  job[1].self.record.record_sentence = "rank 2 never entered all_gather #7";
  job.pass(1);
  EXPECT_EQ(job[0].left->sentence, "rank 2 never entered all_gather #7");
}

TEST(Round, DoesNotRestartBadInput) {
  Job job(2, {.min_nodes = 2, .max_nodes = 2, .max_restarts = 5});
  job.pass(1);
  Job::fail(job[1], {2, status_of_exit(2), "config optim.lr: too much"});
  job.pass(1);
  EXPECT_EQ(job[0].left->exit_code, 2);
  EXPECT_EQ(job[0].left->sentence, "optim.lr: too much");
}

TEST(Round, GoesOnWithoutANodeThatVanished) {
  Job job(3);
  job.pass(1);
  job[0].alive = false;
  Job::fail(job[1], {2, status_of_exit(1), ""});  // whatever the others' ranks say of it
  job.pass(7);
  EXPECT_EQ(job.round().phase, Phase::Running);
  EXPECT_THAT(job.members(), ElementsAre("n1", "n2"));
  EXPECT_EQ(job.round().restarts, 0);
  EXPECT_EQ(job.round().reason, "node n0 (10.0.0.0, ranks 0-1) vanished: no sign of life for 5 s");
  EXPECT_THAT(job[1].started, ElementsAre(1, 2));
}

/// Ranks that lost a node fail; the node, which was only slow, is back before all have ended.
TEST(Round, ANodeThatWasSilentAndIsBackUsesUpNoRestart) {
  for (const Cause cause : {Cause::Lost, Cause::Failure}) {
    const Round round{
        .phase = Phase::Stopping, .number = 1, .nnodes = "2:2", .nodes = {{.id = "me"}, {.id = "slow"}}, .cause = cause, .reason = "node slow vanished"};
    Self self{.node = {.id = "me"},
              .record = {.round = 1, .failures = {{0, status_of_exit(1), "comm lost a peer"}}},
              .serving = std::pair<int64_t, comm::Endpoint>{2, {}},
              .took_part = true};
    const std::map<std::string, Peer> peers{{"slow", {.record = {.round = 1, .failures = {{1, status_of_exit(3), ""}}}}}};
    const Step step = decide(round, peers, self, {.min_nodes = 2, .max_nodes = 2, .max_restarts = 1});
    EXPECT_EQ(step.proposal.phase, Phase::Running);
    EXPECT_EQ(step.proposal.nodes.size(), 2u);
    EXPECT_EQ(step.proposal.restarts, cause == Cause::Lost ? 0 : 1);
    EXPECT_EQ(step.proposal.reason, cause == Cause::Lost ? "node slow vanished" : "rank 1 failed with exit code 3; restart 1 of 1");
  }
}

TEST(Round, HearsSoonerOfAnAgentThatIsGone) {
  Job job(3);
  job.proven_gone = true;
  job.pass(1);
  job[2].alive = false;
  job.pass(2.5);
  EXPECT_THAT(job.members(), ElementsAre("n0", "n1"));
  EXPECT_THAT(job.round().reason, HasSubstr("its agent is gone"));
}

TEST(Round, EndsWhereTooFewAreLeft) {
  Job job(3, {.min_nodes = 3, .max_nodes = 3, .max_restarts = 9});
  job.pass(1);
  job[2].alive = false;
  job.pass(7);
  EXPECT_EQ(job[0].left->exit_code, 1);
  EXPECT_EQ(job[0].left->sentence, "node n2 (10.0.0.2, ranks 4-5) vanished: no sign of life for 5 s; 2 nodes left, --nnodes = 3:3 asks for at least 3");
}

TEST(Round, AMinorityEndsUnlessTheOthersAreGone) {
  for (const bool proven : {false, true}) {
    Job job(3);
    job.proven_gone = proven;
    job.pass(1);
    job[1].alive = job[2].alive = false;
    job.pass(7);
    EXPECT_EQ(job.round().phase, proven ? Phase::Running : Phase::Finished);
    if (!proven) EXPECT_THAT(job[0].left->sentence, HasSubstr("1 node of 3 cannot tell whether the others go on without it"));
  }
}

TEST(Round, ATakeoverNeedsThoseWhoMadeItsMajority) {
  for (const int left : {1, 2}) {
    Round round{.phase = Phase::Stopping, .number = 1, .nnodes = "1:3", .nodes = {{.id = "me"}, {.id = "other"}}, .quorum = 2, .cause = Cause::Lost};
    Self self{.node = {.id = "me"}, .record = {.round = 1}, .serving = std::pair<int64_t, comm::Endpoint>{2, {}}, .took_part = true};
    const std::map<std::string, Peer> peers{{"other", {.record = {.round = 1}, .silent_s = left == 1 ? 9.0 : 0.0}}};
    const Step step = decide(round, peers, self, {.min_nodes = 1, .max_nodes = 3});
    EXPECT_EQ(step.proposal.phase, left == 1 ? Phase::Finished : Phase::Running);
    EXPECT_EQ(step.proposal.quorum, left == 1 ? 2 : 0);
  }
}

TEST(Round, TakesANodeInAtARestart) {
  Job job(2);
  job.pass(4);
  ASSERT_THAT(job.members(), ElementsAre("n0", "n1"));
  job.add();
  job.pass(2);
  EXPECT_THAT(job.members(), ElementsAre("n0", "n1", "n2"));
  EXPECT_EQ(job.round().number, 2);
  EXPECT_EQ(job.round().restarts, 0);
  EXPECT_EQ(job.round().cause, Cause::None) << "of the stop, which is over";
  job.add();  // one more than MAX waits for a place
  job.pass(2);
  EXPECT_EQ(job.round().number, 2);
  EXPECT_EQ(job.round().waiting.size(), 1u);
  job[1].alive = false;
  job.pass(7);
  EXPECT_THAT(job.members(), ElementsAre("n0", "n2", "n3"));
}

TEST(Round, ANodeThatVanishesWhileItWaitsIsForgotten) {
  Job job(3);
  job.pass(1);
  job.add();
  job.pass(0.5);
  ASSERT_EQ(job.round().waiting.size(), 1u);
  job[3].alive = false;
  job.pass(7);
  EXPECT_THAT(job.round().waiting, IsEmpty());
  EXPECT_EQ(job.round().number, 1);
  EXPECT_EQ(job.round().phase, Phase::Running);
}

TEST(Round, ANodeThatComesWhenRanksAreDoneChangesNothing) {
  Job job(2);
  job.pass(4);
  Job::finish(job[0]);
  job.pass(0.5);
  job.add();
  job.pass(1);
  EXPECT_EQ(job.round().number, 1);
  Job::finish(job[1]);
  job.pass(1);
  EXPECT_EQ(job[2].left->exit_code, 0);
  EXPECT_EQ(job[2].left->sentence,
            "this node ran nothing: the job at address h, port 1 (--rdzv-id j), in which it waited for a place, has ended; a job of its own needs another "
            "--rdzv-endpoint");
}

TEST(Round, ANodeThatRanBeforeItWaitedHasTheJobsEnd) {
  Job job(3);
  job.pass(1);
  job[2].alive = false;  // stopped
  job.pass(7);
  Job::finish(job[0]);
  job[2].alive = true;
  job.pass(0.5);
  ASSERT_EQ(job.round().waiting.size(), 1u);
  Job::finish(job[1]);
  job.pass(1);
  EXPECT_EQ(job[2].left->exit_code, 0);
  EXPECT_EQ(job[2].left->sentence, "");
}

TEST(Round, AJobOfOneNumberOfNodesEndsWithoutAThird) {
  for (const bool fails : {false, true}) {
    Job job(2, {.min_nodes = 2, .max_nodes = 2});
    job.pass(1);
    job.add();
    job.pass(1);
    if (fails) Job::fail(job[0], {0, status_of_exit(2), "config optim.lr: too much"});
    if (!fails) Job::finish(job[0]);
    if (!fails) Job::finish(job[1]);
    job.pass(1);
    EXPECT_EQ(job[1].left->exit_code, fails ? 2 : 0);
    ASSERT_TRUE(job[2].left);
    EXPECT_EQ(job[2].left->exit_code, fails ? 2 : 1);
    EXPECT_THAT(job[2].left->sentence, HasSubstr(fails ? "has ended: optim.lr: too much; a job of its own" : "has ended; a job of its own"));
  }
}

TEST(Round, AJobOfOneNodeTakesNoOther) {
  Job job(1, {.min_nodes = 1, .max_nodes = 1});
  job.pass(1);
  job.add();
  job.pass(0.5);
  ASSERT_TRUE(job[1].left);
  EXPECT_EQ(job[1].left->exit_code, 2);
  EXPECT_EQ(
      job[1].left->sentence,
      "--nnodes = 1:1: the job at address h, port 1 has its one node already; give this one another --rdzv-endpoint, or start it once that one has ended");
  Job::finish(job[0]);
  job.pass(1);
  EXPECT_EQ(job[0].left->exit_code, 0);
}

TEST(Round, AnInterruptEndsAllWithoutARestart) {
  for (const bool obedient : {true, false}) {
    Job job(2, {.min_nodes = 2, .max_nodes = 2, .max_restarts = 5});
    job.obedient = obedient;
    job.pass(1);
    job[1].self.interrupted = SIGTERM;
    job.pass(1);
    for (const auto& agent : job.agents) {
      ASSERT_TRUE(agent->left);
      EXPECT_EQ(agent->left->exit_code, obedient ? 0 : 1);
      EXPECT_EQ(agent->left->sentence, obedient ? "" : "interrupted by SIGTERM (terminated); all ranks have ended");
    }
  }
}

TEST(Round, AnInterruptWhileARoundStopsIsTheEnd) {
  const Round round{.phase = Phase::Stopping, .number = 1, .nnodes = "1:1", .nodes = {{.id = "me"}}, .cause = Cause::Failure};
  const Self self{.node = {.id = "me"}, .record = {.round = 1, .failures = {{0, status_of_exit(3), ""}}}, .interrupted = SIGTERM};
  const Rules rules{.max_restarts = 5};
  const Step step = decide(round, {}, self, rules);
  EXPECT_EQ(step.act, Step::Act::Propose);
  EXPECT_EQ(step.proposal.cause, Cause::Interrupt);
  EXPECT_EQ(step.proposal.signal, SIGTERM);
  EXPECT_EQ(decide(step.proposal, {}, self, rules).proposal.phase, Phase::Finished) << "in place of a restart";
}

TEST(Round, ALeaderThatVanishesWhileNodesJoinIsReplaced) {
  Job job(2, {.min_nodes = 2, .max_nodes = 3});
  job.pass(1);
  job[0].alive = false;
  job.pass(6);
  EXPECT_EQ(job.round().phase, Phase::Joining);
  job.add();
  job.pass(4);
  EXPECT_THAT(job.members(), ElementsAre("n1", "n2"));
}

TEST(Round, SaysHowManyCame) {
  Job job(1, {.min_nodes = 2, .max_nodes = 2, .join_timeout_s = 4});
  job.pass(5);
  EXPECT_EQ(job[0].left->exit_code, 1);
  EXPECT_THAT(job[0].left->sentence, HasSubstr("1 node came to address h, port 1 within 4 s, --nnodes = 2:2 asks for at least 2"));
}

TEST(Round, RefusesAgentsThatDisagree) {
  Round round{.nnodes = "2:2", .nodes = {{.id = "other", .order = 0}}};
  Self self;
  self.node.id = "me";
  for (const Phase phase : {Phase::Running, Phase::Stopping, Phase::Joining}) {
    round.phase = phase;
    EXPECT_EQ(decide(round, {}, self, {.min_nodes = 1, .max_nodes = 2}).exit_code, 2);
  }
  self.node.order = 0;
  const Step step = decide(round, {}, self, {.min_nodes = 2, .max_nodes = 2});
  EXPECT_EQ(step.exit_code, 2);
  EXPECT_THAT(step.sentence, HasSubstr("--node-rank = 0: node other has it already"));
}

TEST(Round, StaticNodesKeepTheirOrder) {
  Job job(0, {.min_nodes = 3, .max_nodes = 3});
  for (const int order : {2, 0, 1}) job.add().self.node.order = order;
  job.pass(1);
  EXPECT_THAT(job.members(), ElementsAre("n1", "n2", "n0"));
}

TEST(Round, StaticNodesAreReplacedInTheirOrder) {
  for (const size_t victim : {1, 2}) {  // of order 0, whose node begins a job, and 1
    Job job(0, {.min_nodes = 3, .max_nodes = 3});
    for (const int order : {2, 0, 1}) job.add().self.node.order = order;
    job.pass(1);
    for (const int order : {2, job[victim].self.node.order}) job.add().self.node.order = order;
    job.pass(0.5);
    ASSERT_EQ(job.round().waiting.size(), 2u);
    job[victim].alive = false;
    job.pass(7);
    EXPECT_EQ(job.round().phase, Phase::Running);
    EXPECT_THAT(job.members(), victim == 1 ? ElementsAre("n4", "n2", "n0") : ElementsAre("n1", "n4", "n0"));
    EXPECT_THAT(job[4].started, ElementsAre(2));
    EXPECT_EQ(job.round().waiting.size(), 1u) << "whose place is taken";
  }
}

TEST(Round, WhoWaitsWhileNodesJoinMovesUp) {
  for (const int dead : {1, 2}) {
    Job job(1, {.min_nodes = 2, .max_nodes = 2});
    job.pass(0.1);
    job[0].alive = false;  // whose part it is to begin
    job.add();
    job.pass(0.1);
    if (dead == 2) job[1].alive = false;
    job.add();
    job.add();
    job.pass(0.1);
    ASSERT_EQ(job.agents[3]->view->round.waiting.size(), 2u);
    job.pass(7);
    EXPECT_EQ(job.agents[3]->view->round.phase, Phase::Running);
    EXPECT_THAT(job[2].started, ElementsAre(1));
    EXPECT_EQ(job.agents[3]->view->round.waiting.size(), dead == 2 ? 0u : 1u);
  }
}

/// The agent that serves is killed and started again at once, or another one has its place. What the other agent knows is of the job before.
TEST(Round, WhoIsLedToAnotherJobStartsItsRanksThere) {
  for (const int rounds : {1, 2}) {
    for (const bool done : {false, true}) {
      Job job(2, {.min_nodes = 2, .max_nodes = 2, .max_restarts = 1, .join_timeout_s = 20});
      job.pass(1);
      if (rounds == 2) Job::fail(job[1], {2, status_of_exit(3), ""});
      job.pass(25);
      ASSERT_EQ(job[1].started.size(), static_cast<size_t>(rounds));
      if (done) Job::finish(job[1]);
      job[1].self.serving = {1, {"stale", 1}};
      job.pass(0.1);
      job[0].alive = false;
      job.add();
      job.begin_anew(2);
      job.pass(0.1);
      EXPECT_FALSE(job[1].self.record.running) << "workers of a job that is gone";
      EXPECT_FALSE(job[1].left) << "it has waited in the other one for no time yet";
      job.pass(1);
      EXPECT_EQ(job.round().phase, Phase::Running);
      EXPECT_EQ(job.round().number, 1);
      EXPECT_EQ(job[1].started.back(), 1);
      EXPECT_EQ(job[1].started.size(), rounds + 1u) << "also where they were done before";
      EXPECT_THAT(job[2].started, ElementsAre(1));
      for (const int agent : {1, 2}) EXPECT_EQ(folder_number(job[agent].view->round), rounds) << "on all nodes: no folder of the job before is used again";
      EXPECT_EQ(job[1].master, job[2].master);
      EXPECT_NE(job[1].master.host, "stale");
      Job::finish(job[2]);
      job.pass(1);
      EXPECT_FALSE(job[2].left) << "before all ranks of this job are";
      Job::finish(job[1]);
      job.pass(1);
      for (const int agent : {1, 2}) EXPECT_EQ(job[agent].left->exit_code, 0);
    }
  }
}

TEST(Round, WhoWasAskedToEndStartsNothingInAnotherJob) {
  for (const bool saves : {true, false}) {
    Job job(2, {.min_nodes = 2, .max_nodes = 2});
    job.pass(1);
    job[0].alive = false;
    job[1].self.interrupted = SIGTERM;
    job.add();
    job.begin_anew(2);
    job.pass(1);
    EXPECT_TRUE(job[1].self.record.running) << "as long as they may";
    EXPECT_FALSE(job[1].left);
    if (saves) Job::finish(job[1]);
    job[1].self.record.running = false;
    job.pass(1);
    EXPECT_THAT(job[1].started, ElementsAre(1));
    EXPECT_EQ(job[1].left->exit_code, saves ? 0 : 1);
    EXPECT_EQ(job[1].left->sentence, saves ? "" : "interrupted by SIGTERM (terminated); all ranks have ended");
    EXPECT_EQ(job[2].view->round.nodes.size(), 1u);
  }
  Job job(2, {.min_nodes = 3, .max_nodes = 3});
  job.pass(1);
  job[1].self.interrupted = SIGTERM;
  job.add();
  job.begin_anew(2);
  job.pass(1);
  EXPECT_THAT(job[1].left->sentence, HasSubstr("while waiting for other nodes")) << "it ran nothing";
}

/// Of a job that never began, whoever serves gives up first, and the next one serves.
TEST(Round, WaitsForNodesNoLongerBecauseAnotherAgentServes) {
  Job job(3, {.min_nodes = 4, .max_nodes = 4, .join_timeout_s = 8});
  job.pass(5);
  job[0].alive = false;
  job.begin_anew(1);
  job.pass(2);
  EXPECT_FALSE(job[1].left);
  job.pass(2);
  for (const int agent : {1, 2}) EXPECT_THAT(job[agent].left->sentence, HasSubstr("3 nodes came to address h, port 1 within 8 s"));
}

TEST(Round, WhoWaitedForAPlaceHasItsTimeInTheNextJob) {
  Job job(3, {.min_nodes = 2, .max_nodes = 2, .join_timeout_s = 8});
  job.pass(20);
  ASSERT_THAT(job[2].started, IsEmpty());
  job[0].alive = job[1].alive = false;
  job.begin_anew(2);
  job.pass(5);
  EXPECT_FALSE(job[2].left);
  job.pass(5);
  EXPECT_THAT(job[2].left->sentence, HasSubstr("1 node came"));
}

/// "me" of the members s (whose store went), a, me, b and of w, which waits.
class WayBackTest : public ::testing::Test {
 protected:
  std::string goes(int min) const {
    const WayBack way = way_back(loss, {.min_nodes = min, .max_nodes = 4});
    switch (way.to) {
      case WayBack::To::TakeOver:
        return "takes over";
      case WayBack::To::Join:
        return "joins " + way.node;
      case WayBack::To::Follow:
        return "follows";
      case WayBack::To::Nowhere:
        break;
    }
    return way.problem;
  }
  Loss loss{.seen = {.phase = Phase::Running, .number = 1, .nodes = {{.id = "s"}, {.id = "a"}, {.id = "me"}, {.id = "b"}}, .waiting = {{.id = "w"}}},
            .server = "s",
            .self = "me",
            .old_place = OldPlace::NewJob,
            .spares = {{"a", Spare::Refused}, {"b", Spare::Undecided}, {"w", Spare::Undecided}}};
};

TEST_F(WayBackTest, TheFirstThatIsLeftDecidesAndOthersDoAsItDid) {
  for (const auto& [spare, then] : {std::pair{Spare::Undecided, "node a has not taken over"}, {Spare::Serves, "joins a"}, {Spare::Followed, "follows"}}) {
    loss.spares["a"] = spare;
    for (const char* self : {"me", "w"}) {
      loss.self = self;
      for (const int min : {1, 9}) EXPECT_EQ(goes(min), then) << "whatever it counts itself";
    }
  }
  loss.old_place = OldPlace::Nobody;
  EXPECT_EQ(goes(9), "node a has gone to another job there");
  loss.spares = {{"a", Spare::Refused}, {"me", Spare::Refused}, {"b", Spare::Silent}};
  EXPECT_EQ(goes(1), "this node is no member, and no other one is left");
  for (const OldPlace place : {OldPlace::NewJob, OldPlace::Stranger}) {
    loss.old_place = place;
    EXPECT_EQ(goes(1), "follows") << "who ran nothing";
  }
}

TEST_F(WayBackTest, NodesThatAreNotThereDoNotKeepAJobAlive) {
  EXPECT_EQ(goes(3), "takes over") << "with b, and w that waits";
  EXPECT_EQ(goes(4), "follows");
  for (const char* other : {"b", "w"}) {
    for (const Spare spare : {Spare::Refused, Spare::Followed}) {
      loss.spares = {{"a", Spare::Refused}, {"b", Spare::Undecided}, {"w", Spare::Undecided}};
      loss.spares[other] = spare;
      EXPECT_EQ(goes(2), "takes over");
      EXPECT_EQ(goes(3), "follows") << other;
    }
  }
  loss.seen.nodes[2].order = 1, loss.seen.waiting[0].order = 1;
  loss.spares["b"] = Spare::Undecided;
  EXPECT_EQ(goes(3), "follows") << "w, whose place is taken, is none of them";
  loss.seen.cause = Cause::Interrupt;
  EXPECT_EQ(goes(3), "takes over") << "to its end, which no other job is";
  loss.seen.cause = Cause::None;
  for (const OldPlace place : {OldPlace::Nobody, OldPlace::Stranger}) {
    loss.old_place = place;
    EXPECT_EQ(goes(4), "takes over") << "and ends with the reason";
  }
  loss.old_place = OldPlace::NewJob;
  loss.spares["b"] = Spare::Serves;
  EXPECT_EQ(goes(1), "joins b") << "which took over while this one was silent";
}

TEST_F(WayBackTest, WhoDoesNotAnswerMayGoOnElsewhere) {
  const std::string waits = "its host does not answer, and 1 of 4 nodes cannot tell whether the others go on without them";
  loss.spares = {{"a", Spare::Silent}, {"b", Spare::Refused}, {"w", Spare::Refused}};
  EXPECT_EQ(goes(2), waits) << "it may be slow";
  loss.lasts_s = 6;
  EXPECT_EQ(goes(2), "follows") << "neither a nor this one is 2";
  EXPECT_EQ(goes(1), waits) << "a may go on";
  loss.spares["w"] = Spare::Silent;
  EXPECT_EQ(goes(2), waits) << "a and w may go on";
  EXPECT_EQ(goes(3), "follows");
  loss.spares["w"] = Spare::Refused, loss.spares["b"] = Spare::Undecided;
  EXPECT_EQ(goes(2), waits) << "b may come";
  loss.came = 3;
  EXPECT_EQ(goes(2), "takes over");
  EXPECT_EQ(way_back(loss, {.min_nodes = 2, .max_nodes = 4}).quorum, 3);
  loss.came = 1;
  loss.old_place = OldPlace::Silent;
  EXPECT_EQ(goes(3), waits);
}

/// An agent that was killed and started again, or has given up, stands in the list for a while.
TEST(Round, BeginsWithNobodyWhoIsGone) {
  for (const bool gives_up : {false, true}) {
    Job job(2, {.min_nodes = 3, .max_nodes = 3});
    job.pass(0.5);
    if (gives_up) job[1].self.waited_s = 601;
    if (!gives_up) job[1].alive = false;
    if (!gives_up) job.add();
    job.pass(0.1);
    if (gives_up) ASSERT_THAT(job[1].left->sentence, HasSubstr("2 nodes came"));
    if (gives_up) job.add();
    job.pass(2);
    EXPECT_EQ(job.round().phase, Phase::Joining);
    EXPECT_EQ(job.members().size(), gives_up ? 2u : 3u) << "who says so is forgotten at once";
    job.pass(5);
    EXPECT_THAT(job.members(), ElementsAre("n0", "n2"));
    job.add();
    job.pass(1);
    EXPECT_EQ(job.round().phase, Phase::Running);
    for (const int agent : {0, 2, 3}) EXPECT_THAT(job[agent].started, ElementsAre(1));
  }
}

TEST(Round, AStaticNodeThatIsStartedAgainWaitsForItsOwnPlace) {
  Job job(0, {.min_nodes = 3, .max_nodes = 3});
  for (const int order : {0, 1}) job.add().self.node.order = order;
  job.pass(0.5);
  job[1].alive = false;
  job.add().self.node.order = 1;
  job.pass(7);
  EXPECT_FALSE(job[2].left);
  EXPECT_THAT(job.members(), ElementsAre("n0", "n2"));
  job.add().self.node.order = 1;
  job.pass(1);
  EXPECT_EQ(job[3].left->exit_code, 2) << "whose holder lives";
}

TEST(Round, AFinishedJobOfThatNameIsNotOurs) {
  Round round{.phase = Phase::Finished, .nnodes = "1:1", .exit_code = 0};
  Self self;
  EXPECT_EQ(decide(round, {}, self, {}).act, Step::Act::Wait);
  self.waited_s = 601;
  EXPECT_EQ(decide(round, {}, self, {}).exit_code, 1);
}

/// The agent that serves begins a round, of which one of the others hears, and the one that takes over does not.
TEST(Round, OneThatATakeoverHasNotSeenIsNotBegunAgain) {
  Job job(3, {.min_nodes = 2, .max_nodes = 3, .max_restarts = 5});
  job.proven_gone = job.stores_die = true;
  job.pass(1);
  Job::fail(job[2], {4, status_of_exit(3), ""});
  int looks = 0;
  job.is_slow = [&] { return ++looks > 6 && looks % 3 == 2; };  // n1, once all have ended their workers
  job.pass(0.5);
  ASSERT_THAT(job[2].started, ElementsAre(1, 2));
  ASSERT_THAT(job[1].started, ElementsAre(1));
  job.kill_server();
  job.is_slow = {};
  job.pass(5);
  EXPECT_EQ(job.round().phase, Phase::Running);
  EXPECT_EQ(job.round().number, 3);
  EXPECT_THAT(job.members(), ElementsAre("n1", "n2"));
  EXPECT_THAT(job[2].started, ElementsAre(1, 2, 3));
  EXPECT_EQ(job[1].master, job[2].master);
  EXPECT_EQ(job.round().restarts, 1) << "as of the round that was begun";
}

TEST(Round, ATakeoverOfAJobThatWasAskedToEndStartsNothing) {
  const Round seen{.phase = Phase::Stopping, .number = 4, .nodes = {{.id = "gone"}, {.id = "me"}}, .cause = Cause::Interrupt, .signal = SIGTERM};
  EXPECT_EQ(taken_over(seen, "gone", 0).cause, Cause::Interrupt);
  const Self self{.node = {.id = "me"}, .record = {.round = 4, .clean = true}};
  EXPECT_EQ(decide(taken_over(seen, "gone", 0), {}, self, {.min_nodes = 1, .max_nodes = 2}).proposal.phase, Phase::Finished);
}

/// It had no ranks yet, so none have ended.
TEST(Round, WhoWasAskedToEndBeforeItBeganIsSoInAnotherJob) {
  const Self asked{.node = {.id = "me"}, .job = "old", .interrupted = SIGTERM};
  EXPECT_EQ(decide({.nnodes = "1:2", .job = "new"}, {}, asked, {.min_nodes = 1, .max_nodes = 2}).act, Step::Act::Forget);
  EXPECT_EQ(in_another_job(asked, {.job = "new"}).interrupted, SIGTERM);
}

/// The one that took over by a majority, and is proven to be gone now, has never proven that the others do not go on.
TEST(Round, ATakeoverOfATakeoverNeedsTheSameMajority) {
  const Round seen{.phase = Phase::Running, .number = 1, .nodes = {{.id = "s"}, {.id = "a"}, {.id = "b"}, {.id = "x"}}};
  EXPECT_EQ(taken_over(taken_over(seen, "s", 3), "a", 0).quorum, 3);
  EXPECT_EQ(taken_over(taken_over(seen, "s", 0), "a", 0).quorum, 0);
}

/// What was not done on the node that served the store, nobody has done.
TEST(Round, ATakeoverIsNoEndThatIsWell) {
  const Rules any{.min_nodes = 1, .max_nodes = 2}, both{.min_nodes = 2, .max_nodes = 2};
  const Self self{.node = {.id = "me"}, .record = {.round = 4, .done = true, .clean = true}};
  Round seen{.phase = Phase::Running, .number = 4, .nodes = {{.id = "gone"}, {.id = "me"}}};
  seen.nnodes = "1:2";
  EXPECT_NE(decide(taken_over(seen, "gone", 0), {}, self, any).proposal.phase, Phase::Finished) << "it runs again";
  seen.nnodes = "2:2";
  EXPECT_NE(decide(taken_over(seen, "gone", 0), {}, self, both).proposal.exit_code, 0);
  seen.phase = Phase::Stopping, seen.cause = Cause::Interrupt, seen.signal = SIGTERM;
  EXPECT_NE(decide(taken_over(seen, "gone", 0), {}, self, both).proposal.exit_code, 0);
  EXPECT_EQ(decide(taken_over(seen, "spare", 0), {{"gone", {.record = {.round = 4, .done = true, .clean = true}}}}, self, both).proposal.exit_code, 0)
      << "one that was no member";
}

/// Whatever happens in whatever order: a round's workers are started once by each of its members, and in the end all agents that live agree.
TEST(Round, HoldsTogetherUnderRandomFaults) {
  for (uint32_t seed = 0; seed < 120; ++seed) {
    std::mt19937 random(seed);
    Job job(3, {.min_nodes = 1, .max_nodes = 4, .max_restarts = 100});
    job.proven_gone = true;
    job.stores_die = seed >= 60;
    job.pass(4);
    if (job.stores_die) job.is_slow = [&] { return random() % 2 == 0; };
    for (int event = 0; event < 6; ++event) {
      auto& agent = job[random() % job.agents.size()];
      const bool could_die = agent.alive && std::ranges::count_if(job.agents, [](const auto& a) { return a->alive; }) > 1;
      switch (random() % 3) {
        case 0:
          if (job.stores_die && agent.self.record.running && job.living_members() > 1) {  // the store goes while a round ends, at whatever moment
            Job::fail(agent, {0, status_of_exit(3), ""});
            const bool begins = random() % 4 != 0;
            job.doom_server(static_cast<int>(random() % (begins ? 4 : 20)), begins);
          } else if (could_die && !job.stores_die) {
            agent.alive = false;
          }
          break;
        case 1:
          job.add(1);
          break;
        default:
          if (agent.self.record.running) Job::fail(agent, {0, status_of_exit(3), ""});
      }
      job.pass(static_cast<double>(random() % 30) / 10);
    }
    job.pass(16);
    job.is_slow = {};
    job.pass(1);
    ASSERT_EQ(job.round().phase, Phase::Running) << seed;
    for (const auto& agent : job.agents) {
      EXPECT_TRUE(std::ranges::adjacent_find(agent->started, std::greater_equal<>()) == agent->started.end()) << seed;
      if (!agent->alive) continue;
      EXPECT_EQ(agent->view->round, job.round()) << seed;
      const bool member = place_of(job.round(), agent->self.node.id).has_value();
      EXPECT_EQ(agent->self.record.running && agent->self.record.round == job.round().number, member) << seed;
      if (member) EXPECT_EQ(agent->master, job.round().master) << seed;
    }
    for (const auto& agent : job.agents) {
      if (agent->alive && agent->self.record.running) Job::finish(*agent);
    }
    job.pass(1);
    for (const auto& agent : job.agents) {
      if (agent->alive) EXPECT_TRUE(agent->left && agent->left->exit_code == 0) << seed;
    }
  }
}

TEST(Board, BlamesNobodyForItsOwnPause) {
  Job job(2, {.min_nodes = 2, .max_nodes = 2});
  job.pass(1);
  job[1].alive = false;  // stopped
  job.pass(4);
  job[1].alive = true;
  job.pass(2);
  EXPECT_EQ(job.round().number, 1);
}

/// Each takes up to half a second, in which our own beat stands still.
TEST(Board, AsksAllSilentHostsAtOnce) {
  Round round;
  for (int i = 0; i < 12; ++i) round.nodes.push_back({.id = "n" + std::to_string(i)});
  std::vector<size_t> asked;
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  Board board(store, "p/", "n0", round, [&](const std::vector<Node>& nodes) {
    asked.push_back(nodes.size());
    return std::set<std::string>{"n3"};
  });
  for (const Node& node : round.nodes) store->set("p/node/" + node.id, write_record({.beat = 1}));
  Board::Clock::time_point now{};
  board.exchange({.beat = 1}, std::nullopt, now);
  EXPECT_THAT(asked, IsEmpty());
  const View view = board.exchange({.beat = 2}, std::nullopt, now += 2s);
  board.exchange({.beat = 3}, std::nullopt, now += 1s);
  EXPECT_THAT(asked, ElementsAre(11, 10)) << "and not again who is gone";
  for (const auto& [id, peer] : view.peers) EXPECT_EQ(peer.gone, id == "n3");
}

TEST(Board, OnlyOneOfTwoProposalsIsTaken) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  Board a(store, "p/", "a", {}), b(store, "p/", "b", {});
  const Round seen = a.exchange({}, std::nullopt, {}).round;
  Round first = seen, second = seen;
  first.number = 1;
  second.number = 2;
  EXPECT_EQ(a.exchange({}, Proposal{seen, first}, {}).round.number, 1);
  EXPECT_EQ(b.exchange({}, Proposal{seen, second}, {}).round.number, 1);
}

TEST(Round, SaysForHowManyNodesAJobWaits) {
  const Rules rules{.min_nodes = 3, .max_nodes = 4, .join_timeout_s = 40};
  Round round{.nodes = {{.id = "a"}}};
  EXPECT_EQ(missing_nodes(round, rules), "1 of at least 3 nodes has come; waiting up to 40 s for the others (--rdzv-conf join_timeout)");
  round.nodes.push_back({.id = "b"});
  EXPECT_THAT(missing_nodes(round, rules), HasSubstr("2 of at least 3 nodes have come"));
  round.phase = Phase::Stopping;
  EXPECT_EQ(missing_nodes(round, rules), "");
  round.phase = Phase::Joining;
  round.nodes.push_back({.id = "c"});
  EXPECT_EQ(missing_nodes(round, rules), "") << "others may come, and none has to";
}

TEST(Round, SaysInWhichJobANodeWaitsForAPlace) {
  const Rules rules{.min_nodes = 1, .max_nodes = 2, .place = "address h, port 1", .run_id = "j"};
  Round round{.phase = Phase::Running, .nnodes = "1:2", .nodes = {{.id = "a"}, {.id = "b"}}, .waiting = {{.id = "c"}}};
  EXPECT_EQ(missing_place(round, "c", rules),
            "waiting for a place in the job at address h, port 1 (--rdzv-id j), which has 2 nodes of --nnodes = 1:2; a job of its own needs another "
            "--rdzv-endpoint");
  EXPECT_EQ(missing_place(round, "b", rules), "");
  round.phase = Phase::Finished;
  EXPECT_EQ(missing_place(round, "c", rules), "");
}

/// The agent that serves was paused, and comes back before anybody has taken over.
TEST(Round, RanksThatWereEndedWhileNobodyAnsweredStartAgain) {
  Job job(2, {.min_nodes = 2, .max_nodes = 2});
  job.pass(8);
  ASSERT_THAT(job[1].started, ElementsAre(1));
  job[1].self.record.running = false;
  job.pass(20);
  for (const size_t i : {0, 1}) EXPECT_THAT(job[i].started, ElementsAre(1, 2)) << i;
  EXPECT_EQ(job.round().restarts, 0);
  EXPECT_THAT(job.round().reason, HasSubstr("ended its ranks while the rendezvous did not answer"));
}

TEST(Round, ASpareStoreOfAnotherJobIsNotTakenForOnesOwn) {
  const Round seen{.phase = Phase::Running, .number = 4, .job = "one"};
  Round there{.phase = Phase::Running, .number = 2, .job = "one"};
  EXPECT_TRUE(caught_up(there, seen, "n0"));
  there.job = "two";
  EXPECT_FALSE(caught_up(there, seen, "n0")) << "it counts its own rounds";
}

}  // namespace
}  // namespace tessera::launch
