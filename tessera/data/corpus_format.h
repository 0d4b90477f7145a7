#pragma once

#include <bit>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/core/hash.h"
#include "tessera/data/documents.h"
#include "tessera/data/tokenizer.h"

/// The packed corpus file: header | bytes of text of each id, uint32 [vocab_size] | the same of one that a text begins with, uint32 [vocab_size] | ids, uint16
/// or uint32 [tokens] | the id behind each document, uint64 [documents] | hash of each block of what stands between the header and here, uint64 [blocks].
/// Little-endian; every byte is covered by some hash, so damage is found, and placed within a block.
namespace tessera::data {

static_assert(std::endian::native == std::endian::little, "the packed corpus is little-endian");

inline constexpr int64_t corpus_block_bytes = 1 << 20;
inline constexpr uint32_t corpus_version = 3;

struct CorpusHeader {
  char magic[8] = {'T', 'E', 'S', 'S', 'C', 'O', 'R', 'P'};
  uint32_t version = corpus_version;
  uint32_t id_bytes = 2;      ///< 2 where all ids of the tokenizer fit, else 4
  uint64_t tokens = 0;        ///< ids
  uint64_t vocab_size = 0;    ///< of the tokenizer
  uint64_t text_bytes = 0;    ///< of all sources, uncompressed
  uint64_t piece_bytes = 0;   ///< sum of the ids' bytes of text: text_bytes where the tokenizer is lossless
  uint64_t documents = 0;     ///< that are told apart, or files where they are not: what was encoded by itself
  uint32_t documents_as = 0;  ///< what a document is: data.documents, by number
  uint32_t bos = 0;           ///< 1: each document, or file where they are not told apart, begins with the beginning-of-text id
  char tokenizer[64] = {};    ///< Tokenizer::fingerprint, zero-terminated
  char content[24] = {};      ///< hash of the sources and the tokenizer, zero-terminated
  uint64_t blocks_hash = 0;   ///< of the block hashes
  uint64_t header_hash = 0;   ///< of all fields above

  uint64_t payload_bytes() const { return ids_end() + documents * sizeof(uint64_t); }
  uint64_t ids_begin() const { return 2 * vocab_size * sizeof(uint32_t); }  ///< behind the header
  uint64_t ids_end() const { return ids_begin() + tokens * id_bytes; }      ///< behind the header
  uint64_t blocks() const { return (payload_bytes() + corpus_block_bytes - 1) / corpus_block_bytes; }
  uint64_t file_bytes() const { return sizeof(CorpusHeader) + payload_bytes() + blocks() * sizeof(uint64_t); }
  uint64_t hash() const { return hash_bytes(this, offsetof(CorpusHeader, header_hash)); }
};
static_assert(sizeof(CorpusHeader) == 168 && std::is_trivially_copyable_v<CorpusHeader>);

/// Checks every byte of the packed file `file`, mapped at `data`. Throws ConfigError with the file and the offset of the damage.
CorpusHeader check_corpus(const std::filesystem::path& file, std::span<const std::byte> data);

/// The id behind document `document`, of a file that has been checked or that holds as much as its header says.
uint64_t document_end(std::span<const std::byte> data, const CorpusHeader& header, uint64_t document);

/// Whether `begin`, the first bytes of a file, are those of a packed one, finished or not: its mark, or the room that is kept for it. So is an empty file.
bool begins_corpus(std::string_view begin);

/// Writes a packed file front to back; the header comes last, so an unfinished file never passes for a corpus.
class CorpusWriter {
 public:
  /// Starts the file `path` anew. Throws ConfigError where it cannot be written, naming the `knob` that says where.
  CorpusWriter(const std::filesystem::path& path, const Tokenizer& tokenizer, const std::string& content, const std::string& knob,
               Documents documents = Documents::None, bool bos = false);

  void add(std::span<const int32_t> ids);
  /// The next id that is added begins a text, behind the beginning-of-text id if there is one.
  void begin_text() { begins_text_ = true; }
  void end_document() { document_ends_.push_back(header_.tokens); }  ///< with what has been added
  void add_text_bytes(int64_t bytes) { header_.text_bytes += static_cast<uint64_t>(bytes); }
  /// Writes what remains. Throws ConfigError where the disk takes no more.
  void finish();

 private:
  void write(const void* data, size_t bytes);
  /// Behind write(), without a hash.
  void put(const void* data, size_t bytes);
  void note_failure();

  std::filesystem::path path_;
  std::string knob_;
  std::ofstream out_;
  int reason_ = 0;  ///< of the first failure, an errno
  CorpusHeader header_;
  std::span<const uint32_t> token_bytes_, first_token_bytes_;
  bool begins_text_ = false;
  Hasher block_;
  int64_t block_fill_ = 0;
  std::vector<uint64_t> document_ends_, block_hashes_;
  std::vector<std::byte> narrow_;
};

}  // namespace tessera::data
