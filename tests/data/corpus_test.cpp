#include "tessera/data/corpus.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <sys/wait.h>

#include "tessera/core/hash.h"
#include "tessera/data/byte_tokenizer.h"
#include "tessera/data/corpus_format.h"
#include "tests/data/files.h"
#include "tests/file_limit.h"

namespace tessera::data {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

std::string text_of(const Corpus& corpus) {
  std::vector<int64_t> ids(static_cast<size_t>(corpus.tokens()));
  corpus.read(0, corpus.tokens(), ids.data());
  return {ids.begin(), ids.end()};
}

std::vector<int64_t> all_ids(const Corpus& corpus) {
  std::vector<int64_t> ids(static_cast<size_t>(corpus.tokens()));
  corpus.read(0, corpus.tokens(), ids.data());
  return ids;
}

/// Any vocabulary size, a beginning-of-text and an end-of-text id, the last two, to stand for tokenizers that are slow to train.
/// Of bytes, which writes files anew while it encodes them, `times` times.
class Rewrites final : public ByteTokenizer {
 public:
  Rewrites(std::function<void()> write, int times) : write_(std::move(write)), left_(times) {}
  std::unique_ptr<Encoder> encoder() const override {
    if (left_-- > 0) write_();
    return ByteTokenizer::encoder();
  }

 private:
  std::function<void()> write_;
  mutable int left_;
};

class FakeTokenizer : public Tokenizer {
 public:
  explicit FakeTokenizer(int64_t vocab_size) : name_("fake-" + std::to_string(vocab_size)), token_bytes_(static_cast<size_t>(vocab_size), 1) {
    token_bytes_.back() = 0;
  }
  int64_t vocab_size() const override { return static_cast<int64_t>(token_bytes_.size()); }
  std::string decode(std::span<const int32_t> ids) const override { return byte_->decode(ids); }
  std::optional<int32_t> bos() const override { return static_cast<int32_t>(token_bytes_.size() - 2); }
  std::optional<int32_t> eos() const override { return static_cast<int32_t>(token_bytes_.size() - 1); }
  const std::string& fingerprint() const override { return name_; }
  std::span<const uint32_t> token_bytes() const override { return token_bytes_; }
  size_t boundary(std::string_view text, size_t from) const override { return byte_->boundary(text, from); }
  std::unique_ptr<Encoder> encoder() const override { return byte_->encoder(); }

 private:
  std::unique_ptr<Tokenizer> byte_ = load("byte");
  std::string name_;
  std::vector<uint32_t> token_bytes_;
};

TEST(Corpus, HoldsTheIdsOfAllFilesInOrder) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const std::string first = words(30), second = words(20, 7);
  const auto a = folder.write("a.txt", first), b = folder.write("b.txt.gz", gzip(second));
  const auto corpus = Corpus::open_or_build({a, b}, *byte, folder / "cache");
  const auto expected = byte->encode(first + second);
  EXPECT_EQ(all_ids(*corpus), std::vector<int64_t>(expected.begin(), expected.end()));
  EXPECT_EQ(corpus->text_bytes(), static_cast<int64_t>(first.size() + second.size()));
  EXPECT_EQ(corpus->vocab_size(), 256);
  EXPECT_EQ(corpus->tokenizer(), "byte");
  EXPECT_EQ(corpus->bytes(3, 10), 10);

  // The other order is other data; a copy elsewhere is the same.
  EXPECT_NE(Corpus::open_or_build({b, a}, *byte, folder / "cache")->content(), corpus->content());
  const auto copy = folder.write("copy.txt", first);
  EXPECT_EQ(Corpus::open_or_build({copy, b}, *byte, folder / "cache")->content(), corpus->content());
}

/// The ids that a text's name stands for are its own, whatever becomes of the files meanwhile.
TEST(Corpus, ATextThatChangesWhileItIsPackedIsPackedAgain) {
  Folder folder;
  const auto a = folder.write("a.txt", "first a"), b = folder.write("b.txt", "first b");
  const auto byte = Tokenizer::load("byte");
  const std::string packed_first = Corpus::open_or_build({a, b}, *byte, folder / "other")->content();
  for (const bool renamed : {false, true}) {
    SCOPED_TRACE(renamed);
    const auto put = [&](const std::string& text) {
      if (!renamed) return void(folder.write("b.txt", text));
      std::filesystem::rename(folder.write("b.new", text), b);
    };
    put("first b");
    const auto cache = folder / (renamed ? "by name" : "in place");
    const Rewrites once([&] { put("other b"); }, 1);
    ::testing::internal::CaptureStderr();
    const auto corpus = Corpus::open_or_build({a, b}, once, cache);
    EXPECT_THAT(::testing::internal::GetCapturedStderr(), HasSubstr("changed while it was packed, and is packed again"));
    EXPECT_NE(corpus->content(), packed_first);
    EXPECT_EQ(text_of(*corpus), "first aother b");
    put("first b");
    EXPECT_EQ(text_of(*Corpus::open_or_build({a, b}, *byte, cache)), "first afirst b");
    put("not packed before");
    int count = 0;
    const Rewrites always([&] { put(std::to_string(++count)); }, 9);
    EXPECT_THAT([&] { Corpus::open_or_build({a, b}, always, cache); }, ThrowsMessage<ConfigError>(HasSubstr("changed 3 times while it was packed")));
    const Rewrites while_built([&] { put("other b"); }, 1);
    EXPECT_THAT([&] { Corpus::build({a, b}, while_built, folder / "out.bin"); }, ThrowsMessage<ConfigError>(HasSubstr("changed while it was packed")));
    EXPECT_FALSE(std::filesystem::exists(folder / "out.bin"));
  }
}

/// It is mapped, so whoever writes into it changes what is read; whoever puts another in its place does not.
TEST(Corpus, AFileThatIsWrittenOverSaysSo) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const auto packed = folder / "a.bin", other = folder / "other.bin";
  const auto open = [&] { return Corpus::build({folder.write("a.txt", "one text")}, *byte, packed); };
  Corpus::build({folder.write("b.txt", "two text")}, *byte, other);
  const std::string theirs = slurp(other);
  const auto write_over = [&](const std::filesystem::path& file, const std::string& bytes) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // the clock that the system notes changes by is coarse
    std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  };
  {
    const auto corpus = open();
    EXPECT_EQ(corpus->changed(), "");
    std::filesystem::permissions(packed, std::filesystem::perms::owner_read, std::filesystem::perm_options::add);
    std::filesystem::create_hard_link(packed, folder / "second name");
    EXPECT_EQ(corpus->changed(), "") << "nothing of what it holds";
    const std::string ours = slurp(packed);
    write_over(packed, ours);
    EXPECT_EQ(corpus->changed(), "") << "with the same";
    std::filesystem::copy_file(other, folder / "new");
    std::filesystem::rename(folder / "new", packed);
    EXPECT_EQ(corpus->changed(), "") << "what was opened has lost its name alone";
    EXPECT_EQ(text_of(*corpus), "one text");
    write_over(folder / "second name", theirs);
    EXPECT_THAT(corpus->changed(), HasSubstr("a.bin: was written over while it was in use"));
    write_over(folder / "second name", ours);
    EXPECT_THAT(corpus->changed(), HasSubstr("was written over")) << "somebody has read it by now";
  }
  const auto corpus = open();
  std::filesystem::resize_file(packed, theirs.size() - 1);
  EXPECT_THAT(corpus->changed(), HasSubstr("a.bin: was written over while it was in use"));
}

TEST(Corpus, ATextMayHaveTheLongestNameThereIs) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  std::string name = "a";
  for (int i = 0; i < 125; ++i) name += "\xC3\xA9";  // two bytes each, an odd one before
  const auto text = folder.write(name + ".txt", "ab");
  EXPECT_EQ(all_ids(*Corpus::open_or_build({text}, *byte, folder / "cache")), (std::vector<int64_t>{'a', 'b'}));
  for (const auto& entry : std::filesystem::directory_iterator(folder / "cache")) {
    EXPECT_EQ(entry.path().filename().string().substr(0, 100), name.substr(0, 99) + "-") << "the name ends with a character";
  }
}

TEST(Corpus, SeparatesFilesAndWidensIds) {
  Folder folder;
  const auto a = folder.write("a.txt", "ab"), b = folder.write("b.txt", "c");
  for (int64_t vocab_size : {257, 65536, 65537, 100000}) {
    const FakeTokenizer tokenizer(vocab_size);
    const auto corpus = Corpus::open_or_build({a, b}, tokenizer, folder / "cache");
    EXPECT_EQ(all_ids(*corpus), (std::vector<int64_t>{'a', 'b', vocab_size - 1, 'c'}));
    EXPECT_EQ(corpus->text_bytes(), 3);
    EXPECT_EQ(corpus->bytes(0, 4), 3);  // the separator stands for no text
    EXPECT_EQ(corpus->bytes(2, 2), 1);
  }
}

TEST(Corpus, BeginsEachDocumentWithTheBeginningOfTextWhereThatIsAskedFor) {
  Folder folder;
  const FakeTokenizer fake(300);
  const int64_t bos = 298, eos = 299;
  const auto a = folder.write("a.txt", "ab\n\nc\n"), b = folder.write("b.txt", "x");
  const auto made = [&](Documents documents, bool begins) { return Corpus::open_or_build({a, b}, fake, folder / "cache", 0, "data.files", documents, begins); };
  EXPECT_EQ(all_ids(*made(Documents::None, true)), (std::vector<int64_t>{bos, 'a', 'b', '\n', '\n', 'c', '\n', eos, bos, 'x'}));
  EXPECT_EQ(all_ids(*made(Documents::Files, true)), (std::vector<int64_t>{bos, 'a', 'b', '\n', '\n', 'c', '\n', eos, bos, 'x', eos}));
  EXPECT_EQ(all_ids(*made(Documents::Lines, true)), (std::vector<int64_t>{bos, 'a', 'b', '\n', eos, bos, 'c', '\n', eos, bos, 'x', eos}));
  EXPECT_EQ(all_ids(*made(Documents::Lines, false)), (std::vector<int64_t>{'a', 'b', '\n', eos, 'c', '\n', eos, 'x', eos})) << "another cache";
  EXPECT_NE(made(Documents::Lines, true)->content(), made(Documents::Lines, false)->content()) << "a run goes on as it began";
  // A packed file says it.
  for (const bool begins : {false, true}) {
    const auto packed = folder / (begins ? "with.bin" : "without.bin");
    EXPECT_EQ(Corpus::build({a}, fake, packed, 0, "FILES", Documents::Lines, begins)->bos(), begins);
    const auto open = [&](bool wanted) { return Corpus::open_or_build({packed}, fake, folder / "cache", 0, "data.files", Documents::Lines, wanted); };
    EXPECT_EQ(open(begins)->bos(), begins);
    EXPECT_THAT(refusal([&] { open(!begins); }), AllOf(HasSubstr(begins ? "data.bos = false" : "data.bos = true"),
                                                       HasSubstr("the tokenizer files of model.from_hf say"), HasSubstr("tessera tokenize")));
  }
}

/// Known by its name, it would otherwise be packed once more.
TEST(Corpus, APackedFileOfAnotherNameIsRefused) {
  Folder folder;
  const FakeTokenizer fake(300);
  const auto corpus = Corpus::build({folder.write("a.txt", "abcabc")}, fake, folder / "packed", 0, "FILES", Documents::None);
  EXPECT_THROW(Corpus::open_or_build({folder / "packed"}, fake, folder / "cache"), ConfigError);
}

TEST(Corpus, BytesOfManyIdsAreEachIdsOwn) {
  Folder folder;
  const FakeTokenizer fake(300);  // the end of a text stands for no byte
  const auto corpus =
      Corpus::open_or_build({folder.write("a.txt", std::string(70000, 'a')), folder.write("b.txt", std::string(70000, 'b'))}, fake, folder / "cache");
  EXPECT_EQ(corpus->tokens(), 140001);
  EXPECT_EQ(corpus->bytes(0, 140001), 140000);
  EXPECT_EQ(corpus->bytes(1, 69999), 69999);
  EXPECT_EQ(corpus->bytes(69999, 3), 2);
}

TEST(Corpus, CountsWindows) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const auto corpus = Corpus::open_or_build({folder.write("a.txt", std::string(33, 'x'))}, *byte, folder / "cache");
  EXPECT_EQ(corpus->windows(32), 1);
  EXPECT_EQ(corpus->windows(33), 0);
  EXPECT_EQ(corpus->windows(16), 2);
  EXPECT_EQ(corpus->windows(1), 32);
  EXPECT_EQ(corpus->windows(31), 1);
}

TEST(Corpus, IsBuiltInBlocksAsInOne) {
  // Longer than a block of the builder, in a line structure that blocks cut anywhere.
  Folder folder;
  std::string text;
  while (text.size() < (size_t{18} << 20)) text += words(20000, static_cast<uint32_t>(text.size()));
  const auto byte = Tokenizer::load("byte");
  const auto corpus = Corpus::build({folder.write("long.txt", text)}, *byte, folder / "long.bin", 2);
  ASSERT_EQ(corpus->tokens(), static_cast<int64_t>(text.size()));
  const auto ids = all_ids(*corpus);
  EXPECT_TRUE(std::equal(ids.begin(), ids.end(), text.begin(), [](int64_t id, char c) { return id == static_cast<unsigned char>(c); }));
}

TEST(Corpus, UsesTheCacheAndRebuildsADamagedOne) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const auto text = folder.write("a.txt", words(100));
  const auto path = Corpus::open_or_build({text}, *byte, folder / "cache")->path();
  EXPECT_EQ(path.parent_path(), folder / "cache");
  EXPECT_THAT(path.filename().string(), HasSubstr("a.txt-"));
  const auto written = std::filesystem::last_write_time(path);
  const std::string good = slurp(path);
  EXPECT_EQ(Corpus::open_or_build({text}, *byte, folder / "cache")->path(), path);
  EXPECT_EQ(std::filesystem::last_write_time(path), written);
  EXPECT_FALSE(std::filesystem::exists(path.string() + ".partial"));

  for (size_t at : {size_t{0}, offsetof(CorpusHeader, version), sizeof(CorpusHeader) + 5, good.size() - 1}) {
    std::string bad = good;
    bad[at] ^= 0x10;
    std::ofstream(path, std::ios::binary) << bad;
    testing::internal::CaptureStderr();
    const auto corpus = Corpus::open_or_build({text}, *byte, folder / "cache");
    EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("the cached corpus is rebuilt"));
    EXPECT_EQ(slurp(path), good);
    EXPECT_EQ(corpus->text_bytes(), static_cast<int64_t>(std::filesystem::file_size(text)));
  }
  // Sound, but of another text than its name says.
  const auto other = Corpus::open_or_build({folder.write("b.txt", words(50))}, *byte, folder / "cache")->path();
  std::filesystem::copy_file(other, path, std::filesystem::copy_options::overwrite_existing);
  testing::internal::CaptureStderr();
  EXPECT_EQ(slurp(Corpus::open_or_build({text}, *byte, folder / "cache")->path()), good);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("holds other data than its name says"));
  // What a crashed builder left behind is no obstacle.
  std::filesystem::remove(path);
  std::ofstream(path.string() + ".partial") << "half a corpus";
  EXPECT_EQ(slurp(Corpus::open_or_build({text}, *byte, folder / "cache")->path()), good);
}

/// Whoever packed it may have looked at less than is looked at now.
TEST(Corpus, OfWhatIsNoTextIsNotTakenFromTheCache) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const auto text = folder.write("a.txt", words(100)), twice = folder.write("twice.gz", gzip(gzip(words(100))));
  const auto made = Corpus::open_or_build({text}, *byte, folder / "cache")->path();
  // As a build that did not look would have left it: under the name of these files, and with their content in its header.
  const auto knows = [&](const std::filesystem::path& file) {
    Hasher hasher;
    const std::string bytes = slurp(file), rest = byte->fingerprint() + " v2";
    const uint64_t size = bytes.size();
    return hasher.update(&size, sizeof size).update(bytes.data(), bytes.size()).update(rest.data(), rest.size()).hex();
  };
  ASSERT_EQ(made.filename(), "a.txt-" + knows(text) + ".bin");
  CorpusWriter writer(folder / "cache" / ("twice.gz-" + knows(twice) + ".bin"), *byte, knows(twice), "data.cache_dir", Documents::None, false);
  writer.add(std::vector<int32_t>(100, 'x'));
  writer.add_text_bytes(100);
  writer.finish();
  EXPECT_THAT(refusal([&] { Corpus::open_or_build({twice}, *byte, folder / "cache"); }), HasSubstr("twice.gz: holds gzip data once more"));
}

TEST(Corpus, IsBuiltOnceByManyThreadsAndProcesses) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  for (int round = 0; round < 5; ++round) {
    const auto text = folder.write("a.txt", words(3000, static_cast<uint32_t>(round)));
    std::vector<pid_t> children;
    for (int c = 0; c < 3; ++c) {
      const pid_t child = fork();
      if (child == 0) {
        try {
          _exit(Corpus::open_or_build({text}, *byte, folder / "cache", 1)->tokens() > 0 ? 0 : 1);
        } catch (...) {
          _exit(2);
        }
      }
      children.push_back(child);
    }
    std::vector<std::shared_ptr<const Corpus>> corpora(4);
    {
      std::vector<std::jthread> threads;
      for (auto& corpus : corpora) threads.emplace_back([&] { corpus = Corpus::open_or_build({text}, *byte, folder / "cache", 1); });
    }
    for (const auto& corpus : corpora) EXPECT_EQ(all_ids(*corpus), all_ids(*corpora[0]));
    for (pid_t child : children) {
      int status = -1;
      waitpid(child, &status, 0);
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    }
  }
  int64_t files = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder / "cache")) ++files;
  EXPECT_EQ(files, 5);  // one corpus a round, no partial ones
}

TEST(Corpus, WritesOverNothingThatIsSomebodyElses) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const auto text = folder.write("a.txt", words(100));
  const auto mine = folder.write("p.bin.partial", "precious");
  const auto build = [&] { Corpus::build({text}, *byte, folder / "p.bin"); };
  EXPECT_THAT(refusal(build), AllOf(HasSubstr("p.bin.partial: is no packed text"), HasSubstr("another output")));
  EXPECT_EQ(slurp(mine), "precious");
  folder.write("p.bin.partial", std::string(sizeof(CorpusHeader), '\0') + "half a corpus");  // as a builder that was killed leaves it
  build();
  EXPECT_FALSE(std::filesystem::exists(mine));
}

/// And is no error of the configuration: a rank that meets one is started again.
TEST(Corpus, AFullDiskNamesWhatSaysWhere) {
  const auto byte = Tokenizer::load("byte");
  const auto failure = [](const auto& body) -> std::string {
    try {
      body();
    } catch (const ConfigError& error) {
      return std::string("asked wrongly: ") + error.what();
    } catch (const Error& error) {
      return error.what();
    }
    return "(written)";
  };
  const auto written = [&](const std::string& knob) {
    return failure([&] {
      CorpusWriter writer("/dev/full", *byte, "content", knob);
      writer.finish();
    });
  };
  EXPECT_EQ(written("output"), "/dev/full: cannot be written: No space left on device; make room there, or choose another output");
  EXPECT_THAT(written("data.cache_dir"), HasSubstr("choose another data.cache_dir"));
  Folder folder;
  const auto text = folder.write("text.txt", words(3000));
  const FileLimit limit(10000);
  EXPECT_THAT(failure([&] { Corpus::open_or_build({text}, *byte, folder / "cache"); }),
              AllOf(testing::StartsWith(folder.path().string()), HasSubstr("cannot be written: File too large (ulimit -f); make room there")));
  EXPECT_TRUE(std::filesystem::is_empty(folder / "cache"));
}

TEST(Corpus, RefusesTextThatGivesNone) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const auto build = [&](std::vector<std::filesystem::path> files) { return refusal([&] { Corpus::open_or_build(files, *byte, folder / "cache"); }); };
  EXPECT_THAT(build({}), HasSubstr("data.files = []"));
  EXPECT_THAT(build({folder / "none.txt"}), HasSubstr("none.txt: no such file"));
  EXPECT_THAT(build({folder.path()}), HasSubstr("is not a regular file"));
  EXPECT_THAT(build({folder.write("empty.txt", "")}), AllOf(HasSubstr("empty.txt"), HasSubstr("0 windows")));
  EXPECT_THAT(build({folder.write("full.txt", "x"), folder.write("empty.gz", gzip(""))}), AllOf(HasSubstr("empty.gz"), HasSubstr("0 windows")));
  EXPECT_THAT(build({folder.write("cut.gz", gzip(words(100)).substr(0, 50))}), AllOf(HasSubstr("cut.gz"), HasSubstr("truncated at offset 50")));
  EXPECT_THAT(build({folder / "a.bin", folder / "b.txt"}), HasSubstr("a packed corpus stands alone"));
  // A refusal leaves nothing behind, and the next caller is not kept waiting.
  EXPECT_TRUE(!std::filesystem::exists(folder / "cache") || std::filesystem::is_empty(folder / "cache"));
  const auto unwritable = folder.write("file", "no folder");
  EXPECT_THAT(refusal([&] { Corpus::open_or_build({folder / "full.txt"}, *byte, unwritable); }), HasSubstr("data.cache_dir"));
}

TEST(Corpus, RefusesAnyFlippedOrMissingByte) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const auto file = Corpus::build({folder.write("a.txt", words(3))}, *byte, folder / "a.bin")->path();
  EXPECT_EQ(Corpus::open_or_build({file}, *byte, folder / "cache")->path(), file);
  EXPECT_FALSE(std::filesystem::exists(folder / "cache"));
  const std::string good = slurp(file);
  for (size_t at = 0; at < good.size(); ++at) {
    std::string bad = good;
    bad[at] ^= 1 << at % 8;
    const std::string said = refusal([&] { Corpus::open(folder.write("bad.bin", bad)); });
    ASSERT_THAT(said, HasSubstr("bad.bin")) << at;
  }
  for (size_t keep = 0; keep < good.size(); keep += 7) {
    ASSERT_THAT(refusal([&] { Corpus::open(folder.write("bad.bin", good.substr(0, keep))); }),
                HasSubstr("bad.bin: truncated at offset " + std::to_string(keep)));
  }
  EXPECT_THAT(refusal([&] { Corpus::open(folder.write("bad.bin", good + "x")); }), HasSubstr("from offset " + std::to_string(good.size())));
  EXPECT_THAT(refusal([&] { Corpus::open(folder.write("bad.bin", words(100))); }), HasSubstr("is no packed corpus"));

  const FakeTokenizer other(300);
  EXPECT_THAT(refusal([&] { Corpus::open_or_build({file}, other, folder / "cache"); }), AllOf(HasSubstr("tokenizer byte"), HasSubstr("fake-300")));
}

TEST(Corpus, NamesTheDamagedBlock) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const auto file = Corpus::build({folder.write("a.txt", std::string(3 << 20, 'x'))}, *byte, folder / "a.bin")->path();
  std::string bad = slurp(file);
  const size_t at = sizeof(CorpusHeader) + 2 * corpus_block_bytes + 12345;
  bad[at] ^= 1;
  EXPECT_THAT(refusal([&] { Corpus::open(folder.write("bad.bin", bad)); }),
              HasSubstr("damaged between offsets " + std::to_string(sizeof(CorpusHeader) + 2 * corpus_block_bytes)));
}

/// A file whose hashes are right and whose header or ids are not: nothing in it was damaged, yet it must not be believed.
TEST(Corpus, RefusesWhatItsHashesCannotProve) {
  Folder folder;
  const auto byte = Tokenizer::load("byte");
  const std::string good = slurp(Corpus::build({folder.write("a.txt", words(3))}, *byte, folder / "a.bin")->path());
  const auto forge = [&](const auto& change) {
    std::string bytes = good;
    CorpusHeader header;
    std::memcpy(&header, bytes.data(), sizeof header);
    const uint64_t payload_bytes = header.payload_bytes();  // of the file, whatever the header will say
    change(header, bytes.data() + sizeof header);
    const uint64_t block = hash_bytes(bytes.data() + sizeof header, payload_bytes);
    std::memcpy(bytes.data() + sizeof header + payload_bytes, &block, sizeof block);
    header.blocks_hash = hash_bytes(&block, sizeof block);
    header.header_hash = header.hash();
    std::memcpy(bytes.data(), &header, sizeof header);
    return folder.write("forged.bin", bytes);
  };
  const auto forged = [&](const auto& change) { return refusal([&] { Corpus::open(forge(change)); }); };
  constexpr size_t tables = 2 * 256 * sizeof(uint32_t), ids = sizeof(CorpusHeader) + tables;
  EXPECT_NO_THROW(Corpus::open(forge([](CorpusHeader&, char*) {})));
  EXPECT_THAT(forged([](CorpusHeader& header, char*) { header.vocab_size += uint64_t{1} << 62; }), HasSubstr("forged.bin: truncated at offset"));
  EXPECT_THAT(forged([](CorpusHeader& header, char*) { header.tokens += uint64_t{1} << 63; }), HasSubstr("forged.bin: truncated at offset"));
  EXPECT_THAT(forged([](CorpusHeader& header, char*) { std::memset(header.tokenizer, 't', sizeof header.tokenizer); }), HasSubstr("impossible header"));
  EXPECT_THAT(forged([](CorpusHeader& header, char*) { header.text_bytes = uint64_t{1} << 63; }), HasSubstr("impossible header"));
  EXPECT_THAT(forged([](CorpusHeader& header, char*) { header.version = 2; }), HasSubstr("of version 2; this program reads version 3"));
  EXPECT_THAT(forged([](CorpusHeader&, char* payload) { payload[tables + 5] = 1; }),
              HasSubstr(detail::concat("the id at offset ", ids + 4, " is outside of the vocabulary of 256")));
}

TEST(BitsPerByte, IsWhatCompressorsAreComparedBy) { EXPECT_DOUBLE_EQ(bits_per_byte(8 * std::log(2.0), 4), 2.0); }

}  // namespace
}  // namespace tessera::data
