#include "tessera/data/sample.h"

#include <gtest/gtest.h>

#include "tests/data/files.h"

namespace tessera::data {
namespace {

constexpr size_t line_bytes = 7;

std::string numbered_lines(int count) {
  std::string text;
  for (int i = 0; i < count; ++i) {
    std::string number = std::to_string(i);
    text += std::string(line_bytes - 1 - number.size(), '0') + number + "\n";
  }
  return text;
}

TEST(Sample, TakesStretchesEvenlyFromAllOfTheText) {
  Folder folder;
  constexpr int lines = 30000;
  constexpr int64_t limit = 20000;
  const auto stretches = sample_text({folder.write("a.txt", numbered_lines(lines))}, limit);
  ASSERT_GT(stretches.size(), 16u);
  int64_t bytes = 0;
  std::vector<int> begins;
  for (const auto& stretch : stretches) {
    bytes += static_cast<int64_t>(stretch.size());
    EXPECT_EQ(stretch.size() % line_bytes, 0u) << "whole lines";
    begins.push_back(std::stoi(stretch.substr(0, line_bytes - 1)));
  }
  EXPECT_LE(bytes, limit);
  EXPECT_GT(bytes, limit / 3);
  EXPECT_EQ(begins.front(), 0);
  const int gap = begins[1];
  for (size_t i = 1; i < begins.size(); ++i) EXPECT_EQ(begins[i] - begins[i - 1], gap) << "stretch " << i;
  EXPECT_GE(begins.back() + gap, lines - gap) << "up to the end";
}

TEST(Sample, ALineThatIsTheWholeFileIsCut) {
  Folder folder;
  constexpr int64_t limit = 256 << 10;
  std::string line;
  for (int i = 0; line.size() < (3 << 20); ++i) line += std::to_string(i) + "\u00e9\u4e2d\U0001F600";
  const auto stretches = sample_text({folder.write("line.txt", line)}, limit);
  ASSERT_GE(stretches.size(), 8u) << "spread over the file";
  int64_t bytes = 0;
  for (const auto& stretch : stretches) {
    bytes += static_cast<int64_t>(stretch.size());
    EXPECT_NE(static_cast<unsigned char>(stretch.front()) & 0xc0, 0x80) << "begins inside a character";
  }
  EXPECT_LE(bytes, limit);
  EXPECT_GT(bytes, limit / 3);
  // All of it, cut or not: also where no byte begins a character.
  for (const std::string& whole : {line, std::string(1 << 20, '\x80'), std::string(3000, 'a') + "\n" + std::string(300000, 'b') + "\nc"}) {
    std::string all;
    for (const auto& stretch : sample_text({folder.write("whole.txt", whole)}, 0)) all += stretch;
    EXPECT_EQ(all, whole);
  }
}

TEST(Sample, KeepsALineOfSeveralStretchesWhole) {
  Folder folder;
  std::string text;
  for (int i = 0; i < 2000; ++i) text += std::string(900, static_cast<char>('a' + i % 26)) + "\n";
  for (const auto& stretch : sample_text({folder.write("a.txt", text)}, 5000)) EXPECT_TRUE(stretch.ends_with('\n')) << stretch.size();
}

TEST(Sample, WithoutALimitIsTheWholeText) {
  Folder folder;
  const std::string first = numbered_lines(20000), second = "no newline at the end";
  std::string all;
  for (const auto& stretch : sample_text({folder.write("a.txt", first), folder.write("b.txt", second)}, 0)) all += stretch;
  EXPECT_EQ(all, first + second);
}

}  // namespace
}  // namespace tessera::data
