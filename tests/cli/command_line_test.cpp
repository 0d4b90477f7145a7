#include "cli/command_line.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera::cli {
namespace {

using ::testing::HasSubstr;

/// What is said of these words, behind the program's name.
std::string said(std::vector<std::string> words) {
  CommandLine line("about", "1");
  Command generate = line.program().add_command("generate", "about"), bench = line.program().add_command("bench", "about");
  int64_t most = 0, size = 0;
  generate.add_option("--max-tokens", most);
  generate.add_option("--temperature", size);
  bench.add_command("comm", "about").add_option("--sizes", size);
  std::string place;
  bench.add_flag("--report{}", place, "about");
  words.insert(words.begin(), "tessera");
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  testing::internal::CaptureStderr();
  const auto answered = line.parse(static_cast<int>(argv.size()), argv.data());
  std::string text = testing::internal::GetCapturedStderr();
  EXPECT_EQ(answered, 2) << text;
  return text;
}

TEST(CommandLine, AFlagThatThereIsNotIsNamedWithTheNearest) {
  EXPECT_EQ(said({"generate", "--max-new-tokens", "5"}),
            "tessera: The following arguments were not expected: --max-new-tokens 5; the flag nearest to --max-new-tokens is --max-tokens; --help says what "
            "there is\n");
  EXPECT_THAT(said({"generate", "--temprature=1"}), HasSubstr("The following argument was not expected: --temprature=1; the flag nearest"));
  EXPECT_THAT(said({"bench", "comm", "--size", "5"}), HasSubstr("not expected: --size 5; the flag nearest to --size is --sizes"));
  EXPECT_THAT(said({"generate", "one", "two"}), HasSubstr("not expected: one two; --help"));
  EXPECT_THAT(said({"generate", ""}), HasSubstr("an argument is empty"));
  EXPECT_THAT(said({"bench", "--report=a", "--report=b"}), HasSubstr("--report: is given 2 times; give it once"));
}

}  // namespace
}  // namespace tessera::cli
