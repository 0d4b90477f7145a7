#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/flight_record/text.h"
#include "tessera/comm/flight_record/verdict.h"
#include "tests/comm/flight_record_scene.h"

namespace tessera::comm::flight {
namespace {

using Kind = Verdict::Kind;
using testing::ElementsAre;
using testing::EndsWith;
using testing::StartsWith;

const What kGather{.op = "all_gather", .shape = {32, 768}, .reduction = "", .site = "layers.17.mlp"};
What message(const char* op, int peer, int tag = 0) { return {.op = op, .reduction = "", .peer = peer, .tag = tag}; }

TEST(FlightRecordText, ListsOfRanks) {
  EXPECT_EQ(rank_list({4}), "rank 4");
  EXPECT_EQ(rank_list({5, 4}), "ranks 4, 5");
  EXPECT_EQ(rank_list({0, 1, 2}), "ranks 0-2");
  EXPECT_EQ(rank_list({9, 4, 6, 7, 8}), "ranks 4, 6-9");
  EXPECT_EQ(rank_list({0, 1, 3, 4, 6, 7, 8}), "ranks 0, 1, 3, 4, 6-8");
}

TEST(FlightRecordText, Seconds) {
  EXPECT_EQ(seconds_text(61.4), "61 s");
  EXPECT_EQ(seconds_text(5.003), "5 s");
  EXPECT_EQ(seconds_text(1), "1 s");
  EXPECT_EQ(seconds_text(0.25), "250 ms");
  EXPECT_EQ(seconds_text(-1e-9), "0 ms");
}

TEST(FlightRecordText, Calls) {
  const RecordedGroup group{.name = "pp", .members = {2, 5}};
  EXPECT_EQ(call_text({.sequence = 7, .op = "send", .peer = 1, .tag = 3}, group), "send #7 to rank 5 of pp (tag 3)");
  EXPECT_EQ(counterpart_text({.sequence = 7, .op = "send", .peer = 1, .tag = 3}, group, 2), "recv #7 from rank 2 of pp (tag 3)");
  EXPECT_EQ(call_text({.sequence = 1, .op = "barrier"}, group), "barrier #1 of pp");
  EXPECT_EQ(data_text({.shape = {}, .dtype = "int64"}), "[] int64");
  EXPECT_EQ(data_text({.shape = {1, 2, 3, 4, 5, 6, 7, 8}, .more_dims = true, .dtype = "bool"}), "[1, 2, 3, 4, 5, 6, 7, 8, ...] bool");
  EXPECT_EQ(data_text({.shape = {0}, .dtype = "none"}), "");
}

TEST(FlightRecordVerdict, NamesTheRankThatNeverCame) {
  Scene scene(8, 1071);
  scene.group("tp", {0, 1, 2, 3}).group("tp", {4, 5, 6, 7});
  for (int i = 0; i < 1233; ++i) {
    for (int rank = 4; rank < 8; ++rank) scene.complete(rank, "tp", 1000 + 0.005 * i, kGather);
  }
  for (const int rank : {4, 6, 7}) scene.enter(rank, "tp", 1010, State::Waiting, kGather);
  const auto verdict = scene.verdict();
  EXPECT_EQ(verdict.sentence, "rank 5 never entered all_gather #1234 of tp (layers.17.mlp); ranks 4, 6, 7 wait 61 s");
  EXPECT_EQ(verdict.kind, Kind::NeverEntered);
  EXPECT_TRUE(verdict.names_cause);
  EXPECT_THAT(verdict.culprits, ElementsAre(5));
  EXPECT_THAT(verdict.waiting, ElementsAre(4, 6, 7));
}

TEST(FlightRecordVerdict, EveryWorldSizeWithOneAbsentRank) {
  for (const int size : {2, 3, 5, 8}) {
    for (int absent = 0; absent < size; ++absent) {
      Scene scene(size, 1012);
      std::vector<int> others;
      for (int rank = 0; rank < size; ++rank) {
        scene.complete(rank, "world", 1001);
        if (rank == absent) continue;
        others.push_back(rank);
        scene.enter(rank, "world", 1002);
      }
      EXPECT_EQ(scene.sentence(), "rank " + std::to_string(absent) + " never entered all_reduce #2 of world; " + rank_list(others) +
                                      (others.size() == 1 ? " waits" : " wait") + " 10 s");
    }
  }
}

TEST(FlightRecordVerdict, SeveralAbsentRanksAreNamedTogether) {
  EXPECT_EQ(Scene(4, 1010).enter(2, "world", 1003).sentence(), "ranks 0, 1, 3 never entered all_reduce #1 of world; rank 2 waits 7 s");
}

// Timed out: the wait ended with the failure, not with the process.
TEST(FlightRecordVerdict, AWaitThatTimedOutLastedUntilThen) {
  Scene scene(2, 1030);
  scene.complete(0, "world", 1000).complete(1, "world", 1000);
  scene.enter(0, "world", 1001, State::Failed, {.site = "ddp.bucket"}, 1006.01);
  EXPECT_EQ(scene.sentence(), "rank 1 never entered all_reduce #2 of world (ddp.bucket); rank 0 waits 5 s");
}

TEST(FlightRecordVerdict, AFailureAtOnceIsNoWait) {
  Scene scene(2, 1030);
  scene.enter(0, "world", 1001, State::Failed, {}, 1001.05);
  EXPECT_EQ(scene.sentence(), "rank 1 never entered all_reduce #1 of world; it failed on rank 0 after 50 ms");
  EXPECT_FALSE(scene.verdict().names_cause) << "the error says more";
}

// Buckets are sent one after the other and waited for later: the first that somebody lacks counts.
TEST(FlightRecordVerdict, OfSeveralInFlightTheFirstThatARankLacks) {
  Scene scene(3, 1010);
  for (const int rank : {0, 1, 2}) scene.enter(rank, "world", 1000, State::InFlight, {.site = "first"});
  for (const int rank : {0, 2}) scene.enter(rank, "world", 1001, State::InFlight, {.site = "second"});
  for (const int rank : {0, 2}) scene.enter(rank, "world", 1002, State::Waiting, {.site = "third"});
  EXPECT_EQ(scene.sentence(), "rank 1 never entered all_reduce #2 of world (second); ranks 0, 2 wait 9 s");
}

// On a device the host does not wait; what is in flight is all there is to see.
TEST(FlightRecordVerdict, InFlightAloneStillNamesTheAbsent) {
  Scene scene(2, 1020);
  for (int i = 0; i < 3; ++i) scene.enter(0, "world", 1000 + i, State::InFlight);
  for (int i = 0; i < 2; ++i) scene.enter(1, "world", 1000 + i, State::InFlight);
  EXPECT_EQ(scene.sentence(), "rank 1 never entered all_reduce #3 of world; rank 0 waits 18 s");
}

TEST(FlightRecordVerdict, AFailureThatWasLivedWithIsNoWait) {
  Scene scene(2, 1005);
  scene.enter(0, "world", 1001, State::Failed, {}, 1001.1).enter(1, "world", 1001, State::Failed, {}, 1001.1);
  scene.complete(0, "world", 1002).complete(1, "world", 1002);
  EXPECT_EQ(scene.verdict().kind, Kind::Outside);
}

TEST(FlightRecordVerdict, FollowsWhoWaitsForWhomToTheRoot) {
  // 0 and 1 wait in tp for 2, which waits for a message of 3, which is outside of everything.
  Scene scene(4, 1020);
  scene.group("tp", {0, 1, 2}).group("pp", {2, 3});
  scene.complete(3, "world", 1001);
  for (const int rank : {0, 1, 2}) scene.complete(rank, "world", 1001);
  scene.enter(2, "pp", 1005, State::Waiting, message("recv", 1));
  for (const int rank : {0, 1}) scene.enter(rank, "tp", 1004);
  const auto verdict = scene.verdict();
  EXPECT_EQ(verdict.sentence, "rank 3 never entered send #1 to rank 2 of pp; rank 2 waits 15 s, and behind it ranks 0, 1");
  EXPECT_THAT(verdict.culprits, ElementsAre(3));
  EXPECT_THAT(verdict.waiting, ElementsAre(0, 1, 2));
}

// Between its calls a rank says what it is at: a stage of a pipeline computes for long, and makes no call meanwhile.
TEST(FlightRecordVerdict, SaysWhatTheAbsentRankIsAt) {
  Scene scene(2, 1020);
  scene.enter(0, "world", 1005, State::Waiting, message("recv", 1));
  scene[1].place = "stage 1, forward of micro-batch 5";
  const std::string never = "rank 1 never entered send #1 to rank 0 of world; rank 0 waits 15 s";
  EXPECT_EQ(scene.sentence(), never + "; rank 1 is at stage 1, forward of micro-batch 5");
  EXPECT_EQ(standings(Merge(scene.records()))[1].site, "stage 1, forward of micro-batch 5");
  scene[1].closed = true;
  EXPECT_EQ(scene.sentence(), never + "; rank 1 ended at stage 1, forward of micro-batch 5");
  scene[1].closed = false;
  scene[1].seen_s = 1010;
  EXPECT_EQ(scene.sentence(), never + "; rank 1 gave no sign of life for the last 10 s; rank 1 is at stage 1, forward of micro-batch 5");
}

TEST(FlightRecordVerdict, ASendWithoutARecv) {
  Scene scene(2, 1020);
  scene.enter(0, "world", 1005, State::Entered, message("send", 1, 4));
  EXPECT_EQ(scene.sentence(), "rank 1 never entered recv #1 from rank 0 of world (tag 4); rank 0 waits 15 s");
}

// Each side counts the messages of one direction, peer and tag; collectives and messages do not disturb each other's numbers.
TEST(FlightRecordVerdict, MessagesHaveNumbersOfTheirOwn) {
  Scene scene(3, 1020);
  scene.complete(0, "world", 1001, message("send", 1)).complete(0, "world", 1001, message("send", 2)).complete(0, "world", 1001, message("send", 2));
  scene.complete(1, "world", 1001, message("recv", 0)).complete(2, "world", 1001, message("recv", 0)).complete(2, "world", 1001, message("recv", 0));
  for (const int rank : {0, 1, 2}) scene.complete(rank, "world", 1002);
  scene.enter(2, "world", 1003, State::Waiting, message("recv", 0));
  EXPECT_EQ(scene.sentence(), "rank 0 never entered send #3 to rank 2 of world; rank 2 waits 17 s");
}

TEST(FlightRecordVerdict, ACircleIsADeadlock) {
  Scene scene(2, 1020);
  scene.group("a", {0, 1}).group("b", {0, 1});
  scene.enter(0, "a", 1010).enter(1, "b", 1010);
  const auto verdict = scene.verdict();
  EXPECT_EQ(verdict.sentence,
            "ranks 0, 1 wait for each other: rank 0 in all_reduce #1 of a for rank 1, rank 1 in all_reduce #1 of b for rank 0; they wait 10 s");
  EXPECT_EQ(verdict.kind, Kind::Deadlock);
}

TEST(FlightRecordVerdict, WhoWaitsForACircleIsNoCulpritOfIt) {
  Scene scene(4, 1020);
  scene.group("ahead", {0, 1}).group("a", {1, 2}).group("b", {1, 2}).group("behind", {2, 3});
  scene.enter(1, "a", 1010).enter(2, "b", 1010);
  scene.enter(0, "ahead", 1005).enter(3, "behind", 1011);
  const auto verdict = scene.verdict();
  EXPECT_EQ(verdict.sentence,
            "ranks 1, 2 wait for each other: rank 1 in all_reduce #1 of a for rank 2, rank 2 in all_reduce #1 of b for rank 1; they wait 10 s");
  EXPECT_EQ(verdict.kind, Kind::Deadlock);
  EXPECT_THAT(verdict.culprits, ElementsAre(1, 2));
  EXPECT_THAT(verdict.waiting, ElementsAre(0, 1, 2, 3));
}

TEST(FlightRecordVerdict, OfSeveralMismatchesTheFirstInTimeIsTold) {
  Scene scene(2, 1020);
  scene.group("a", {0, 1}).group("b", {0, 1});
  for (const auto& [group, entered_s] : std::vector<std::pair<std::string, double>>{{"b", 1005}, {"a", 1010}}) {
    scene.complete(0, group, entered_s, {.shape = {8}}).complete(1, group, entered_s, {.shape = {9}});
  }
  const auto verdict = scene.verdict();
  EXPECT_EQ(verdict.kind, Kind::Mismatch);
  EXPECT_THAT(verdict.sentence, testing::HasSubstr("all_reduce #1 of b"));
}

TEST(FlightRecordVerdict, AGroupThatWasMadeTwiceIsTwo) {
  Scene scene(2, 1020);
  scene.group("a", {0, 1}).group("a", {0, 1});
  for (const int rank : {0, 1}) scene.complete(rank, "a", 1001);
  scene.enter(0, "a", 1005);
  RankRecord& record = scene[0];  // in the second of them, its first call
  record.calls.back().group = 2;
  record.calls.back().sequence = record.groups[1].collectives = record.groups[2].collectives = 1;
  EXPECT_EQ(scene.sentence(), "rank 1 never entered all_reduce #1 of a; rank 0 waits 15 s");
}

TEST(FlightRecordVerdict, TagsThatDoNotMeetAreADeadlock) {
  Scene scene(2, 1020);
  scene.enter(0, "world", 1010, State::Waiting, message("send", 1, 1)).enter(1, "world", 1010, State::Waiting, message("recv", 0, 2));
  EXPECT_EQ(scene.sentence(),
            "ranks 0, 1 wait for each other: rank 0 in send #1 to rank 1 of world (tag 1) for rank 1, rank 1 in recv #1 from rank 0 of world (tag 2) for rank "
            "0; they wait 10 s");
}

TEST(FlightRecordVerdict, DifferentOpsInOnePlace) {
  Scene scene(3, 1020);
  for (const int rank : {0, 1, 2}) scene.complete(rank, "world", 1001);
  scene.enter(1, "world", 1002, State::Waiting, {.shape = {768}});
  for (const int rank : {0, 2}) scene.enter(rank, "world", 1002, State::Waiting, kGather);
  const auto verdict = scene.verdict();
  EXPECT_EQ(verdict.sentence,
            "rank 1 entered all_reduce #2 of world of a sum [768] float32 while ranks 0, 2 entered all_gather #2 of world [32, 768] float32 (layers.17.mlp)");
  EXPECT_EQ(verdict.kind, Kind::Mismatch);
  EXPECT_THAT(verdict.culprits, ElementsAre(1));
}

TEST(FlightRecordVerdict, DifferentShapesDtypesReductionsRoots) {
  const auto two = [](const What& of_0, const What& of_1) {
    return Scene(2, 1020).enter(0, "world", 1002, State::Waiting, of_0).enter(1, "world", 1002, State::Waiting, of_1).sentence();
  };
  EXPECT_EQ(two({.shape = {3}}, {.shape = {4}}), "rank 1 entered all_reduce #1 of world [4] float32 while rank 0 entered all_reduce #1 of world [3] float32");
  EXPECT_EQ(two({}, {.dtype = "bfloat16"}), "rank 1 entered all_reduce #1 of world [8] bfloat16 while rank 0 entered all_reduce #1 of world [8] float32");
  EXPECT_EQ(two({}, {.reduction = "max"}),
            "rank 1 entered all_reduce #1 of world of a max [8] float32 while rank 0 entered all_reduce #1 of world of a sum [8] float32");
  EXPECT_EQ(two({.op = "broadcast", .reduction = "", .peer = 0}, {.op = "broadcast", .reduction = "", .peer = 1}),
            "rank 1 entered broadcast #1 of world with root 1 [8] float32 while rank 0 entered broadcast #1 of world with root 0 [8] float32");
  EXPECT_EQ(two(message("send", 1), {.op = "recv", .shape = {9}, .reduction = "", .peer = 0}),
            "rank 1 entered recv #1 from rank 0 of world [9] float32 while rank 0 entered send #1 to rank 1 of world [8] float32");
}

TEST(FlightRecordVerdict, RowsOfAnAllToAllMayDiffer) {
  const What some{.op = "all_to_all", .shape = {3, 4}, .reduction = ""}, more{.op = "all_to_all", .shape = {5, 4}, .reduction = ""},
      wider{.op = "all_to_all", .shape = {5, 6}, .reduction = ""};
  EXPECT_EQ(Scene(2, 1020).complete(0, "world", 1001, some).complete(1, "world", 1001, more).verdict().kind, Kind::Outside);
  EXPECT_EQ(Scene(2, 1020).complete(0, "world", 1001, some).complete(1, "world", 1001, wider).verdict().kind, Kind::Mismatch);
}

// What travels is told in elements.
TEST(FlightRecordVerdict, RowsOfAnAllToAllAreOfOneSizeAndNotOfOneShape) {
  const auto of = [](const std::vector<std::vector<int64_t>>& shapes) {
    Scene scene(3, 1020);
    for (int rank = 0; rank < 2; ++rank) scene.enter(rank, "world", 1001, State::Waiting, {.op = "all_to_all", .shape = shapes[rank], .reduction = ""});
    return scene.sentence();
  };
  const std::string absent = "rank 2 never entered all_to_all #1 of world; ranks 0, 1 wait 19 s";
  EXPECT_EQ(of({{4, 2, 3}, {5, 6}}), absent);
  EXPECT_EQ(of({{4, 1}, {4}}), absent);
  EXPECT_EQ(of({{6, 3}, {3, 6}}), absent) << "equal parts";
  EXPECT_THAT(of({{4, 2, 3}, {5, 4}}), StartsWith("rank 1 entered all_to_all #1 of world [5, 4] float32 while rank 0"));
}

TEST(FlightRecordVerdict, PartsOfAnAllToAllAreEqualWhereAllGiveAsMuch) {
  const auto kind = [](const std::vector<std::vector<int64_t>>& shapes) {
    const int n = static_cast<int>(shapes.size());
    Scene scene(n, 1020);
    for (int rank = 0; rank < n; ++rank) scene.enter(rank, "world", 1001, State::Waiting, {.op = "all_to_all", .shape = shapes[rank], .reduction = ""});
    return scene.verdict().kind;
  };
  EXPECT_EQ(kind({{8, 6}, {12, 4}, {6, 8}}), Kind::Stalled);
  EXPECT_EQ(kind({{8, 6}, {9, 6}, {12, 4}}), Kind::Mismatch) << "the second proves that there are splits";
  EXPECT_EQ(kind({{8, 6}, {8, 6}, {7, 6}, {12, 4}}), Kind::Mismatch);
  EXPECT_EQ(kind({{8, 6}, {12, 4}, {5, 4}}), Kind::Mismatch);
  EXPECT_EQ(kind({{8, 6}, {12, 4}, {0}}), Kind::Mismatch);
}

TEST(FlightRecordVerdict, WhoGivesNoRowsOfAnAllToAllNeedNotKnowThem) {
  const What rows{.op = "all_to_all", .shape = {3, 4}, .reduction = ""}, wider{.op = "all_to_all", .shape = {5, 6}, .reduction = ""},
      none{.op = "all_to_all", .shape = {0}, .reduction = ""}, none_of_four{.op = "all_to_all", .shape = {0, 4}, .reduction = ""};
  const auto of = [](const std::vector<What>& ranks) {
    const int n = static_cast<int>(ranks.size());
    Scene scene(n, 1020);
    for (int rank = 0; rank < n; ++rank) scene.enter(rank, "world", 1001, State::Waiting, ranks[rank]);
    return scene.verdict();
  };
  EXPECT_EQ(of({none, rows, rows}).kind, Kind::Stalled);
  EXPECT_EQ(of({rows, none, none_of_four}).kind, Kind::Stalled);
  EXPECT_EQ(of({none, none_of_four}).kind, Kind::Stalled);
  EXPECT_EQ(of({wider, rows, none, rows}).sentence,
            "rank 0 entered all_to_all #1 of world [5, 6] float32 while ranks 1-3 entered all_to_all #1 of world [3, 4] float32");
  EXPECT_EQ(of({none, rows, wider, wider}).sentence,
            "rank 1 entered all_to_all #1 of world [3, 4] float32 while ranks 0, 2, 3 entered all_to_all #1 of world [5, 6] float32");
  EXPECT_EQ(of({{}, none, rows}).sentence,
            "rank 0 entered all_reduce #1 of world of a sum [8] float32 while ranks 1, 2 entered all_to_all #1 of world [3, 4] float32");
}

TEST(FlightRecordVerdict, TheFirstMismatchCountsAndSidesAreFew) {
  Scene scene(5, 1020);
  for (int rank = 0; rank < 5; ++rank) scene.complete(rank, "world", 1001);
  for (int rank = 0; rank < 5; ++rank) scene.complete(rank, "world", 1002, {.shape = {rank}});
  for (int rank = 0; rank < 5; ++rank) scene.complete(rank, "world", 1003, {.shape = {rank + 1}});
  const auto sentence = scene.sentence();
  EXPECT_THAT(sentence, EndsWith("all_reduce #2 of world [2] float32, and others in 2 more ways"));
}

TEST(FlightRecordVerdict, AllInsideTheSameCall) {
  Scene scene(3, 1061);
  for (const int rank : {0, 1, 2}) scene.enter(rank, "world", 1000, State::Waiting, {.site = "head"});
  const auto verdict = scene.verdict();
  EXPECT_EQ(verdict.sentence,
            "ranks 0-2 are inside all_reduce #1 of world (head) for 61 s; every rank had entered it alike, so look at the link or the engine");
  EXPECT_EQ(verdict.kind, Kind::Stalled);
  EXPECT_FALSE(verdict.names_cause);
  for (const int rank : {0, 1, 2}) {
    scene[rank].calls.back().state = State::Failed;
    scene[rank].calls.back().left_s = 1005;
  }
  EXPECT_EQ(scene.sentence(),
            "all_reduce #1 of world (head) failed on ranks 0-2 after 5 s; every rank had entered it alike, so look at the link or the engine");
}

// All hosts have gone on: what their devices have begun tells.
TEST(FlightRecordVerdict, ADeviceThatHasNotComeToWhatWasEnqueued) {
  const What gather{.op = "all_gather", .shape = {32, 768}, .reduction = "", .site = "layers.17.mlp", .on_device = true};
  Scene scene(4, 1071);
  for (int rank = 0; rank < 4; ++rank) scene.complete(rank, "world", 1001, gather);
  for (const int rank : {0, 1, 2}) scene.enter(rank, "world", 1010, State::Begun, gather);
  scene.enter(3, "world", 1010, State::InFlight, gather);
  auto verdict = scene.verdict();
  EXPECT_EQ(verdict.sentence, "rank 3 has enqueued all_gather #2 of world (layers.17.mlp), but its device has not come to it; ranks 0-2 wait 61 s");
  EXPECT_EQ(verdict.kind, Kind::Stalled);
  EXPECT_TRUE(verdict.names_cause);
  EXPECT_THAT(verdict.culprits, ElementsAre(3));
  EXPECT_THAT(verdict.waiting, ElementsAre(0, 1, 2));
  const auto states = [&] {
    const Merge merge(scene.records());
    std::vector<std::string> states;
    for (const auto& standing : standings(merge)) states.push_back(standing.state);
    return states;
  };
  EXPECT_THAT(states(), ElementsAre("waits", "waits", "waits", "enqueued"));
  scene[3].place = "stage 1, forward of micro-batch 5";
  EXPECT_THAT(scene.sentence(), EndsWith("wait 61 s; rank 3 is at stage 1, forward of micro-batch 5"));
  // One that was never asked for is another matter.
  scene[3].calls.pop_back();
  --scene[3].groups[0].collectives;
  EXPECT_THAT(scene.sentence(), StartsWith("rank 3 never entered all_gather #2 of world"));
  for (const int rank : {0, 1, 2, 3}) scene[rank].calls.back().state = State::Completed, scene[rank].calls.back().left_s = 1011;
  EXPECT_EQ(scene.verdict().kind, Kind::Outside);
}

// Every device is at something else, and no collective to blame.
TEST(FlightRecordVerdict, WhatIsOnlyEnqueuedHoldsNobodyUp) {
  Scene scene(2, 1071);
  for (const int rank : {0, 1}) scene.enter(rank, "world", 1010, State::InFlight, {.on_device = true});
  EXPECT_EQ(scene.sentence(), "no rank waits in a collective; rank 0 is outside of any for 61 s, its last was all_reduce #1 of world");
}

TEST(FlightRecordVerdict, ARankThatWentSilentInsideACall) {
  Scene scene(3, 1061);
  for (const int rank : {0, 1, 2}) scene.enter(rank, "world", 1000);
  scene[1].seen_s = 1001;
  const auto verdict = scene.verdict();
  EXPECT_EQ(verdict.sentence, "rank 1 gave no sign of life for the last 60 s, inside all_reduce #1 of world; ranks 0, 2 wait 61 s");
  EXPECT_THAT(verdict.culprits, ElementsAre(1));
  EXPECT_TRUE(verdict.names_cause);
}

TEST(FlightRecordVerdict, WhatElseIsKnownOfTheRankThatNeverCame) {
  const auto waiting = [] { return Scene(2, 1061).enter(0, "world", 1000); };
  auto silent = waiting();
  silent[1].seen_s = 1021;
  EXPECT_THAT(silent.sentence(), EndsWith("rank 0 waits 61 s; rank 1 gave no sign of life for the last 40 s"));
  auto left = waiting();
  left[1].closed = true;
  left[1].seen_s = 1002;
  EXPECT_THAT(left.sentence(), EndsWith("rank 0 waits 61 s; rank 1 had left the world"));
  // The clocks of two hosts may differ by less than that.
  auto skewed = waiting();
  skewed[1].seen_s = 1059;
  EXPECT_THAT(skewed.sentence(), EndsWith("rank 0 waits 61 s"));

  Scene inside(2, 1030);  // 0 has left #1, in which 1 still is
  inside.complete(0, "world", 1001).enter(1, "world", 1001).enter(0, "world", 1002);
  EXPECT_EQ(inside.sentence(), "rank 1 never entered all_reduce #2 of world; rank 0 waits 28 s; rank 1 is still inside all_reduce #1 of world");
  auto stopped = inside;
  stopped[1].seen_s = 1002;
  EXPECT_THAT(stopped.sentence(), EndsWith("; rank 1 gave no sign of life for the last 28 s, inside all_reduce #1 of world"));
  auto failed = inside;
  failed[1].calls.back().state = State::Failed;
  failed[1].calls.back().left_s = 1001.5;
  EXPECT_THAT(failed.sentence(), EndsWith("; rank 1 had failed in all_reduce #1 of world"));
}

TEST(FlightRecordVerdict, RanksWithoutARecord) {
  EXPECT_EQ(Scene(3, 1010).enter(0, "world", 1000).enter(2, "world", 1000).lose(1).sentence(),
            "rank 1 left no record and may never have entered all_reduce #1 of world; ranks 0, 2 wait 10 s");
  // Where another rank is known not to have come, that one is blamed.
  EXPECT_EQ(Scene(3, 1010).enter(0, "world", 1000).lose(1).sentence(), "rank 2 never entered all_reduce #1 of world; rank 0 waits 10 s; no record of rank 1");
}

TEST(FlightRecordVerdict, NobodyWaits) {
  Scene scene(3, 1061);
  for (const int rank : {0, 1, 2}) scene.complete(rank, "world", 1030 - 10 * (rank == 2), {.site = "report"});
  const auto verdict = scene.verdict();
  EXPECT_EQ(verdict.sentence, "no rank waits in a collective; rank 2 is outside of any for 41 s, its last was all_reduce #1 of world (report)");
  EXPECT_EQ(verdict.kind, Kind::Outside);
  EXPECT_FALSE(verdict.names_cause);
  for (const int rank : {0, 1, 2}) scene[rank].closed = true;
  EXPECT_EQ(scene.sentence(), "no rank waits: all have left the world");
  EXPECT_EQ(Scene(1, 1007).sentence(), "no rank waits in a collective; rank 0 is outside of any for 7 s, and has entered none");
}

// A group of the same name and members, made twice, is two groups.
TEST(FlightRecordVerdict, RepeatedGroupsAreMatchedByTheirOrder) {
  Scene scene(2, 1010);
  scene.group("dp", {0, 1}).group("dp", {0, 1});
  for (auto& record : {&scene[0], &scene[1]}) record->groups[1].collectives = 5;
  scene[0].groups[2].collectives = 1;
  scene[0].calls.push_back({.sequence = 1, .group = 2, .state = State::Waiting, .op = "barrier", .entered_s = 1005});
  EXPECT_EQ(scene.sentence(), "rank 1 never entered barrier #1 of dp; rank 0 waits 5 s");
}

// What a rank entered is known for ever, even when the entries have been overwritten.
TEST(FlightRecordVerdict, ACountOutlivesItsEntries) {
  Scene scene(2, 1010);
  scene[1].groups[0].collectives = 70'000;
  scene[0].groups[0].collectives = 70'001;
  scene[0].calls.push_back({.number = 99'000, .sequence = 70'001, .state = State::Waiting, .op = "barrier", .entered_s = 1000});
  EXPECT_EQ(scene.sentence(), "rank 1 never entered barrier #70001 of world; rank 0 waits 10 s");
}

TEST(FlightRecordVerdict, TableOfEveryRank) {
  Scene scene(4, 1061);
  scene.complete(0, "world", 1000).complete(1, "world", 1000, {.site = "report"});
  scene.enter(0, "world", 1001, State::Waiting, {.site = "ddp.bucket"});
  scene[1].seen_s = 1031;
  scene.lose(3);
  EXPECT_EQ(table(standings(Merge(scene.records()))),
            "rank  last entered                        state       for    last seen  where\n"
            "   0  all_reduce #2 of world [8] float32  waits      60 s   at the end  ddp.bucket\n"
            "   1  all_reduce #1 of world [8] float32  outside    31 s  30 s before  report\n"
            "   2  -                                   outside    61 s   at the end\n"
            "   3  -                                   no record     -            -\n");
}

}  // namespace
}  // namespace tessera::comm::flight
