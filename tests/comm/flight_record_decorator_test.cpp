#include <fstream>
#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/collectives.h"
#include "tessera/comm/decorators/decorator.h"
#include "tessera/comm/decorators/flight_record.h"
#include "tessera/comm/flight_record/verdict.h"
#include "tessera/comm/testing.h"
#include "tessera/core/error.h"
#include "tests/comm/flight_record_files.h"

namespace tessera::comm {
namespace {

using flight::State;

// A decorator that makes each rank's record when its first group, the world, is made: ranks are threads here.
Decorator recording_into(const std::filesystem::path& dir, int size, std::vector<Decorator>& of_rank) {
  of_rank.resize(size);
  return [&, dir, size](std::shared_ptr<Engine> inner, const GroupInfo& group) {
    auto& decorate = of_rank[group.ranks.empty() ? group.rank : group.ranks[group.rank]];
    if (!decorate) decorate = flight_recording(dir, rank_of(group.rank, size));
    return decorate(std::move(inner), group);
  };
}

TEST_F(FlightRecords, OfARunHoldEveryCall) {
  for (const int n : {2, 3, 5}) {
    std::vector<Decorator> of_rank;
    run_ranks(n,
              [&](World& world) {
                const auto group = world.group();
                {
                  const CallSite site("layers.0");
                  all_reduce(group, at::ones({3}), Op::Max);
                }
                auto pending = all_reduce_async(group, at::ones({5, 2}, at::kLong));
                const auto pair = world.rank() < 2 ? world.subgroup({0, 1}, "pair") : Group();
                if (world.rank() == 0) send(pair, at::ones({4}), 1, 2);
                if (world.rank() == 1) recv(pair, at::ones({4}), 0, 2);
                pending.wait();
                all_reduce(group, at::ones({2}, at::kBool), Op::Product);
                barrier(group);
              },
              {.decorators = {recording_into(dir, n, of_rank)}});
    of_rank.clear();
    for (int rank = 0; rank < n; ++rank) {
      const auto record = read(rank);
      EXPECT_TRUE(record.closed);
      ASSERT_EQ(record.calls.size(), rank < 2 ? 5 : 4);
      const auto& truth = record.calls[record.calls.size() - 2];
      EXPECT_EQ(truth.dtype + " " + truth.reduction, "bool product") << "and not the bytes by which an engine does it";
      EXPECT_EQ(record.calls[0].site, "layers.0");
      EXPECT_EQ(record.calls[0].reduction, "max");
      EXPECT_EQ(record.calls[0].bytes, 12);
      EXPECT_EQ(record.calls[1].dtype, "int64");
      EXPECT_EQ(record.calls[1].site, "");
      EXPECT_EQ(record.calls.back().op, "barrier");
      EXPECT_EQ(record.calls.back().sequence, 4);
      for (const auto& call : record.calls) EXPECT_EQ(call.state, State::Completed) << call.op;
      if (rank >= 2) continue;
      EXPECT_EQ(record.calls[2].op, rank == 0 ? "send" : "recv");
      EXPECT_EQ(record.calls[2].sequence, 1);
      EXPECT_EQ(record.calls[2].tag, 2);
    }
    EXPECT_EQ(flight::explain(flight::Merge(flight::read_records(dir))).sentence, "no rank waits: all have left the world");
  }
}

TEST_F(FlightRecords, NameTheRankThatHangs) {
  std::vector<Decorator> of_rank;
  const auto job = [&] {
    run_ranks(3,
              [&](World& world) {
                all_reduce(world.group(), at::ones({3}));
                if (world.rank() == 1) return std::this_thread::sleep_for(std::chrono::milliseconds(1500));
                const CallSite site("ddp.bucket");
                all_reduce(world.group(), at::ones({7}));
              },
              {.timeout = std::chrono::milliseconds(1000), .decorators = {recording_into(dir, 3, of_rank)}});
  };
  EXPECT_THROW(job(), CommError);
  of_rank.clear();
  EXPECT_THAT(flight::explain(flight::Merge(flight::read_records(dir))).sentence,
              ::testing::ContainsRegex("^rank 1 never entered all_reduce #2 of world \\(ddp.bucket\\); ranks 0, 2 wait [0-9.]+ s; ran"));
}

TEST_F(FlightRecords, ThatCannotBeMadeAreDoneWithout) {
  std::ofstream(dir / "file") << "in the way";
  const auto decorate = flight_recording(dir / "file", rank_of(0, 2));
  const auto inner = std::shared_ptr<Engine>();
  EXPECT_EQ(decorate(inner, world_of(0, 2)), inner);
}

// All room is taken when the record is made, so it is then or never that a store can fail.
TEST_F(FlightRecords, ThatFindNoRoomAreDoneWithout) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGXFSZ, SIG_IGN);
    const rlimit room{1 << 20, 1 << 20};
    _exit(setrlimit(RLIMIT_FSIZE, &room) == 0 && flight_recording(dir, rank_of(0, 2))({}, world_of(0, 2)) == nullptr ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(std::filesystem::is_empty(dir)) << "no draft is left behind";
}

/// An engine whose work ends as it is told.
class ScriptedWork : public c10d::Work {
 public:
  void end(std::exception_ptr error = nullptr) { finish(std::move(error)); }
};
class ScriptedEngine : public DecoratedEngine {
 public:
  explicit ScriptedEngine(const GroupInfo& group) : DecoratedEngine(group, {}) {}
  c10::intrusive_ptr<ScriptedWork> work;

  Work start(const Call&) override {
    if (!work) throw std::runtime_error("refused");
    return work;
  }
};

/// An engine whose calls are done when they are asked for.
class ReadyEngine : public DecoratedEngine {
 public:
  explicit ReadyEngine(const GroupInfo& group) : DecoratedEngine(group, {}) {}
  Work start(const Call&) override { return completed_work(); }
};

TEST_F(FlightRecords, NumberMessagesOfTwoThreads) {
  constexpr int messages = 1'000'000;  // of each: long enough to meet on a busy machine
  const auto recorded = flight_recording(dir, rank_of(0, 2))(std::make_shared<ReadyEngine>(world_of(0, 2)), world_of(0, 2));
  const Call call{.op = Operation::Send, .inputs = {at::ones({1})}, .peer = 1, .tag = 4};
  const auto post = [&] {
    for (int i = 0; i < messages; ++i) recorded->start(call);
  };
  std::thread other(post);
  post();
  other.join();
  recorded->start(call);
  EXPECT_EQ(read(0).calls.back().sequence, 2 * messages + 1);
}

TEST_F(FlightRecords, FollowACallFromStateToState) {
  const auto engine = std::make_shared<ScriptedEngine>(world_of(0, 2));
  const auto recorded = flight_recording(dir, rank_of(0, 2))(engine, world_of(0, 2));
  const auto last = [&] { return read(0).calls.back().state; };
  const auto failure = std::make_exception_ptr(std::runtime_error("cut"));

  EXPECT_THROW(recorded->start({.op = Operation::Barrier}), std::runtime_error);
  EXPECT_EQ(last(), State::Failed);

  engine->work = c10::make_intrusive<ScriptedWork>();
  engine->work->end();
  EXPECT_EQ(recorded->start({.op = Operation::Barrier}).get(), engine->work.get()) << "work that is done needs no wrapper";
  EXPECT_EQ(last(), State::Completed);

  engine->work = c10::make_intrusive<ScriptedWork>();
  auto work = recorded->start({.op = Operation::Barrier});
  EXPECT_FALSE(work->isCompleted());
  EXPECT_EQ(last(), State::InFlight);
  std::thread waiter([&] { EXPECT_TRUE(work->wait()); });
  while (last() == State::InFlight) std::this_thread::yield();
  EXPECT_EQ(last(), State::Waiting);
  engine->work->end();
  waiter.join();
  EXPECT_EQ(last(), State::Completed);

  engine->work = c10::make_intrusive<ScriptedWork>();
  work = recorded->start({.op = Operation::Barrier});
  engine->work->end(failure);
  EXPECT_THROW(work->wait(), std::runtime_error);
  EXPECT_EQ(last(), State::Failed);

  engine->work = c10::make_intrusive<ScriptedWork>();
  work = recorded->start({.op = Operation::Barrier});
  engine->work->end();
  work.reset();  // nobody waited
  EXPECT_EQ(last(), State::Completed);

  engine->work = c10::make_intrusive<ScriptedWork>();
  work = recorded->start({.op = Operation::Barrier});
  work.reset();
  EXPECT_EQ(last(), State::InFlight);
}

/// What an engine does in parts, as comm.algorithm's plans and staged copies are.
class StagedEngine : public ScriptedEngine {
 public:
  using ScriptedEngine::ScriptedEngine;
  Work start(const Call& call) override { return staged_work({{ScriptedEngine::start(call)}, {completed_work()}}); }
};

TEST_F(FlightRecords, KnowThatAPartOfACallFailed) {
  const auto engine = std::make_shared<StagedEngine>(world_of(0, 2));
  const auto recorded = flight_recording(dir, rank_of(0, 2))(engine, world_of(0, 2));
  const auto last = [&] { return read(0).calls.back().state; };
  const auto failure = std::make_exception_ptr(std::runtime_error("cut"));
  for (const bool fails : {true, false}) {
    for (const bool at_once : {true, false}) {
      engine->work = c10::make_intrusive<ScriptedWork>();
      if (at_once) engine->work->end(fails ? failure : nullptr);
      const auto work = recorded->start({.op = Operation::Barrier});
      if (!at_once) engine->work->end(fails ? failure : nullptr);
      EXPECT_TRUE(work->isCompleted());
      EXPECT_EQ(work->isSuccess(), !fails);
      EXPECT_EQ(work->exception(), fails ? failure : nullptr);
      EXPECT_EQ(last(), fails ? State::Failed : State::Completed);
    }
  }
}

}  // namespace
}  // namespace tessera::comm
