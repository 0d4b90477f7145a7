#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "tessera/data/documents.h"
#include "tessera/data/mapped_file.h"
#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// Token ids of a text, packed into one memory-mapped file; see corpus_format.h for its layout. Any number of threads may read it. It is what it was as long as
/// nobody writes into that file (changed()); one that takes its place changes nothing.
///
/// Memory: the pages that are read, shared by all processes of the machine.
class Corpus {
 public:
  /// The corpus of `files`, concatenated in order with the tokenizer's eos id between them if it has one, or cut into `documents`, which end with it. With
  /// `bos` each document, or file where they are not told apart, begins with the tokenizer's bos id, which it must have.
  ///
  /// One entry ending in `.bin` is opened as it is, and refused when damaged or made with another tokenizer. Texts are packed into
  /// `cache_dir`/<name of the first file>-<hash of contents and tokenizer>.bin: built on first use (streaming: memory of one block of text, not of the
  /// file; threads 0 = one per core), opened afterwards. A damaged cache is rebuilt, said aloud. Any number of threads and processes may call this at once: one
  /// builds, the others wait. Throws ConfigError where a file is missing, damaged or cannot be encoded, where all are empty, or where the cache cannot be
  /// written; it names `knob`, which gave the files.
  static std::shared_ptr<const Corpus> open_or_build(const std::vector<std::filesystem::path>& files, const Tokenizer& tokenizer,
                                                     const std::filesystem::path& cache_dir, int threads = 0, const std::string& knob = "data.files",
                                                     Documents documents = Documents::None, bool bos = false);

  /// Packs `files` into `out` (through a temporary file and a rename) and opens it. Throws as open_or_build does.
  static std::shared_ptr<const Corpus> build(const std::vector<std::filesystem::path>& files, const Tokenizer& tokenizer, const std::filesystem::path& out,
                                             int threads = 0, const std::string& knob = "data.files", Documents documents = Documents::None, bool bos = false);

  /// Opens a packed file. Every byte is checked against the hashes in it (one pass at memory or disk speed).
  /// Throws ConfigError with the file and the offset of the damage.
  static std::shared_ptr<const Corpus> open(const std::filesystem::path& file);

  ~Corpus();

  const std::filesystem::path& path() const { return path_; }
  int64_t tokens() const { return tokens_; }                   ///< ids, those of beginning and end of text included
  int64_t vocab_size() const { return vocab_size_; }           ///< of the tokenizer that made it
  int64_t text_bytes() const { return text_bytes_; }           ///< bytes of the (uncompressed) text
  const std::string& tokenizer() const { return tokenizer_; }  ///< its Tokenizer::fingerprint()
  const std::string& content() const { return content_; }      ///< hash of the sources and the tokenizer: equal for equal data, whatever its path

  /// What has become of the file where it no longer holds what was opened: "a.bin: was written over while it was in use". Empty: nothing. It costs a question
  /// to the system; where that has noted a change, be it of the file's name or mode, a pass over its bytes.
  std::string changed() const;

  Documents documents() const { return documents_; }  ///< what it was cut into
  bool bos() const { return bos_; }                   ///< whether these, or the files, begin with the tokenizer's beginning-of-text id

  /// Windows of `seq_len` inputs and targets: (tokens - 1) / seq_len, rounded down; of documents, as PackedWindows packs them, who throws where one is longer.
  int64_t windows(int64_t seq_len, const std::string& seq_len_knob = "data.seq_len") const;
  /// What lies in one: of a stream, all columns in one piece.
  std::vector<Piece> window(int64_t window, int64_t seq_len) const;
  /// The windows of a corpus of documents, made once for each length.
  std::shared_ptr<const PackedWindows> packed(int64_t seq_len, const std::string& seq_len_knob = "data.seq_len") const;

  /// Ids first .. first + count - 1, widened to 64 bits, into `out`.
  void read(int64_t first, int64_t count, int64_t* out) const;

  /// How many of ids first .. first + count - 1 are `id`.
  int64_t occurrences(int32_t id, int64_t first, int64_t count) const;

  /// Asks the kernel to have these ids in memory soon; returns at once.
  void read_ahead(int64_t first, int64_t count) const;

  /// Bytes of text that ids first .. first + count - 1 stand for. Exact where the tokenizer is lossless (Tokenizer::decode); else text_bytes() shared out over
  /// the tokens in proportion to their own lengths. A space that the tokenizer puts in front of each document, or file, is none of these bytes.
  double bytes(int64_t first, int64_t count) const;

 private:
  /// Where document `document`, or file, begins: behind its beginning-of-text id.
  int64_t text_begin(size_t document) const { return (document > 0 ? document_ends_[document - 1] : 0) + (bos_ ? 1 : 0); }

  Corpus(std::filesystem::path path, std::unique_ptr<MappedFile> file);

  std::filesystem::path path_;
  std::unique_ptr<MappedFile> file_;
  std::string tokenizer_, content_;
  int64_t tokens_ = 0, vocab_size_ = 0, text_bytes_ = 0, piece_bytes_ = 0;  // piece_bytes: of the ids, as bytes() sums them
  int64_t id_bytes_ = 2;
  const uint32_t* token_bytes_ = nullptr;        // by id
  const uint32_t* first_token_bytes_ = nullptr;  // of one that a document, or file, begins with
  const std::byte* ids_ = nullptr;
  Documents documents_ = Documents::None;
  bool bos_ = false;
  std::vector<int64_t> document_ends_;  // of files where documents are not told apart
  mutable std::mutex looking_;
  mutable MappedFile::State seen_{};  ///< when it last held what was opened
  mutable std::string changed_;       ///< once it does not, it stays so
  mutable std::mutex packing_;
  mutable std::map<int64_t, std::shared_ptr<const PackedWindows>> packed_;  ///< by seq_len
};

/// Ids that were looked at, and how many of them are the tokenizer's unknown one.
struct UnknownIds {
  int64_t unknown = 0, ids = 0;
};

/// Of the first `most` ids of a corpus.
UnknownIds unknown_among_first(const Corpus& corpus, const Tokenizer& tokenizer, int64_t most = std::numeric_limits<int64_t>::max());

/// What is to be said where there are any: the model cannot tell what they stand for, and bits per byte counts all of the text, also what they have lost.
/// `which` names the ids ("the tokens of data.files"). Empty where there are none.
std::string unknown_remark(const UnknownIds& found, const std::string& which);

/// loss in nats, summed over targets that stand for `bytes` bytes of text, as bits per byte: the number compressors are compared by.
double bits_per_byte(double loss_sum_nats, double bytes);

}  // namespace tessera::data
