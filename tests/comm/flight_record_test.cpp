#include "tessera/comm/flight_record/flight_record.h"

#include <atomic>
#include <map>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tessera/comm/call_site.h"
#include "tests/comm/flight_record_files.h"

namespace tessera::comm {
namespace {

using flight::State;
using testing::ElementsAre;

TEST_F(FlightRecords, SayWhatARankIsAt) {
  const auto place = [&] { return flight::read_record(FlightRecord::file_of(dir, 0)).place; };
  FlightRecord record(dir, rank_of(0, 1));
  EXPECT_EQ(place(), "");
  for (const auto& text : {std::string("stage 1, forward of micro-batch 5"), std::string("F"), std::string(), std::string("stage 0")}) {
    record.set_place(text);
    EXPECT_EQ(place(), text);
  }
  record.set_place(std::string(500, 'x'));
  EXPECT_EQ(place(), std::string(127, 'x'));
}

TEST_F(FlightRecords, GiveBackWhatWasEntered) {
  {
    FlightRecord record(dir / "made" / "here", rank_of(2, 5));
    const auto world = record.add_group(world_of(2, 5)).value();
    const auto tp = record.add_group({.name = "tp", .rank = 1, .size = 2, .ranks = {4, 2}}).value();
    {
      const CallSite site("layers.3.mlp");
      const auto whole = at::empty({32, 768}, at::kBFloat16);
      EXPECT_EQ(record.enter(tp, {.op = Operation::ReduceScatter, .inputs = {whole}, .outputs = {whole[0]}, .reduction = Op::Sum}), 0);
    }
    EXPECT_EQ(record.enter(world, {.op = Operation::Send, .peer = 4, .tag = 9}, 17), 1);
    EXPECT_EQ(record.enter(tp, {.op = Operation::Barrier}), 2);
    record.mark(0, State::Completed);
    record.mark(1, State::Waiting);
    record.mark(2, State::Failed);
  }
  const auto record = flight::read_record(dir / "made" / "here" / "rank_2.bin");
  EXPECT_EQ(record.rank, 2);
  EXPECT_EQ(record.world_size, 5);
  EXPECT_EQ(record.pid, getpid());
  EXPECT_FALSE(record.host.empty());
  EXPECT_TRUE(record.closed);
  EXPECT_GE(record.seen_s, record.started_s);
  EXPECT_NEAR(record.started_s, static_cast<double>(time(nullptr)), 30);
  ASSERT_EQ(record.groups.size(), 2);
  EXPECT_THAT(record.groups[0].members, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_EQ(record.groups[0].collectives, 0);
  EXPECT_EQ(record.groups[1].name, "tp");
  EXPECT_THAT(record.groups[1].members, ElementsAre(4, 2));
  EXPECT_EQ(record.groups[1].collectives, 2);
  ASSERT_EQ(record.calls.size(), 3);
  const auto& first = record.calls[0];
  EXPECT_EQ(first.op, "reduce_scatter");
  EXPECT_EQ(first.group, 1);
  EXPECT_EQ(first.sequence, 1);
  EXPECT_THAT(first.shape, ElementsAre(32, 768));
  EXPECT_EQ(first.dtype, "bfloat16");
  EXPECT_EQ(first.reduction, "sum");
  EXPECT_EQ(first.bytes, 49152);
  EXPECT_EQ(first.site, "layers.3.mlp");
  EXPECT_EQ(first.state, State::Completed);
  EXPECT_GE(first.left_s, first.entered_s);
  const auto& second = record.calls[1];
  EXPECT_EQ(second.sequence, 17);
  EXPECT_EQ(second.peer, 4);
  EXPECT_EQ(second.tag, 9);
  EXPECT_EQ(second.dtype, "none");
  EXPECT_EQ(second.state, State::Waiting);
  EXPECT_EQ(second.left_s, 0);
  EXPECT_EQ(record.calls[2].sequence, 2);
  EXPECT_EQ(record.calls[2].state, State::Failed);
}

TEST_F(FlightRecords, FollowCallsThatNoHostWaitsFor) {
  FlightRecord record(dir, rank_of(0, 2));
  const auto group = record.add_group(world_of(0, 2)).value();
  std::atomic<State> now = State::InFlight;
  std::atomic<int> asked = 0;
  const auto follow = [&](uint64_t number) { record.follow(number, [&] { return ++asked, now.load(); }); };
  const auto wait_for = [&](State state) {
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (read(0).calls.back().state != state && std::chrono::steady_clock::now() < give_up) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(read(0).calls.back().state, state);
  };
  const uint64_t first = record.enter(group, {.op = Operation::Barrier});
  record.mark(first, State::InFlight);
  follow(first);
  now = State::Begun;
  wait_for(State::Begun);
  EXPECT_EQ(read(0).calls.back().left_s, 0);
  now = State::Completed;
  wait_for(State::Completed);
  EXPECT_GT(read(0).calls.back().left_s, 0);
  const int times = asked;

  const uint64_t second = record.enter(group, {.op = Operation::Barrier});
  record.mark(second, State::InFlight);
  follow(second);
  record.forget(second);
  std::this_thread::sleep_for(2 * FlightRecord::kSignOfLife + std::chrono::milliseconds(50));
  EXPECT_EQ(asked, times) << "neither what has ended nor what is forgotten is asked for";
  EXPECT_EQ(read(0).calls.back().state, State::InFlight);
}

TEST_F(FlightRecords, KeepTheLastOnesAndTheEndOfALongSite) {
  FlightRecord record(dir, rank_of(0, 2), 4);
  const auto group = record.add_group(world_of(0, 2)).value();
  const std::string site = "first" + std::string(200, '.') + "layers.17.mlp";
  const CallSite here(site);
  const auto tensor = at::empty(std::vector<int64_t>(9, 3), at::kMeta);
  for (int i = 0; i < 10; ++i) record.enter(group, {.op = Operation::AllToAll, .inputs = {tensor}, .outputs = {tensor}});
  record.mark(1, State::Failed);  // its slot belongs to a later call now
  record.mark(9, State::Completed);
  const auto calls = read(0).calls;
  ASSERT_EQ(calls.size(), 4);
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(calls[i].number, 6 + i);
    EXPECT_EQ(calls[i].sequence, 7 + i);
    EXPECT_EQ(calls[i].state, i == 3 ? State::Completed : State::Entered);
    EXPECT_EQ(calls[i].op, "all_to_all");
    EXPECT_EQ(calls[i].site.size(), 87);
    EXPECT_TRUE(calls[i].site.starts_with("..") && calls[i].site.ends_with("layers.17.mlp")) << calls[i].site;
    EXPECT_EQ(calls[i].shape.size(), 8);
    EXPECT_TRUE(calls[i].more_dims);
  }
  EXPECT_EQ(read(0).total_calls, 10);
  EXPECT_EQ(read(0).groups[0].collectives, 10);
  EXPECT_EQ(flight::read_record(record.path(), 2).calls.front().number, 8);
  EXPECT_FALSE(read(0).closed);
}

TEST_F(FlightRecords, OfSeveralThreadsHaveAllCalls) {
  FlightRecord record(dir, rank_of(0, 2));
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const auto group = record.add_group({.name = "group" + std::to_string(i), .rank = 0, .size = 2}).value();
      for (int k = 0; k < 1000; ++k) record.mark(record.enter(group, {.op = Operation::Barrier, .tag = k}), State::Completed);
    });
  }
  for (auto& thread : threads) thread.join();
  const auto found = read(0);
  ASSERT_EQ(found.calls.size(), 4000);
  std::map<uint32_t, uint64_t> last;
  for (const auto& call : found.calls) {
    EXPECT_EQ(call.sequence, ++last[call.group]);
    EXPECT_EQ(call.tag, static_cast<int>(call.sequence) - 1);
    EXPECT_EQ(call.state, State::Completed);
  }
}

TEST_F(FlightRecords, ReplaceThoseOfAnEarlierRun) {
  for (int rank = 0; rank < 4; ++rank) FlightRecord(dir, rank_of(rank, 4)).add_group(world_of(rank, 4));
  for (int rank = 0; rank < 2; ++rank) FlightRecord(dir, rank_of(rank, 2));
  const auto records = flight::read_records(dir);
  EXPECT_EQ(records.world_size, 2);
  EXPECT_TRUE(records.missing.empty());
  ASSERT_EQ(records.ranks.size(), 2);
  EXPECT_TRUE(records.ranks[0].groups.empty());
  EXPECT_FALSE(std::filesystem::exists(FlightRecord::file_of(dir, 3)));
}

TEST_F(FlightRecords, OfOtherWorldSizesAreLeftOut) {
  FlightRecord(dir, rank_of(1, 3));
  FlightRecord(dir, rank_of(2, 5));  // newer
  const auto records = flight::read_records(dir);
  EXPECT_EQ(records.world_size, 5);
  EXPECT_THAT(records.missing, ElementsAre(0, 1, 3, 4));
}

TEST_F(FlightRecords, OutliveAKilledProcess) {
  const pid_t child = fork();
  if (child == 0) {
    FlightRecord record(dir, rank_of(1, 2));
    const auto group = record.add_group(world_of(1, 2)).value();
    record.mark(record.enter(group, {.op = Operation::AllReduce}), State::Completed);
    record.enter(group, {.op = Operation::Barrier});
    kill(getpid(), SIGKILL);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status));
  const auto record = read(1);
  EXPECT_EQ(record.pid, child);
  EXPECT_FALSE(record.closed);
  ASSERT_EQ(record.calls.size(), 2);
  EXPECT_EQ(record.calls[1].state, State::Entered);
}

TEST_F(FlightRecords, ShowSignsOfLife) {
  FlightRecord record(dir, rank_of(0, 1));
  const auto before = read(0).seen_s;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (read(0).seen_s == before && std::chrono::steady_clock::now() < deadline) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_GT(read(0).seen_s, before);
}

TEST_F(FlightRecords, HaveATableOfGroupsThatCanBeFull) {
  FlightRecord record(dir, rank_of(0, 1));
  const std::string name(4000, 'x');
  int groups = 0;
  while (record.add_group({.name = name, .rank = 0, .size = 1})) ++groups;
  EXPECT_EQ(groups, (64 + 4) * 1024 / (4000 + sizeof(flight::GroupHeader)));  // 64 KiB and 128 bytes, in pages
  EXPECT_EQ(read(0).groups.size(), groups);
}

}  // namespace
}  // namespace tessera::comm
