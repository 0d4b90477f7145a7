#include "tessera/data/text.h"

#include <gmock/gmock.h>
#include <sys/stat.h>

#include "tessera/data/corpus.h"
#include "tessera/data/sample.h"
#include "tessera/data/tokenizer.h"
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
  // Whoever writes whole blocks (a tape, a device) pads the last one.
  for (const size_t zeros : {1, 511, 200000}) {
    const std::string padding(zeros, '\0'), text = words(300);
    EXPECT_EQ(read_text(folder.write("padded.gz", gzip(text) + gzip(text) + padding)), text + text) << zeros;
    EXPECT_EQ(read_text(folder.write("nothing.gz", gzip("") + padding)), "") << zeros;
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

const std::string kPosixMark = std::string("ustar\0", 6) + "00";

/// The first header of an archive: a file's name, its sizes in octal, and the mark.
std::string tar_of(const char* name, const std::string& mark) {
  std::string header = name;
  header.resize(257, '\0');
  header += mark;
  header.resize(512, '\0');
  return header + "text";
}

TEST(Text, RefusesWhatIsNoTextInsideOfGzipToo) {
  Folder folder;
  const auto refused = [&](const char* name, const std::string& bytes) { return refusal([&] { read_text(folder.write(name, gzip(bytes))); }); };
  EXPECT_THAT(refused("book.gz", std::string("\xff\xfet\0e\0", 6)), HasSubstr("book.gz: holds UTF-16 or UTF-32, by its first bytes, and a text is UTF-8"));
  EXPECT_THAT(refused("table.gz", std::string("PAR1\x15\0", 6)), HasSubstr("table.gz: holds a Parquet file, and a text is plain"));
  EXPECT_THAT(refused("pile.dz", std::string("\x28\xb5\x2f\xfd\x04\x58", 6)), HasSubstr("pile.dz: holds zstd data"));
  EXPECT_THAT(refused("twice.gz", gzip("text")), HasSubstr("twice.gz: holds gzip data once more"));
  EXPECT_THAT(refused("corpus.bin.gz", std::string("TESSCORP\2\0\0\0", 12)), HasSubstr("holds a packed corpus; name the text it was made from"));
  EXPECT_THAT(refused("books.tar.gz", tar_of("a.txt", kPosixMark)), HasSubstr("books.tar.gz: holds a tar archive"));
  const std::string text = std::string("\xef\xbb\xbf") + words(100);
  EXPECT_EQ(read_text(folder.write("marked.gz", gzip("") + gzip(text))), text) << "what was looked at is read, too";
}

TEST(Text, RefusesArchivesAndPackedCorpora) {
  Folder folder;
  const auto refused = [&](const std::string& bytes) { return refusal([&] { read_text(folder.write("text", bytes)); }); };
  EXPECT_THAT(refused(tar_of("a.txt", kPosixMark)), HasSubstr("is a tar archive, whose names and sizes are no text; unpack it"));
  EXPECT_THAT(refused(tar_of("a.txt", std::string("ustar  \0", 8))), HasSubstr("is a tar archive"));
  const auto packed = folder / "corpus.bin";
  const auto bytes = Tokenizer::load("byte");
  (void)Corpus::build({folder.write("a.txt", words(10))}, *bytes, packed);
  EXPECT_THAT(refusal([&] { read_text(packed); }), HasSubstr("corpus.bin: is a packed corpus; name the text it was made from"));
  EXPECT_THAT(refusal([&] { Corpus::build({packed}, *bytes, folder / "lines.bin", 0, "FILES", Documents::Lines); }),
              HasSubstr("FILES: " + packed.string() + ": is a packed corpus"));
  EXPECT_FALSE(std::filesystem::exists(folder / "lines.bin"));
  EXPECT_THAT(refusal([&] { sample_text({packed}, 0); }), HasSubstr("is a packed corpus")) << "what a tokenizer learns from";
  for (const std::string& text : {std::string("TESSCORP is the mark of a packed corpus"), std::string(257, 'a') + "ustar is a word", std::string("TESSCORP")}) {
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
  for (const size_t zeros : {1, 100000}) {  // what is behind them, in this block or a later one, would be left out
    for (const std::string& more : {std::string("rubbish"), gzip("more"), std::string(5, '\0') + "\1"}) {
      const size_t begin = more.find_first_not_of('\0');
      EXPECT_THAT(refusal([&] { read_text(folder.write("tail.gz", packed + std::string(zeros, '\0') + more)); }),
                  HasSubstr("tail.gz: damaged at offset " + std::to_string(packed.size() + zeros + begin)));
    }
  }
}

}  // namespace
}  // namespace tessera::data
