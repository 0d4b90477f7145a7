#include "tessera/data/corpus.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <iomanip>
#include <numbers>
#include <sstream>
#include <system_error>
#include <type_traits>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/hash.h"
#include "tessera/core/log.h"
#include "tessera/data/corpus_format.h"
#include "tessera/data/mapped_file.h"
#include "tessera/data/partial_file.h"
#include "tessera/data/text.h"

// Encoding takes longer than many runs, so it is done once, into a file that is mapped: opening costs a check, and ranks of a machine share its pages. The file
// is named by a hash of texts and tokenizer and can be damaged, but not out of date: a text that changes while it is packed is packed again. Of several
// processes that find none the one that gets the lock builds it, and what a killed one left is overwritten. A text passes in blocks, cut where the tokenizer
// says that a cut changes no id.

namespace tessera::data {
namespace {

using Files = std::vector<std::filesystem::path>;

constexpr const char* kCacheKnob = "data.cache_dir";
constexpr const char* kOutputKnob = "output";

/// Of what gives other ids, or windows, for the same files.
constexpr int kContentVersion = 2;

/// Hash of what the files hold (as stored, compressed or not), in order, and of what turns it into ids.
std::string content_hash(const Files& files, const Tokenizer& tokenizer, Documents documents, bool bos, const std::string& knob) {
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
  std::string rest = tokenizer.fingerprint() + " v" + std::to_string(kContentVersion);
  if (documents != Documents::None) rest += detail::concat(" ", to_string(documents));
  if (bos) rest += " bos";
  return hasher.update(rest.data(), rest.size()).hex();
}

/// Which files lie under these names, and when they were last written: by what the system notes, which a program cannot set back.
std::vector<std::array<int64_t, 5>> states_of(const Files& files) {
  std::vector<std::array<int64_t, 5>> states;
  for (const auto& file : files) {
    const int descriptor = ::open(file.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a network's file system asks its server at that
    struct stat status{};
    const bool known = descriptor >= 0 && ::fstat(descriptor, &status) == 0;
    if (descriptor >= 0) ::close(descriptor);
    if (!known) status = {};
    states.push_back({static_cast<int64_t>(status.st_dev), static_cast<int64_t>(status.st_ino), status.st_size, status.st_ctim.tv_sec, status.st_ctim.tv_nsec});
  }
  return states;
}

/// As messages name them: "a.txt", "a.txt, or one beside it,".
std::string first_of(const Files& files) { return files[0].string() + (files.size() > 1 ? ", or one beside it," : ""); }

/// The last place, or nearly, where `text` may be cut although it goes on; 0 where there is none.
size_t last_boundary(const Tokenizer& tokenizer, std::string_view text) {
  for (size_t back = 64 << 10;; back *= 2) {
    const size_t from = text.size() > back ? text.size() - back : 0;
    const size_t cut = tokenizer.boundary(text, from);
    if (cut < text.size()) return cut;
    if (from == 0) return 0;
  }
}

/// Encodes texts into a writer, and tells it where documents end.
class Packer {
 public:
  Packer(const Tokenizer& tokenizer, Documents documents, bool bos, CorpusWriter& writer, int threads, const std::string& knob)
      : tokenizer_(tokenizer), documents_(documents), bos_(bos), writer_(writer), knob_(knob), encoder_(tokenizer, threads) {}

  void add(const Files& files) {
    for (size_t i = 0; i < files.size(); ++i) {
      const bool in_parts = documents_ == Documents::Lines || documents_ == Documents::Paragraphs;
      const int64_t bytes = in_parts ? add_parts(files[i]) : add_whole(files[i]);
      require(bytes > 0, knob_, ": ", files[i].string(), ": holds no text and gives 0 windows; name a text");
      writer_.add_text_bytes(bytes);
      if (documents_ == Documents::None) end_document(/*separate=*/i + 1 < files.size());
    }
  }

 private:
  static constexpr size_t kBlockBytes = 16 << 20;

  /// Block by block; returns its bytes of text.
  int64_t add_whole(const std::filesystem::path& file) {
    TextReader reader(file, knob_);
    std::string text;
    int64_t done = 0;
    begin_document();
    for (bool more = true; more;) {
      more = reader.read(text, kBlockBytes) > 0;
      const size_t end = more ? last_boundary(tokenizer_, text) : text.size();
      encode(file, std::string_view(text).substr(0, end), done == 0, done);
      writer_.add(ids_);
      text.erase(0, end);
      done += static_cast<int64_t>(end);
    }
    if (documents_ == Documents::Files) end_document();
    return done;
  }

  /// Each document by itself, so that its ids do not depend on what lies beside it; returns their bytes of text.
  int64_t add_parts(const std::filesystem::path& file) {
    TextReader reader(file, knob_);
    std::string text;
    int64_t done = 0, offset = 0;
    for (bool more = true; more;) {
      more = reader.read(text, kBlockBytes) > 0;
      size_t next = 0;
      for (;;) {
        const std::string_view rest = std::string_view(text).substr(next);
        const auto [begin, end] = find_document(rest, documents_, /*whole=*/!more);
        if (end == 0) break;
        begin_document();
        encode(file, rest.substr(begin, end - begin), true, offset + static_cast<int64_t>(next + begin));
        writer_.add(ids_);
        end_document();
        done += static_cast<int64_t>(end - begin);
        next += end;
      }
      text.erase(0, next);
      offset += static_cast<int64_t>(next);
    }
    return done;
  }

  void encode(const std::filesystem::path& file, std::string_view text, bool first, int64_t offset) {
    ids_.clear();
    try {
      encoder_.append(text, first, ids_, offset);
    } catch (const ConfigError& error) {
      throw ConfigError(knob_ + ": " + file.string() + ": " + error.what());
    }
  }

  void begin_document() {
    if (bos_) writer_.add(std::array{tokenizer_.bos().value()});
    writer_.begin_text();
  }

  void end_document(bool separate = true) {
    if (separate && tokenizer_.eos()) writer_.add(std::array{*tokenizer_.eos()});
    writer_.end_document();
  }

  const Tokenizer& tokenizer_;
  Documents documents_;
  bool bos_;
  CorpusWriter& writer_;
  const std::string& knob_;
  ParallelEncoder encoder_;
  std::vector<int32_t> ids_;
};

void pack(const Files& files, const Tokenizer& tokenizer, Documents documents, bool bos, CorpusWriter writer, int threads, const std::string& knob) {
  Packer(tokenizer, documents, bos, writer, threads, knob).add(files);
  writer.finish();
}

/// The name that whoever packs holds may be that of a file which a killed process left, and that is taken; anything else is somebody's.
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
          ": is no packed text, and whoever packs the output holds that name until it is whole; move it elsewhere, or choose another output");
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

/// Whatever it is called. A pipe would wait for who writes it.
bool has_mark(const std::filesystem::path& file) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(file, ignored)) return false;
  const CorpusHeader fresh;
  char begin[sizeof fresh.magic] = {};
  std::ifstream in(file, std::ios::binary);
  return in.read(begin, sizeof begin) && std::memcmp(begin, fresh.magic, sizeof begin) == 0;
}

}  // namespace

std::shared_ptr<const Corpus> Corpus::open_or_build(const Files& files, const Tokenizer& tokenizer, const std::filesystem::path& cache_dir, int threads,
                                                    const std::string& knob, Documents documents, bool bos) {
  require(!files.empty(), knob, " = []: there is nothing to train on; name at least one text");
  if (files.size() == 1 && is_packed(files[0])) {
    auto corpus = open(files[0]);
    require(corpus->tokenizer() == tokenizer.fingerprint(), knob, ": ", files[0].string(), ": was made with the tokenizer ", corpus->tokenizer(),
            ", and data.tokenizer is ", tokenizer.fingerprint(), "; set data.tokenizer to that one, or make the file again with tessera tokenize");
    require(corpus->documents() == documents, "data.documents = ", to_string(documents), ": ", files[0].string(),
            " was packed with documents = ", to_string(corpus->documents()),
            "; set data.documents to that, or make the file again with tessera tokenize --documents ", to_string(documents));
    require(corpus->bos() == bos, "data.bos = ", bos ? "true" : "false",
            " (where it is not set, as the checkpoint or the tokenizer files of model.from_hf say): ", files[0].string(), " was packed ",
            bos ? "without" : "with", " beginning-of-text ids in front of documents; set data.bos = ", bos ? "false" : "true",
            ", or make the file again with tessera tokenize ", bos ? "--bos" : "without --bos");
    return corpus;
  }
  for (const auto& file : files) {
    require(!is_packed(file), knob, ": ", file.string(), ": a packed corpus stands alone, and here are ", files.size(),
            " files; name it alone, or name the texts it was made from");
    require(!has_mark(file), knob, ": ", file.string(), ": is a packed corpus, which is known by its name; rename it to end in .bin");
  }
  for (int changes = 0;;) {
    const auto states = states_of(files);
    const std::string content = content_hash(files, tokenizer, documents, bos, knob);
    // What an earlier build has packed into the cache may be of files that are no text, and would be trained on with nobody reading them again.
    for (const auto& file : files) const TextReader looked_at(file, knob);
    const std::filesystem::path path = cache_dir / (short_name(files[0]) + "-" + content + ".bin");
    std::string damage;
    if (auto corpus = open_cached(path, content, damage)) return corpus;
    PartialFile file(path, kCacheKnob);
    if (!file.held()) continue;
    // Nobody writes now, so what is there is finished by now, or damaged for good.
    damage.clear();
    if (auto corpus = open_cached(path, content, damage)) return corpus;
    if (!damage.empty()) log().warn("the cached corpus is rebuilt: {}", damage);
    pack(files, tokenizer, documents, bos, CorpusWriter(file.partial(), tokenizer, content, kCacheKnob, documents, bos), threads, knob);
    // The ids are those of another text than the name's. The system's clock is coarse, and a change may be taken back: so it is asked both ways.
    const bool changed = states_of(files) != states || content_hash(files, tokenizer, documents, bos, knob) != content;
    if (changed) {
      constexpr int most = 3;
      require(++changes < most, knob, ": ", first_of(files), " changed ", changes, " times while it was packed; begin when whoever writes it is done");
      log().warn("{}: {} changed while it was packed, and is packed again", knob, first_of(files));
      continue;
    }
    // Of another host, which the lock did not reach: it may have it mapped by now.
    if (auto corpus = open_cached(path, content, damage)) return corpus;
    file.commit();
    return open(path);
  }
}

std::shared_ptr<const Corpus> Corpus::build(const Files& files, const Tokenizer& tokenizer, const std::filesystem::path& out, int threads,
                                            const std::string& knob, Documents documents, bool bos) {
  require(!files.empty(), "tokenize: there is no text to pack; name at least one");
  const auto place = output_place(out, kOutputKnob);
  const auto states = states_of(files);
  const std::string content = content_hash(files, tokenizer, documents, bos, knob);
  for (;;) {
    check_leftover(place.string() + ".partial");
    PartialFile file(place, kOutputKnob);
    if (!file.held()) continue;
    pack(files, tokenizer, documents, bos, CorpusWriter(file.partial(), tokenizer, content, kOutputKnob, documents, bos), threads, knob);
    require(states_of(files) == states && content_hash(files, tokenizer, documents, bos, knob) == content, knob, ": ", files[0].string(),
            files.size() > 1 ? ", or one beside it," : "", " changed while it was packed; begin when whoever writes it is done");
    file.commit();
    return open(out);
  }
}

std::shared_ptr<const Corpus> Corpus::open(const std::filesystem::path& file) {
  return std::shared_ptr<const Corpus>(new Corpus(file, std::make_unique<MappedFile>(file)));
}

Corpus::Corpus(std::filesystem::path path, std::unique_ptr<MappedFile> file) : path_(std::move(path)), file_(std::move(file)) {
  seen_ = file_->opened();
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
  first_token_bytes_ = token_bytes_ + header.vocab_size;
  ids_ = payload + header.ids_begin();
  documents_ = static_cast<Documents>(header.documents_as);
  bos_ = header.bos == 1;
  uint64_t last = 0;
  for (uint64_t i = 0; i < header.documents; ++i) {
    const uint64_t end = document_end(file_->bytes(), header, i);
    require(end >= last && end <= header.tokens, path_.string(), ": damaged: document ", i, " ends behind id ", end, " of ", header.tokens,
            ", the one before it behind ", last, "; make the file again with tessera tokenize");
    document_ends_.push_back(static_cast<int64_t>(last = end));
  }
}

Corpus::~Corpus() = default;

std::string Corpus::changed() const {
  const std::lock_guard lock(looking_);
  const MappedFile::State now = file_->state();
  if (!changed_.empty() || now == seen_) return changed_;
  const auto bytes = file_->bytes();
  bool same = now.bytes >= static_cast<int64_t>(bytes.size());  // to read behind its end would end the process
  try {
    same = same && std::string(check_corpus(path_, bytes).content) == content_;
  } catch (const ConfigError&) {
    same = false;
  }
  if (!same) changed_ = path_.string() + ": was written over while it was in use, and no longer holds what was opened";
  seen_ = now;
  return changed_;
}

int64_t Corpus::windows(int64_t seq_len, const std::string& seq_len_knob) const {
  if (documents_ != Documents::None) return packed(seq_len, seq_len_knob)->count();
  return tokens_ > 0 ? (tokens_ - 1) / seq_len : 0;
}

std::shared_ptr<const PackedWindows> Corpus::packed(int64_t seq_len, const std::string& seq_len_knob) const {
  const std::lock_guard lock(packing_);
  auto& windows = packed_[seq_len];
  if (!windows) windows = std::make_shared<PackedWindows>(document_ends_, seq_len, seq_len_knob);
  return windows;
}

std::vector<Piece> Corpus::window(int64_t window, int64_t seq_len) const {
  if (documents_ != Documents::None) return packed(seq_len)->window(window);
  return {{.column = 0, .size = seq_len, .first = window * seq_len}};
}

void Corpus::read(int64_t first, int64_t count, int64_t* out) const {
  invariant(first >= 0 && count >= 0 && first + count <= tokens_, "ids ", first, " to ", first + count, " of a corpus of ", tokens_);
  const auto widen = [&](const auto* ids) { std::copy(ids + first, ids + first + count, out); };
  id_bytes_ == 2 ? widen(reinterpret_cast<const uint16_t*>(ids_)) : widen(reinterpret_cast<const uint32_t*>(ids_));
}

int64_t Corpus::occurrences(int32_t id, int64_t first, int64_t count) const {
  invariant(first >= 0 && count >= 0 && first + count <= tokens_, "ids ", first, " to ", first + count, " of a corpus of ", tokens_);
  const auto in = [&](const auto* ids) { return std::count(ids + first, ids + first + count, static_cast<std::decay_t<decltype(*ids)>>(id)); };
  return id_bytes_ == 2 ? in(reinterpret_cast<const uint16_t*>(ids_)) : in(reinterpret_cast<const uint32_t*>(ids_));
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
  const int64_t end = first + count;
  for (auto i = static_cast<size_t>(std::ranges::upper_bound(document_ends_, first) - document_ends_.begin()); i < document_ends_.size(); ++i) {
    const int64_t begin = text_begin(i);
    if (begin >= end) break;
    if (begin < first || begin >= document_ends_[i]) continue;  // it began before, or holds nothing
    read(begin, 1, ids.data());
    sum += static_cast<int64_t>(first_token_bytes_[ids[0]]) - static_cast<int64_t>(token_bytes_[ids[0]]);
  }
  return piece_bytes_ > 0 ? static_cast<double>(sum) * (static_cast<double>(text_bytes_) / static_cast<double>(piece_bytes_)) : 0;
}

UnknownIds unknown_among_first(const Corpus& corpus, const Tokenizer& tokenizer, int64_t most) {
  UnknownIds found{.ids = std::min(corpus.tokens(), most)};
  if (tokenizer.unknown()) found.unknown = corpus.occurrences(*tokenizer.unknown(), 0, found.ids);
  return found;
}

std::string unknown_remark(const UnknownIds& found, const std::string& which) {
  if (found.unknown == 0) return {};
  const double percent = 100.0 * static_cast<double>(found.unknown) / static_cast<double>(found.ids);
  std::ostringstream share;
  share << std::setprecision(percent < 99 ? 2 : 3) << percent;
  return detail::concat(
      share.str(), "% of ", which, " (", found.unknown, " of ", found.ids,
      ") are the unknown id: text that the tokenizer cannot spell. A model learns and predicts nothing of it, and bits per byte counts it as if "
      "it had been coded; take a tokenizer that spells any text in bytes (tessera tokenize --train makes one), or other text");
}

double bits_per_byte(double loss_sum_nats, double bytes) { return loss_sum_nats / std::numbers::ln2 / bytes; }

}  // namespace tessera::data
