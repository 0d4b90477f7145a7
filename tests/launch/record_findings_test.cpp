#include "tessera/launch/record_findings.h"

#include <cstdlib>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/comm/call_site.h"
#include "tessera/comm/flight_record/flight_record.h"

namespace tessera::launch {
namespace {

using comm::FlightRecord;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::StartsWith;

class RecordFindings : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = testing::TempDir() + "verdictXXXXXX";
    ASSERT_NE(mkdtemp(pattern.data()), nullptr);
    dir = pattern;
  }
  void TearDown() override { std::filesystem::remove_all(dir); }

  // Rank 0 of 2 has entered one call more than rank 1.
  void leave_records() const {
    for (const int rank : {0, 1}) {
      FlightRecord record(dir, {.rank = rank, .size = 2});
      const auto group = record.add_group({.name = "world", .rank = rank, .size = 2}).value();
      {
        const comm::CallSite site("start");
        record.mark(record.enter(group, {.op = comm::Operation::AllReduce}), comm::flight::State::Completed);
      }
      if (rank == 0) record.enter(group, {.op = comm::Operation::Barrier});
    }
  }

  std::filesystem::path dir;
};

TEST_F(RecordFindings, SayWhoKeptWhomWaiting) {
  leave_records();
  const auto findings = explain_records(dir);
  EXPECT_THAT(findings.sentence, MatchesRegex("rank 1 never entered barrier #2 of world; rank 0 waits [0-9]+ m?s; rank 1 had left the world"));
  EXPECT_TRUE(findings.names_cause);
  EXPECT_THAT(findings.table, StartsWith("rank  last entered"));
  EXPECT_THAT(findings.table, HasSubstr("all_reduce #1 of world"));
  EXPECT_EQ(std::ranges::count(findings.table, '\n'), 3);
}

TEST_F(RecordFindings, LeaveOutWhatCannotBeRead) {
  leave_records();
  std::ofstream(FlightRecord::file_of(dir, 1), std::ios::trunc) << "nothing of the kind";
  const auto findings = explain_records(dir);
  EXPECT_THAT(findings.sentence, StartsWith("rank 1 left no record and may never have entered barrier #2 of world; rank 0 waits"));
  EXPECT_FALSE(findings.names_cause);
}

TEST_F(RecordFindings, AreEmptyWithoutRecords) {
  for (const auto& where : {dir, dir / "none"}) {
    const auto findings = explain_records(where);
    EXPECT_EQ(findings.sentence, "");
    EXPECT_EQ(findings.table, "");
    EXPECT_FALSE(findings.names_cause);
  }
  std::ofstream(FlightRecord::file_of(dir, 0)) << "nothing of the kind";
  EXPECT_EQ(explain_records(dir).sentence, "");
}

}  // namespace
}  // namespace tessera::launch
