#include "tessera/launch/rendezvous.h"

#include <array>
#include <chrono>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/comm/meeting/stores.h"
#include "tessera/core/error.h"
#include "tests/comm/meeting/silent_host.h"

namespace tessera::launch {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* host = "127.0.0.1";

/// What an agent of that job, which does not serve, is told at that port.
std::string told(const std::string& run_id, int port) {
  try {
    Rendezvous({.endpoint = comm::Endpoint{host, port}, .run_id = run_id, .serves = false}).connect();
  } catch (const CommError& error) {
    return error.what();
  }
  return "met";
}

TEST(Rendezvous, AnAgentOfAnotherJobIsToldWhosePlaceItIs) {
  const int port = comm::try_listen({host, 0})->port();
  Rendezvous serves({.endpoint = comm::Endpoint{host, port}, .run_id = "j", .serves = true});
  const auto board = serves.connect();
  EXPECT_EQ(told("j", port), "met");
  EXPECT_EQ(told("k", port), "the job there has --rdzv-id j, this agent k; give all agents of a job the same");
}

/// The one that takes over the store has not seen the last round, of which the workers of the one that comes to it may be.
TEST(Rendezvous, AStoreThatTakesOverIsBroughtUpToDate) {
  const int port = comm::try_listen({host, 0})->port();
  const auto options = [&](bool serves) {
    return RendezvousOptions{.endpoint = comm::Endpoint{host, port}, .run_id = "j", .rules = {.min_nodes = 1, .max_nodes = 3}, .serves = serves};
  };
  auto serves = std::make_unique<Rendezvous>(options(true));
  auto of_server = serves->connect();
  Rendezvous takes_over(options(false)), comes(options(false));
  auto of_first = takes_over.connect(), of_second = comes.connect();

  const Round joining = of_server->exchange({}, std::nullopt, {}).round;
  Round first = joining;
  first.phase = Phase::Stopping;
  first.number = 1;
  first.nodes = {serves->node(), takes_over.node(), comes.node()};
  first.master = {host, 1};
  of_server->exchange({}, Proposal{joining, first}, {});
  takes_over.note(of_first->exchange({}, std::nullopt, {}).round);
  Round second = first;
  second.phase = Phase::Running;
  second.number = 2;
  second.master = {host, 2};
  of_server->exchange({}, Proposal{first, second}, {});
  comes.note(of_second->exchange({}, std::nullopt, {}).round);

  const std::string server = serves->node().id;
  for (auto* board : {&of_server, &of_first, &of_second}) board->reset();
  serves.reset();
  of_first = takes_over.connect();
  EXPECT_EQ(of_first->exchange({}, std::nullopt, {}).round.number, 1);
  of_second = comes.connect();
  const Round found = of_second->exchange({}, std::nullopt, {}).round;
  EXPECT_EQ(found, taken_over(second, server, 0));
  EXPECT_EQ(of_first->exchange({}, std::nullopt, {}).round, found);
}

/// What an agent `id` of the job `run_id` serves at that port.
c10::intrusive_ptr<c10d::Store> served_by(const std::string& id, const std::string& run_id, int port) {
  c10::intrusive_ptr<c10d::Store> store = comm::serve_store({host, port});
  store->set("tessera/" + run_id + "/server", id);
  store->set("tessera/job", run_id);
  return store;
}

/// An agent is killed, and somebody else has its port before the other one comes back.
TEST(Rendezvous, WhoeverHasTheOldPlaceIsNotTakenForTheJob) {
  struct Case {
    int min_nodes;
    const char* run_id;  ///< null: no agent's
    bool goes_on;
    bool member = true;
  };
  for (const auto& [min_nodes, run_id, goes_on, member] :
       {Case{1, "j", true}, {1, "k", true}, {1, nullptr, true}, {2, "j", false}, {2, "k", true}, {1, "j", false, false}}) {
    const int port = comm::try_listen({host, 0})->port(), nobodys = comm::try_listen({host, 0})->port();
    auto store = served_by("a", "j", port);
    Rendezvous left({.endpoint = comm::Endpoint{host, port}, .run_id = "j", .rules = {.min_nodes = min_nodes, .max_nodes = 2}, .serves = false});
    left.connect();
    const Node gone{.id = "gone", .address = host, .spare_port = nobodys};
    const Round running{.phase = Phase::Running, .number = 1, .job = "first", .nodes = {{.id = "a"}, member ? left.node() : gone}};
    left.note(running);
    store.reset();
    if (run_id) store = served_by("b", run_id, port);
    if (!run_id) store = comm::serve_store({host, port});
    const Round found = left.connect()->exchange({}, std::nullopt, {}).round;
    EXPECT_EQ(found.phase, goes_on ? Phase::Stopping : Phase::Joining) << min_nodes << (run_id ? run_id : "");
    if (goes_on) EXPECT_EQ(found, taken_over(running, "a", 0)) << "the old place is proven to be gone";
    if (!goes_on) EXPECT_NE(found.job, running.job);
  }
}

/// As agents do, for names may be looked up slowly inside of c10d.
/// A busy machine may take longer to answer than a rule allows.
template <class Ask>
auto in_the_end(const Ask& ask) {
  for (int tries = 5;; --tries) {
    try {
      return ask();
    } catch (const CommError&) {
      if (tries == 0) throw;
    }
  }
}

Round met_in_the_end(Rendezvous& one) {
  return in_the_end([&] { return one.connect()->exchange({}, std::nullopt, {}).round; });
}

/// What each of them saw last differs: by its own view, the last would have the job go on.
TEST(Rendezvous, WhoComesLaterGoesWhereTheFirstWent) {
  for (const Phase phase : {Phase::Running, Phase::Joining}) {
    const int port = comm::try_listen({host, 0})->port(), nobodys = comm::try_listen({host, 0})->port();
    auto store = served_by("a", "j", port);
    const RendezvousOptions options{
        .endpoint = comm::Endpoint{host, port}, .run_id = "j", .rules = {.min_nodes = 3, .max_nodes = 4, .dead_after_s = 2}, .serves = false};
    Rendezvous first(options), last(options);
    for (Rendezvous* one : {&first, &last}) in_the_end([&] { return one->connect(); });
    Round seen{.phase = phase, .job = "first", .nodes = {{.id = "a"}, first.node(), {.id = "gone", .address = host, .spare_port = nobodys}, last.node()}};
    first.note(seen);
    seen.phase = Phase::Running;
    seen.waiting = {{.id = "alive", .address = host, .spare_port = port}};
    last.note(seen);
    store.reset();
    store = served_by("b", "j", port);
    EXPECT_THROW(last.connect(), CommError) << "the first has not decided";
    for (Rendezvous* one : {&first, &last}) {
      const Round found = met_in_the_end(*one);
      EXPECT_EQ(found.phase, Phase::Joining);
      EXPECT_NE(found.job, seen.job);
    }
  }
}

TEST(Rendezvous, AJobWhoseStoreAnswersAgainIsMetThere) {
  const int port = comm::try_listen({host, 0})->port();
  const auto store = served_by("a", "j", port);
  Rendezvous one({.endpoint = comm::Endpoint{host, port}, .run_id = "j", .rules = {.min_nodes = 1, .max_nodes = 2}, .serves = false});
  one.connect();
  const Round running{.phase = Phase::Running, .number = 1, .nodes = {{.id = "a"}, one.node()}};
  one.note(running);
  store->set("tessera/j/round", write_round(running));
  EXPECT_EQ(one.connect()->exchange({}, std::nullopt, {}).round, running);
}

/// Whoever asked one dead host after the other would come too late, or give up before it has come to the first that lives.
TEST(Rendezvous, SpareStoresOfSilentHostsAreTriedAtOnce) {
  const int port = comm::try_listen({host, 0})->port();
  const auto options = [&](bool serves) {
    return RendezvousOptions{.endpoint = comm::Endpoint{host, port}, .run_id = "j", .rules = {.min_nodes = 1, .max_nodes = 9}, .serves = serves};
  };
  auto serves = std::make_unique<Rendezvous>(options(true));
  auto of_server = serves->connect();
  Rendezvous left(options(false));
  auto board = left.connect();
  const std::array<comm::testing_support::SilentHost, 5> silent;
  Round round{.phase = Phase::Running, .number = 1, .nodes = {serves->node()}, .master = {host, 1}};
  for (const auto& one : silent) round.nodes.push_back({.id = std::to_string(one.port()), .address = host, .spare_port = one.port()});
  round.nodes.push_back(left.node());
  left.note(round);
  of_server.reset();
  board.reset();
  serves.reset();
  const auto begin = std::chrono::steady_clock::now();
  try {
    left.connect();
    FAIL() << "the others may go on";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("1 of 7 nodes cannot tell whether the others go on without them"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

/// The job begins, and its server goes before all have seen that it has.
TEST(Rendezvous, WhoHasNotSeenThatTheJobBeganGoesOnWithThoseWhoHave) {
  for (const bool first_knows : {true, false}) {
    const int port = comm::try_listen({host, 0})->port();
    auto store = served_by("a", "j", port);
    const RendezvousOptions options{.endpoint = comm::Endpoint{host, port}, .run_id = "j", .rules = {.min_nodes = 2, .max_nodes = 3}, .serves = false};
    Rendezvous first(options), last(options);
    first.connect(), last.connect();
    Rendezvous& knows = first_knows ? first : last;
    Rendezvous& learns = first_knows ? last : first;
    const Round began{.phase = Phase::Running, .number = 1, .job = "drawn", .nodes = {{.id = "a"}, first.node(), last.node()}};
    knows.note(began);
    learns.note({.job = "drawn", .nodes = {{.id = "a"}, learns.node()}});
    store.reset();
    if (!first_knows) EXPECT_THROW(knows.connect(), CommError) << "the first has not taken over";
    for (Rendezvous* one : {&first, &last}) EXPECT_EQ(met_in_the_end(*one), taken_over(began, "a", 0));
  }
}

/// It was paused while the server went, and is the first in the order of ranks.
TEST(Rendezvous, WhoWasSilentJoinsTheOneThatTookOver) {
  const int port = comm::try_listen({host, 0})->port(), nobodys = comm::try_listen({host, 0})->port();
  auto store = served_by("a", "j", port);
  const RendezvousOptions options{.endpoint = comm::Endpoint{host, port}, .run_id = "j", .rules = {.min_nodes = 1, .max_nodes = 3}, .serves = false};
  Rendezvous was_silent(options), took_over(options);
  was_silent.connect(), took_over.connect();
  Round seen{.phase = Phase::Running, .number = 1, .job = "drawn", .nodes = {{.id = "a"}, was_silent.node(), took_over.node()}, .master = {host, 1}};
  was_silent.note(seen);
  seen.nodes[1] = {.id = "silent", .address = host, .spare_port = nobodys};
  took_over.note(seen);
  store.reset();
  for (Rendezvous* one : {&took_over, &was_silent}) EXPECT_EQ(met_in_the_end(*one), taken_over(seen, "a", 0));
}

TEST(Rendezvous, WhoCameOnceIsNotCountedAmongThoseWhoCome) {
  const int port = comm::try_listen({host, 0})->port();
  auto store = served_by("a", "j", port);
  Rendezvous one({.endpoint = comm::Endpoint{host, port}, .run_id = "j", .rules = {.min_nodes = 1, .max_nodes = 3}, .serves = false});
  one.connect();
  const auto other = comm::serve_store({host, 0});
  const Node behind{.id = "b", .address = host, .spare_port = other->getPort()};
  const Round running{.phase = Phase::Running, .number = 1, .job = "drawn", .nodes = {{.id = "a"}, one.node(), behind}};
  one.note(running);
  store.reset();
  const auto silent = comm::try_listen({host, port});
  const auto comes = [&] { comm::join_store({host, one.node().spare_port}, std::chrono::seconds(2))->set("tessera/j/came/b", ""); };
  comes();
  EXPECT_THROW(one.connect(), CommError) << "b came before";
  comes();
  EXPECT_EQ(met_in_the_end(one), taken_over(running, "a", 2));
}

TEST(Rendezvous, AStoreThatNoAgentServesIsNamed) {
  const auto store = comm::serve_store({host, 0});
  EXPECT_THAT(told("j", store->getPort()), AllOf(HasSubstr("the store there is not served by an agent"), HasSubstr("another --rdzv-endpoint")));
}

}  // namespace
}  // namespace tessera::launch
