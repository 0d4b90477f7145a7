#include "tessera/data/corpus.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <numbers>

#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/data/corpus_format.h"
#include "tessera/data/mapped_file.h"
#include "tessera/data/partial_file.h"
#include "tessera/data/text.h"

// Encoding takes longer than many runs, so it is done once, into a file that is mapped: opening costs a check, and ranks of a machine share its pages. The file
// is named by a hash of texts and tokenizer and can be damaged, but not out of date. Of several processes that find none the one that gets the lock builds it,
// and what a killed one left is overwritten. A text passes in blocks, cut where the tokenizer says that a cut changes no id.

namespace tessera::data {
namespace {

using Files = std::vector<std::filesystem::path>;

constexpr const char* kCacheKnob = "data.cache_dir";
constexpr const char* kOutputKnob = "output";

/// Hash of what the files hold (as stored, compressed or not), in order, and of what turns it into ids.
std::string content_hash(const Files& files, const Tokenizer& tokenizer, const std::string& knob) {
  Hasher hasher;
  for (const auto& file : files) {
    std::error_code error;
    require(is_there(file), knob, ": ", file.string(), ": no such file");
    require(std::filesystem::is_regular_file(file, error), knob, ": ", file.string(), ": is not a regular file; name a text");
    const MappedFile mapped(file);
    const uint64_t size = mapped.bytes().size();
    require(size > 0, knob, ": ", file.string(), ": is empty and gives 0 windows; name a text");
    hasher.update(&size, sizeof size).update(mapped.bytes().data(), size);
  }
  const std::string rest = tokenizer.fingerprint() + " v" + std::to_string(corpus_version);
  return hasher.update(rest.data(), rest.size()).hex();
}

/// The last place, or nearly, where `text` may be cut although it goes on; 0 where there is none.
size_t last_boundary(const Tokenizer& tokenizer, std::string_view text) {
  for (size_t back = 64 << 10;; back *= 2) {
    const size_t from = text.size() > back ? text.size() - back : 0;
    const size_t cut = tokenizer.boundary(text, from);
    if (cut < text.size()) return cut;
    if (from == 0) return 0;
  }
}

/// Encodes one file block by block into `writer`; returns its bytes of text.
int64_t pack_file(const std::filesystem::path& file, const Tokenizer& tokenizer, ParallelEncoder& encoder, CorpusWriter& writer, const std::string& knob) {
  constexpr size_t block_bytes = 16 << 20;
  TextReader reader(file);
  std::string text;
  std::vector<int32_t> ids;
  int64_t done = 0;
  for (bool more = true; more;) {
    more = reader.read(text, block_bytes) > 0;
    const size_t end = more ? last_boundary(tokenizer, text) : text.size();
    ids.clear();
    try {
      encoder.append(std::string_view(text).substr(0, end), done == 0, ids, done);
    } catch (const ConfigError& error) {
      throw ConfigError(knob + ": " + file.string() + ": " + error.what());
    }
    writer.add(ids);
    text.erase(0, end);
    done += static_cast<int64_t>(end);
  }
  require(done > 0, knob, ": ", file.string(), ": holds no text and gives 0 windows; name a text");
  return done;
}

void pack(const Files& files, const Tokenizer& tokenizer, CorpusWriter writer, int threads, const std::string& knob) {
  ParallelEncoder encoder(tokenizer, threads);
  for (size_t i = 0; i < files.size(); ++i) {
    if (i > 0 && tokenizer.eos()) writer.add(std::array{*tokenizer.eos()});
    writer.add_text_bytes(pack_file(files[i], tokenizer, encoder, writer, knob));
  }
  writer.finish();
}

/// Under the name of an unfinished file there may be one that a killed process left, which the next one takes; anything else is somebody's.
void check_leftover(const std::filesystem::path& partial) {
  if (!is_there(partial)) return;
  std::error_code ignored;
  const bool is_file = std::filesystem::is_regular_file(partial, ignored);
  std::string begin(sizeof(CorpusHeader), '\0');
  if (is_file) {
    std::ifstream file(partial, std::ios::binary);
    file.read(begin.data(), static_cast<std::streamsize>(begin.size()));
    begin.resize(static_cast<size_t>(file.gcount()));
  }
  require(is_file && begins_corpus(begin), partial.string(),
          ": is no packed text, and the output is written under that name until it is whole; move it elsewhere, or ", "choose another output");
}

/// The cached corpus; null where there is none, or it is damaged (which `damage` tells then).
std::shared_ptr<const Corpus> open_cached(const std::filesystem::path& path, const std::string& content, std::string& damage) {
  std::error_code error;
  if (!std::filesystem::exists(path, error)) return nullptr;
  try {
    auto corpus = Corpus::open(path);
    if (corpus->content() == content) return corpus;
    damage = path.string() + ": holds other data than its name says";
  } catch (const ConfigError& found) {
    damage = found.what();
  }
  return nullptr;
}

/// The text's name, or its beginning: a file system may have taken one that leaves no room for what follows it.
std::string short_name(const std::filesystem::path& file) {
  constexpr size_t longest = 100;
  std::string name = file.filename().string();
  if (name.size() <= longest) return name;
  size_t end = longest;
  while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xC0) == 0x80) --end;  // not within a character
  return name.substr(0, end);
}

bool is_packed(const std::filesystem::path& file) { return file.extension() == ".bin"; }

}  // namespace

std::shared_ptr<const Corpus> Corpus::open_or_build(const Files& files, const Tokenizer& tokenizer, const std::filesystem::path& cache_dir, int threads,
                                                    const std::string& knob) {
  require(!files.empty(), knob, " = []: there is nothing to train on; name at least one text");
  if (files.size() == 1 && is_packed(files[0])) {
    auto corpus = open(files[0]);
    require(corpus->tokenizer() == tokenizer.fingerprint(), knob, ": ", files[0].string(), ": was made with the tokenizer ", corpus->tokenizer(),
            ", and data.tokenizer is ", tokenizer.fingerprint(), "; set data.tokenizer to that one, or make the file again with tessera tokenize");
    return corpus;
  }
  for (const auto& file : files) {
    require(!is_packed(file), knob, ": ", file.string(), ": a packed corpus stands alone, and here are ", files.size(),
            " files; name it alone, or name the texts it was made from");
  }
  const std::string content = content_hash(files, tokenizer, knob);
  const std::filesystem::path path = cache_dir / (short_name(files[0]) + "-" + content + ".bin");
  for (;;) {
    std::string damage;
    if (auto corpus = open_cached(path, content, damage)) return corpus;
    PartialFile file(path, kCacheKnob);
    if (!file.held()) continue;
    // Nobody writes now, so what is there is finished by now, or damaged for good.
    damage.clear();
    if (auto corpus = open_cached(path, content, damage)) return corpus;
    if (!damage.empty()) log().warn("the cached corpus is rebuilt: {}", damage);
    pack(files, tokenizer, CorpusWriter(file.partial(), tokenizer, content, kCacheKnob), threads, knob);
    file.commit();
    return open(path);
  }
}

std::shared_ptr<const Corpus> Corpus::build(const Files& files, const Tokenizer& tokenizer, const std::filesystem::path& out, int threads,
                                            const std::string& knob) {
  require(!files.empty(), "tokenize: there is no text to pack; name at least one");
  const auto place = output_place(out, kOutputKnob);
  const std::string content = content_hash(files, tokenizer, knob);
  for (;;) {
    check_leftover(place.string() + ".partial");
    PartialFile file(place, kOutputKnob);
    if (!file.held()) continue;
    pack(files, tokenizer, CorpusWriter(file.partial(), tokenizer, content, kOutputKnob), threads, knob);
    file.commit();
    return open(out);
  }
}

std::shared_ptr<const Corpus> Corpus::open(const std::filesystem::path& file) {
  return std::shared_ptr<const Corpus>(new Corpus(file, std::make_unique<MappedFile>(file)));
}

Corpus::Corpus(std::filesystem::path path, std::unique_ptr<MappedFile> file) : path_(std::move(path)), file_(std::move(file)) {
  const CorpusHeader header = check_corpus(path_, file_->bytes());
  tokenizer_ = header.tokenizer;
  content_ = header.content;
  tokens_ = static_cast<int64_t>(header.tokens);
  vocab_size_ = static_cast<int64_t>(header.vocab_size);
  text_bytes_ = static_cast<int64_t>(header.text_bytes);
  piece_bytes_ = static_cast<int64_t>(header.piece_bytes);
  id_bytes_ = header.id_bytes;
  const std::byte* payload = file_->bytes().data() + sizeof header;
  token_bytes_ = reinterpret_cast<const uint32_t*>(payload);
  ids_ = payload + header.vocab_size * sizeof(uint32_t);
}

Corpus::~Corpus() = default;

void Corpus::read(int64_t first, int64_t count, int64_t* out) const {
  invariant(first >= 0 && count >= 0 && first + count <= tokens_, "ids ", first, " to ", first + count, " of a corpus of ", tokens_);
  const auto widen = [&](const auto* ids) { std::copy(ids + first, ids + first + count, out); };
  id_bytes_ == 2 ? widen(reinterpret_cast<const uint16_t*>(ids_)) : widen(reinterpret_cast<const uint32_t*>(ids_));
}

void Corpus::read_ahead(int64_t first, int64_t count) const {
  const auto offset = static_cast<size_t>(ids_ - file_->bytes().data());
  file_->read_ahead(offset + static_cast<size_t>(first * id_bytes_), static_cast<size_t>(count * id_bytes_));
}

double Corpus::bytes(int64_t first, int64_t count) const {
  std::vector<int64_t> ids(std::min<int64_t>(count, 1 << 16));
  int64_t sum = 0;
  for (int64_t done = 0; done < count;) {
    const int64_t n = std::min<int64_t>(count - done, static_cast<int64_t>(ids.size()));
    read(first + done, n, ids.data());
    for (int64_t i = 0; i < n; ++i) sum += token_bytes_[ids[i]];
    done += n;
  }
  return piece_bytes_ > 0 ? static_cast<double>(sum) * (static_cast<double>(text_bytes_) / static_cast<double>(piece_bytes_)) : 0;
}

double bits_per_byte(double loss_sum_nats, double bytes) { return loss_sum_nats / std::numbers::ln2 / bytes; }

}  // namespace tessera::data
