#include "tessera/data/corpus_format.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include "tessera/core/error.h"
#include "tessera/core/system_reason.h"

// One hash of the whole file would tell that it is damaged; hashes of blocks tell where, and a block is still in the cache when its ids are compared with the
// vocabulary. A hash proves only that nothing has changed since: sizes and ids are bounded as well, since they are used as lengths and as rows of tables.

namespace tessera::data {

namespace {

/// The first id from `begin` to `end` (offsets behind the header) that the vocabulary does not hold, as an offset; `end` where there is none.
template <class Id>
uint64_t find_outside(const std::byte* payload, uint64_t begin, uint64_t end, uint64_t vocab_size) {
  const Id* const ids = reinterpret_cast<const Id*>(payload + begin);
  const uint64_t count = (end - begin) / sizeof(Id);
  Id largest = 0;
  for (uint64_t i = 0; i < count; ++i) largest = std::max(largest, ids[i]);  // a loop without a way out becomes vector code
  if (count == 0 || largest < vocab_size) return end;
  return begin + sizeof(Id) * static_cast<uint64_t>(std::find_if(ids, ids + count, [&](Id id) { return id >= vocab_size; }) - ids);
}

}  // namespace

CorpusHeader check_corpus(const std::filesystem::path& file, std::span<const std::byte> data) {
  const std::string name = file.string();
  const std::string way_out = "; make it again with tessera tokenize, or name the texts themselves in data.files";
  require(data.size() >= sizeof(CorpusHeader), name, ": truncated at offset ", data.size(), ": a packed corpus begins with ", sizeof(CorpusHeader),
          " bytes of header", way_out);
  CorpusHeader header;
  std::memcpy(&header, data.data(), sizeof header);
  const CorpusHeader fresh;
  require(std::memcmp(header.magic, fresh.magic, sizeof fresh.magic) == 0, name, ": is no packed corpus: offset 0 does not hold its mark", way_out);
  require(header.version == fresh.version, name, ": is a packed corpus of version ", header.version, "; this program reads version ", fresh.version, way_out);
  require(header.hash() == header.header_hash && (header.id_bytes == 2 || header.id_bytes == 4), name, ": damaged header at offset 0", way_out);
  // A right hash proves that nothing was damaged, not that it was ever right: without these bounds the products below could leave 64 bits.
  constexpr uint64_t most = std::numeric_limits<int64_t>::max();
  const bool ends = header.tokenizer[sizeof header.tokenizer - 1] == 0 && header.content[sizeof header.content - 1] == 0;
  require(ends && header.text_bytes <= most && header.piece_bytes <= most && header.documents_as <= static_cast<uint32_t>(Documents::Lines) && header.bos <= 1,
          name, ": impossible header at offset 0", way_out);
  const uint64_t all = data.size();
  require(header.vocab_size <= all / sizeof(uint32_t) && header.tokens <= all / header.id_bytes && header.documents <= all / sizeof(uint64_t), name,
          ": truncated at offset ", data.size(), ": its header says ", header.tokens, " ids of a vocabulary of ", header.vocab_size, way_out);
  require(data.size() == header.file_bytes(), name, data.size() < header.file_bytes() ? ": truncated at offset " : ": holds more than it should from offset ",
          std::min<uint64_t>(data.size(), header.file_bytes()), ": its header says ", header.file_bytes(), " bytes", way_out);

  const std::byte* payload = data.data() + sizeof header;
  const std::byte* hashes = payload + header.payload_bytes();
  require(hash_bytes(hashes, header.blocks() * sizeof(uint64_t)) == header.blocks_hash, name, ": damaged at offset ", sizeof header + header.payload_bytes(),
          " or behind it", way_out);
  for (uint64_t b = 0; b < header.blocks(); ++b) {
    const uint64_t begin = b * corpus_block_bytes, size = std::min<uint64_t>(corpus_block_bytes, header.payload_bytes() - begin);
    uint64_t expected;
    std::memcpy(&expected, hashes + b * sizeof expected, sizeof expected);
    require(hash_bytes(payload + begin, size) == expected, name, ": damaged between offsets ", sizeof header + begin, " and ", sizeof header + begin + size,
            way_out);
    // While the block is in the cache. Ids are looked up in tables of vocab_size rows.
    const uint64_t first_id = std::max(begin, header.ids_begin()), end = std::max(std::min(begin + size, header.ids_end()), first_id);
    const uint64_t outside = header.id_bytes == 2 ? find_outside<uint16_t>(payload, first_id, end, header.vocab_size)
                                                  : find_outside<uint32_t>(payload, first_id, end, header.vocab_size);
    require(outside == end, name, ": the id at offset ", sizeof header + outside, " is outside of the vocabulary of ", header.vocab_size, way_out);
  }
  return header;
}

uint64_t document_end(std::span<const std::byte> data, const CorpusHeader& header, uint64_t document) {
  uint64_t end;  // ids of two bytes leave the list where it falls
  std::memcpy(&end, data.data() + sizeof header + header.ids_end() + document * sizeof end, sizeof end);
  return end;
}

bool begins_corpus(std::string_view begin) {
  const CorpusHeader fresh;
  const std::string_view mark(fresh.magic, sizeof fresh.magic);
  begin = begin.substr(0, mark.size());
  return mark.starts_with(begin) || begin.find_first_not_of('\0') == std::string_view::npos;
}

CorpusWriter::CorpusWriter(const std::filesystem::path& path, const Tokenizer& tokenizer, const std::string& content, const std::string& knob,
                           Documents documents, bool bos)
    : path_(path),
      knob_(knob),
      out_(path, std::ios::binary | std::ios::trunc),
      token_bytes_(tokenizer.token_bytes()),
      first_token_bytes_(tokenizer.first_token_bytes()) {
  if (!out_.good()) fail_to_write(path.string() + ": cannot be written", errno, "choose another " + knob);
  invariant(tokenizer.fingerprint().size() < sizeof header_.tokenizer && content.size() < sizeof header_.content, "fingerprints outgrew the corpus header");
  header_.vocab_size = static_cast<uint64_t>(tokenizer.vocab_size());
  header_.id_bytes = header_.vocab_size <= 1 << 16 ? 2 : 4;
  header_.documents_as = static_cast<uint32_t>(documents);
  header_.bos = bos ? 1 : 0;
  std::ranges::copy(tokenizer.fingerprint(), header_.tokenizer);
  std::ranges::copy(content, header_.content);
  const std::vector<char> room(sizeof(CorpusHeader));
  put(room.data(), room.size());
  write(token_bytes_.data(), token_bytes_.size_bytes());
  write(first_token_bytes_.data(), first_token_bytes_.size_bytes());
}

void CorpusWriter::add(std::span<const int32_t> ids) {
  for (int32_t id : ids) header_.piece_bytes += (std::exchange(begins_text_, false) ? first_token_bytes_ : token_bytes_)[id];
  header_.tokens += ids.size();
  if (header_.id_bytes == 4) return write(ids.data(), ids.size_bytes());
  narrow_.resize(ids.size() * sizeof(uint16_t));
  auto* narrow = reinterpret_cast<uint16_t*>(narrow_.data());
  std::ranges::transform(ids, narrow, [](int32_t id) { return static_cast<uint16_t>(id); });
  write(narrow, narrow_.size());
}

void CorpusWriter::put(const void* data, size_t bytes) {
  errno = 0;
  out_.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  note_failure();
}

void CorpusWriter::note_failure() {
  if (!out_.good() && reason_ == 0) reason_ = errno;
}

void CorpusWriter::write(const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  put(at, bytes);
  while (bytes > 0) {
    const size_t n = std::min(bytes, static_cast<size_t>(corpus_block_bytes - block_fill_));
    block_.update(at, n);
    at += n;
    bytes -= n;
    block_fill_ += static_cast<int64_t>(n);
    if (block_fill_ == corpus_block_bytes) {
      block_hashes_.push_back(block_.value());
      block_ = Hasher();
      block_fill_ = 0;
    }
  }
}

void CorpusWriter::finish() {
  header_.documents = document_ends_.size();
  write(document_ends_.data(), document_ends_.size() * sizeof(uint64_t));
  if (block_fill_ > 0) block_hashes_.push_back(block_.value());
  const size_t bytes = block_hashes_.size() * sizeof(uint64_t);
  put(block_hashes_.data(), bytes);
  header_.blocks_hash = hash_bytes(block_hashes_.data(), bytes);
  header_.header_hash = header_.hash();
  errno = 0;
  out_.seekp(0);  // writes what is still held back
  note_failure();
  put(&header_, sizeof header_);
  errno = 0;
  out_.close();
  note_failure();
  if (!out_.good()) fail_to_write(path_.string() + ": cannot be written", reason_, "choose another " + knob_);
}

}  // namespace tessera::data
