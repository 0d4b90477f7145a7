#include "tessera/launch/job_end.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

namespace tessera::launch {
namespace {

int exited(int code) { return code << 8; }
int signaled(int signal) { return signal; }

TEST(JobEnd, NothingFailed) {
  const JobEnd job_end = judge({{0, exited(0), ""}, {1, exited(0), ""}});
  EXPECT_EQ(job_end.exit_code, 0);
  EXPECT_EQ(job_end.sentence, "");
  EXPECT_EQ(judge({}).exit_code, 0);
}

TEST(JobEnd, NamesTheFirstFailure) {
  const JobEnd job_end = judge({{2, exited(0), ""}, {1, exited(3), write_report({Failure::Other, "disk is full"})}, {0, exited(4), ""}});
  EXPECT_EQ(job_end.exit_code, 1);
  EXPECT_EQ(job_end.sentence, "rank 1 failed with exit code 3: disk is full");
}

TEST(JobEnd, ASignalIsLikelierThanAnExit) {
  const JobEnd job_end = judge({{0, exited(1), ""}, {1, signaled(SIGSEGV), ""}});
  EXPECT_EQ(job_end.exit_code, 1);
  EXPECT_EQ(job_end.sentence, "rank 1 was ended by SIGSEGV (segmentation fault)");
}

TEST(JobEnd, ABusErrorIsThatOfAFileThatWasCut) {
  EXPECT_THAT(judge({{0, signaled(SIGBUS), ""}}).sentence,
              ::testing::StartsWith("rank 0 was ended by SIGBUS (bus error): it read a mapped file beyond its end; "));
}

TEST(JobEnd, AnAbortIsNoLikelierThanAnExit) { EXPECT_EQ(judge({{0, exited(3), ""}, {1, signaled(SIGABRT), ""}}).sentence, "rank 0 failed with exit code 3"); }

TEST(JobEnd, ABrokenConnectionIsAConsequence) {
  const std::vector<Ending> endings{{0, exited(1), write_report({Failure::Comm, "all_reduce: connection closed by peer"})},
                                    {1, exited(1), write_report({Failure::Other, "nan"})}};
  EXPECT_EQ(judge(endings).sentence, "rank 1 failed with exit code 1: nan");
  EXPECT_EQ(judge({endings[0]}).sentence, "rank 0 failed with exit code 1: all_reduce: connection closed by peer");
}

TEST(JobEnd, WhoIsBlamedComesBeforeWhoWasSeenFirst) {
  const std::string reason = "stage 1: send of group pp, rank 1: injected error at call 6";
  const Ending blamed{1, exited(1), write_report({Failure::Comm, reason})};
  const auto after = [&](int rank) {
    return Ending{rank, exited(1),
                  write_report({Failure::Comm, "stage 0: recv of group pp, rank 0: aborted by rank 1; waited 0.0 s; rank 1 failed: " + reason})};
  };
  const std::string sentence = "rank 1 failed with exit code 1: " + reason;
  EXPECT_EQ(judge({after(0), blamed, after(2)}).sentence, sentence);
  EXPECT_EQ(judge({after(0), after(2), blamed}).sentence, sentence);
  EXPECT_EQ(judge({blamed, after(0)}).sentence, sentence);
  EXPECT_EQ(judge({after(0), {1, exited(1), write_report({Failure::Comm, "gone"})}}).rank, 0) << "the sentence of another failure";
}

TEST(JobEnd, BadInputIsHandedOnAsItIs) {
  const JobEnd job_end = judge({{0, exited(1), write_report({Failure::Comm, "gone"})}, {1, exited(2), write_report({Failure::Config, "data.files: empty"})}});
  EXPECT_EQ(job_end.exit_code, 2);
  EXPECT_EQ(job_end.sentence, "data.files: empty");
  EXPECT_EQ(judge({{3, exited(2), ""}}).sentence, "rank 3 refused its input (exit code 2)");
}

TEST(JobEnd, ReportsAreOneLine) {
  const auto report = read_report(write_report({Failure::Config, "two\nlines"}));
  ASSERT_TRUE(report);
  EXPECT_EQ(report->kind, Failure::Config);
  EXPECT_EQ(report->reason, "two lines");
  EXPECT_FALSE(read_report(""));
  EXPECT_FALSE(read_report("something else\n"));
}

TEST(JobEnd, DescribesSignals) {
  EXPECT_EQ(describe_signal(SIGKILL), "SIGKILL (killed)");
  EXPECT_EQ(describe_signal(63), "signal 63");
}

}  // namespace
}  // namespace tessera::launch
