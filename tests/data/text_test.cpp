#include "tessera/data/text.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include "tests/data/files.h"

namespace tessera::data {
namespace {

using testing::HasSubstr;

TEST(Text, ReadsPlainAndCompressed) {
  Folder folder;
  for (const std::string& text : {std::string("a"), std::string("one\ntwo\r\n\0three", 15), words(5000)}) {
    EXPECT_EQ(read_text(folder.write("plain.txt", text)), text);
    EXPECT_EQ(read_text(folder.write("text.gz", gzip(text))), text);
    EXPECT_EQ(read_text(folder.write("text.dz", gzip(text, true))), text);
    EXPECT_EQ(read_text(folder.write("members.gz", gzip(text) + gzip("") + gzip(text, true))), text + text);
  }
  EXPECT_EQ(read_text(folder.write("empty.txt", "")), "");
  EXPECT_EQ(read_text(folder.write("empty.gz", gzip(""))), "");
}

TEST(Text, ReadsInBlocksOfAnySize) {
  Folder folder;
  const std::string text = words(2000);
  for (const auto& file : {folder.write("t.txt", text), folder.write("t.gz", gzip(text.substr(0, 100)) + gzip(text.substr(100)))}) {
    TextReader reader(file);
    std::string back;
    for (size_t bytes = 1, got = 1; got > 0; bytes = bytes * 3 % 5003) {
      got = reader.read(back, bytes);
      EXPECT_LE(got, bytes);
    }
    EXPECT_EQ(back, text);
    EXPECT_EQ(reader.read(back, 10), 0u);
  }
}

TEST(Text, RefusesWhatMayNeverBeginOrEnd) {
  Folder folder;
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  for (const auto& path : {folder / "pipe", std::filesystem::path("/dev/zero")}) {
    EXPECT_THAT(refusal([&] { read_text(path); }), HasSubstr("is not a regular file; name a text")) << path;
  }
}

TEST(Text, RefusesDamageWithFileAndOffset) {
  Folder folder;
  const std::string packed = gzip(words(3000));
  EXPECT_THAT(refusal([&] { read_text(folder / "none.txt"); }), HasSubstr("none.txt: no such file"));
  EXPECT_THAT(refusal([&] { read_text(folder.path()); }), HasSubstr("is a folder"));
  EXPECT_THAT(refusal([&] { read_text(folder.write("plain.gz", "no gzip at all")); }), HasSubstr("plain.gz: damaged at offset"));
  EXPECT_THAT(refusal([&] { read_text(folder.write("nothing.gz", "")); }), HasSubstr("nothing.gz: truncated at offset 0"));
  for (size_t keep : {size_t{1}, size_t{5}, packed.size() / 2, packed.size() - 1}) {
    EXPECT_THAT(refusal([&] { read_text(folder.write("cut.dz", packed.substr(0, keep))); }), HasSubstr("cut.dz: truncated at offset " + std::to_string(keep)));
  }
  std::string flipped = packed;
  flipped[flipped.size() - 6] ^= 1;  // in the checksum
  EXPECT_THAT(refusal([&] { read_text(folder.write("flipped.gz", flipped)); }), HasSubstr("flipped.gz: damaged at offset"));
  EXPECT_THAT(refusal([&] { read_text(folder.write("tail.gz", packed + "rubbish")); }), HasSubstr("tail.gz: damaged at offset"));
}

}  // namespace
}  // namespace tessera::data
