#include "tessera/launch/output.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

namespace tessera::launch {
namespace {

std::string lines(int first, int last) {
  std::string text;
  for (int i = first; i <= last; ++i) text += "line " + std::to_string(i) + "\n";
  return text;
}

/// What `rank` is remembered by after it wrote `out` and `err`.
std::string remembered(const std::string& out, const std::string& err) {
  Output output;
  OutputPlan plan;
  plan.out.captured = plan.err.captured = true;
  plan.out.console = plan.err.console = false;
  const auto ends = output.open(3, plan);
  EXPECT_EQ(write(ends[0], out.data(), out.size()), static_cast<ssize_t>(out.size()));
  EXPECT_EQ(write(ends[1], err.data(), err.size()), static_cast<ssize_t>(err.size()));
  for (const int end : ends) close(end);
  return output.last_lines(3);
}

TEST(Output, RemembersTheLastTwentyLinesOfErrorsOrElseOfAll) {
  EXPECT_EQ(remembered("", lines(1, 25)), lines(6, 25));
  EXPECT_EQ(remembered("", lines(1, 20)), lines(1, 20));
  EXPECT_EQ(remembered("", lines(1, 3) + "no end"), lines(1, 3) + "no end");
  EXPECT_EQ(remembered("out\n", "err\n"), "err\n");
  EXPECT_EQ(remembered("out\n", ""), "out\n");
  EXPECT_EQ(remembered("", ""), "");
}

TEST(Output, AFileThatTakesNoMoreIsNamedOnceAndTheConsoleGetsAll) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  {
    Output output;
    OutputPlan plan;
    plan.out = {.captured = true, .file = "/dev/full"};
    const int end = output.open(3, plan)[0];
    for (const std::string text : {"one\n", "two\n"}) {
      EXPECT_EQ(write(end, text.data(), text.size()), static_cast<ssize_t>(text.size()));
      output.last_lines(3);  // takes what has come, so that the file is tried twice
    }
    close(end);
  }
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "one\ntwo\n");
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, testing::HasSubstr("--log-dir: /dev/full: not all that rank 3 writes gets into this file (No space left on device)"));
  EXPECT_EQ(said.find("--log-dir"), said.rfind("--log-dir"));
}

}  // namespace
}  // namespace tessera::launch
