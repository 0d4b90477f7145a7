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

TEST(Text, RefusesWhatIsNoTextWhateverItsName) {
  Folder folder;
  const auto refused = [&](const std::string& name, const std::string& bytes) { return refusal([&] { read_text(folder.write(name, bytes)); }); };
  for (const char* name : {"text.txt", "text.GZ", "text.tgz", "text"}) {
    EXPECT_THAT(refused(name, gzip("text")), HasSubstr(std::string(name) + ": is gzip data, which is read as such where its name ends in .gz")) << name;
  }
  const std::pair<std::string, const char*> others[] = {{std::string("\x28\xb5\x2f\xfd\x04\x58", 6), "is zstd data"},
                                                        {std::string("\xfd"
                                                                     "7zXZ\0\0\4",
                                                                     8),
                                                         "is xz data"},
                                                        {"BZh91AY&SY\x83\x11", "is bzip2 data"},
                                                        {"BZh9\x17rE8P\x90", "is bzip2 data"},
                                                        {std::string("PK\3\4\24\0", 6), "is a zip archive"},
                                                        {"7z\xbc\xaf\x27\x1c", "is a 7z archive"},
                                                        {"\x04\x22\x4d\x18\x64", "is lz4 data"},
                                                        {std::string("PAR1\x15\0", 6), "is a Parquet file"},
                                                        {std::string("\xff\xfet\0e\0", 6), "convert it (iconv -t UTF-8)"},
                                                        {std::string("\xfe\xff\0t\0e", 6), "convert it (iconv -t UTF-8)"},
                                                        {std::string("\0\0\xfe\xff\0\0\0t", 8), "convert it (iconv -t UTF-8)"}};
  for (const auto& [bytes, what] : others) EXPECT_THAT(refused("book.txt", bytes), HasSubstr(what));
  // What a text may begin with stays one.
  for (const char* text : {"BZh is three letters", "BZh9", "PAR1S", "PK is two", "7z", "\xef\xbb\xbfmarked", "\x1f", "\xff"}) {
    EXPECT_EQ(read_text(folder.write("text.txt", text)), text);
  }
}

TEST(Text, RefusesDamageWithFileAndOffset) {
  Folder folder;
  const std::string packed = gzip(words(3000));
  EXPECT_THAT(refusal([&] { read_text(folder / "none.txt"); }), HasSubstr("none.txt: no such file"));
  EXPECT_THAT(refusal([&] { read_text(folder.path()); }), HasSubstr("is a folder"));
  EXPECT_THAT(refusal([&] { read_text(folder.write("plain.gz", "no gzip at all")); }), HasSubstr("plain.gz: is no gzip data, which its name says"));
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
