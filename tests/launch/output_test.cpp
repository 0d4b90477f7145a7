#include "tessera/launch/output.h"

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

}  // namespace
}  // namespace tessera::launch
