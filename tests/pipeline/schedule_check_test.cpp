// The checker sees what it is for: each schedule here has one fault.

#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/pipeline/schedules/check.h"
#include "tessera/pipeline/schedules/csv.h"
#include "tessera/pipeline/schedules/generators.h"
#include "tessera/pipeline/schedules/lower.h"
#include "tests/refusal.h"

namespace tessera::schedules {
namespace {

using testing_support::refusal;

std::string read(const std::string& text) {
  return refusal([&] { read_csv(text, "mine.csv"); });
}

TEST(ScheduleCsv, TakesAByteOrderMarkAndNoBinaryFile) {
  EXPECT_EQ(to_csv(read_csv("\xEF\xBB\xBF"
                            "0F0,0B0\n",
                            "mine.csv")),
            "0F0,0B0\n");
  EXPECT_EQ(refusal([] { read_csv(std::string_view("0F0,\0B0\n", 8), "mine.csv"); }), "mine.csv: holds a byte 0, and is no text in UTF-8; save it as one");
}

TEST(ScheduleCsv, IsARegularFile) {
  const auto place = std::filesystem::temp_directory_path() / ("tessera-csv-" + std::to_string(::getpid()));
  const auto refused = [&] { return refusal([&] { read_csv_file(place.string()); }).substr(place.string().size()); };
  ASSERT_EQ(::mkfifo(place.c_str(), 0600), 0);
  EXPECT_EQ(refused(), ": is not a regular file; name a CSV file that holds a schedule");
  std::filesystem::remove(place);
  std::filesystem::create_directory(place);
  EXPECT_EQ(refused(), ": is a folder; name a CSV file that holds a schedule");
  std::filesystem::remove(place);
  std::ofstream(place).flush();
  EXPECT_EQ(refused(), ": holds no action; write a row for each rank, such as 0F0,0B0");
  std::filesystem::remove(place);
}

TEST(ScheduleCheck, ACircleIsPrintedWithItsActions) {
  EXPECT_EQ(read("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n"),
            "mine.csv: row 1 (rank 0), column 2: deadlock: rank 0 is at 0B0, which needs 1B0 of rank 1; rank 1 is at 1F1, which needs 0F1 of rank 0");
  EXPECT_EQ(read("0B0,0F0\n1F0,1B0\n"), "mine.csv: row 1 (rank 0), column 1: deadlock: rank 0 is at 0B0, which needs 0F0, and does that later or not at all");
  EXPECT_EQ(read("0F0,0W0,0I0\n"), "mine.csv: row 1 (rank 0), column 2: deadlock: rank 0 is at 0W0, which needs 0I0, and does that later or not at all");
  // Rank 0 waits as well, and is not part of it.
  EXPECT_EQ(read("0F0,,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n2F0,,2F1,2B0,2B1\n"),
            "mine.csv: row 2 (rank 1), column 2: deadlock: rank 1 is at 1B0, which needs 2B0 of rank 2; rank 2 is at 2F1, which needs 1F1 of rank 1");
}

TEST(ScheduleCheck, WhatIsForgottenOrRepeatedIsNamed) {
  EXPECT_EQ(read("0F0,0B0\n1F0\n"), "mine.csv: row 2 (rank 1): 1B0 is missing");
  EXPECT_EQ(read("0F0,,0B0,,0B0\n1F0,1B0\n"), "mine.csv: row 1 (rank 0), column 5: 0B0 is done a second time");
  EXPECT_EQ(read("0F0,0I0,0B0"), "mine.csv: row 1 (rank 0), column 3: 0B0 is done a second time");
  EXPECT_EQ(read("0F0,0I0"), "mine.csv: row 1 (rank 0): 0W0 is missing");
  EXPECT_EQ(read("0F1,0B1"), "mine.csv: row 1 (rank 0): 0F0 is missing");
  EXPECT_EQ(read("0F0,0B0,1F0\n1F0,1B0"), "mine.csv: row 2 (rank 1), column 1: 1F0: stage 1 is held by rank 0");
  EXPECT_EQ(read("5F0,5B0"), "mine.csv: stage 0 is held by no rank");
}

TEST(ScheduleCheck, MessagesHaveTwoEndsInOneOrder) {
  EXPECT_EQ(read("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0"), "mine.csv: row 2 (rank 1): 1SEND_B0 is missing");
  EXPECT_EQ(read("0F0,0SEND_F0,0B0,0SEND_B0\n"), "mine.csv: row 1 (rank 0), column 2: 0SEND_F0: its other end is on no other rank");
  EXPECT_EQ(read("0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"),
            "mine.csv: row 1 (rank 0): message 0 between ranks 0 and 1 differs: the one begins 0SEND_F1, the other 1RECV_F0");
  EXPECT_THAT(read("0F0,0B0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0"), testing::HasSubstr("rank 0 is at 0B0, which needs 0RECV_B0"));
}

TEST(ScheduleCheck, BothDirectionsAtOnceHangWhereEnginesWait) {
  // Each rank sends first: fine where messages run by themselves in any order, a deadlock where a send waits for its receive.
  auto schedule = lower(one_f_one_b(2, 2), {.ahead = 0});
  auto& rank1 = schedule.actions[1];
  ASSERT_EQ(to_string(rank1[2]), "1RECV_F1");
  std::swap(rank1[2], rank1[3]);  // behind 1B0: still in order
  EXPECT_EQ(find_problem(schedule, Messages::Rendezvous), std::nullopt);
  std::swap(rank1[3], rank1[4]);  // behind 1SEND_B0, while rank 0 sends its second micro-batch first
  const auto problem = find_problem(schedule, Messages::Rendezvous);
  ASSERT_TRUE(problem);
  EXPECT_EQ(problem->what,
            "deadlock: rank 0 stands in 0SEND_F1 until rank 1 comes to its other end; rank 1 stands in 1SEND_B0 until rank 0 comes to its other end");
}

TEST(ScheduleCheck, ShardingAndVersionsAreKept) {
  EXPECT_EQ(read("0UNSHARD,0F0,0RESHARD,0B0"), "mine.csv: row 1 (rank 0), column 4: 0B0: stage 0 is not unsharded");
  EXPECT_EQ(read("0RESHARD,0F0,0B0"), "mine.csv: row 1 (rank 0), column 1: 0RESHARD: the stage is not unsharded");
  EXPECT_EQ(read("0F0,0F1,0B0,0REDUCE_GRAD,0B1"), "mine.csv: row 1 (rank 0), column 5: 0B1: the gradients of stage 0 are reduced already");
  EXPECT_EQ(read("0F0@1,0B0@1,0UPDATE0@1"), "mine.csv: row 1 (rank 0), column 1: 0F0@1: stage 0 has had 0 updates");
  EXPECT_EQ(read("0F0,0B0,0UPDATE0@1,0F1@1,0B1,0UPDATE1@2"), "mine.csv: row 1 (rank 0), column 5: 0B1: its forward used version 1");
  EXPECT_EQ(read("0F0,0B0,0UPDATE0@2"), "mine.csv: row 1 (rank 0), column 3: 0UPDATE0@2: it is update 1 of stage 0");
}

TEST(ScheduleCheck, OursThrowAsOurBugs) {
  auto schedule = gpipe(2, 2);
  schedule.actions[1].pop_back();
  EXPECT_THROW(check(schedule), InternalError);
  EXPECT_THROW(simulate(Schedule{.name = "", .micro_batches = 1, .rank_of = {0}, .actions = {{{.kind = Kind::Backward}}}}), InternalError);
}

TEST(ScheduleText, CellsAreReadAsPyTorchWritesThem) {
  const auto schedule = read_csv("0F0, ,\"0F1\",0B0,0B1,\r\n,1F0,1B0,1F1,1B1\r\n\r\n", "theirs.csv");
  EXPECT_EQ(to_string(schedule), "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n");
  EXPECT_EQ(schedule.rank_of, (std::vector{0, 1}));
  EXPECT_EQ(to_csv(schedule), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
  for (const char* text : {"2F0", "3I1", "3W1", "1B0", "2SEND_F0", "3RECV_F0", "3SEND_B11", "2RECV_B11", "1UNSHARD", "0RESHARD", "7REDUCE_GRAD", "0UPDATE3@4",
                           "(0F7;7B3)OVERLAP_F_B", "1F2@3"})
    EXPECT_EQ(to_string(parse_action(text)), text);
}

TEST(ScheduleText, WhatIsNoActionIsRefused) {
  EXPECT_THAT(read("0F0,0X0"),
              testing::StartsWith("mine.csv: row 1 (rank 0), column 2: '0X0' is no action: expected a stage, a kind and a micro-batch, such as 2F0"));
  for (const char* text : {"F0", "0F", "0f0", "-1F0", "0F-1", "0F0x", "0UNSHARD1", "99999999999F0", "2097152F0", "(0F0)", "(0F0;1F0)OVERLAP_F_B", "(0F0;1B0",
                           "(0F0;1B0)OVERLAP_B_F", ")(;", "0F0@", "0UNSHARD@1"})
    EXPECT_THAT(read(text), testing::HasSubstr("is no action")) << text;
  EXPECT_EQ(read(""), "mine.csv: holds no action; write a row for each rank, such as 0F0,0B0");
  EXPECT_EQ(read("0F0,0B0\n,,\n1F0,1B0"), "mine.csv: row 2 (rank 1) holds no action: each row is what one rank does");
  EXPECT_EQ(read("1048575F1,0B0"), "mine.csv: 1048576 stages with 2 micro-batches, as its largest numbers say, take at least 4194304 actions, and there are 2");
  EXPECT_EQ(refusal([] { read_csv_file("/nowhere/a.csv"); }),
            "/nowhere/a.csv: cannot be read: No such file or directory; name a file that is there and can be read");
}

}  // namespace
}  // namespace tessera::schedules
