#include <cstdio>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cli/common.h"

namespace tessera::cli {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

struct Stream {
  Stream(const char* file, const char* mode) : file(std::fopen(file, mode), std::fclose) {}
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file;
};

/// With nothing left to write, or with all of it.
std::string problem(const char* file, const char* mode, bool lost_before) {
  const Stream out(file, mode);
  std::fputs("text", out.file.get());
  if (lost_before) std::fflush(out.file.get());
  return problem_of_output(out.file.get());
}

TEST(ProblemOfOutput, SaysWhyAndTheWayOutOfThat) {
  for (const bool lost_before : {false, true}) {
    EXPECT_EQ(problem("/dev/null", "w", lost_before), "");
    EXPECT_EQ(problem("/dev/full", "w", lost_before), "cannot be written: No space left on device; what it holds is not whole: make room, and run this again");
  }
  // As a standard output that is closed: what stands in for it takes nothing.
  const Stream closed("/dev/null", "r");
  std::fputs("text", closed.file.get());
  EXPECT_THAT(problem_of_output(closed.file.get()),
              AllOf(HasSubstr("Bad file descriptor"), HasSubstr("an output that can be written"), Not(HasSubstr("room"))));
  EXPECT_EQ(problem_of_output(closed.file.get(), "OUT is written"), "cannot be written: Bad file descriptor; OUT is written");
}

}  // namespace
}  // namespace tessera::cli
