#include "tessera/data/corpus.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tessera/data/corpus_format.h"
#include "tests/fuzz/target.h"

namespace {

using namespace tessera::data;

void read(std::string_view bytes) {
  const auto path = tessera::fuzz::scratch_file("corpus.bin", bytes);
  tessera::fuzz::accepts(path.string(), [&] {
    const auto corpus = Corpus::open(path);
    std::vector<int64_t> ids(static_cast<size_t>(corpus->tokens()));
    corpus->read(0, corpus->tokens(), ids.data());
    for (const int64_t id : ids) tessera::fuzz::expect(id >= 0 && id < corpus->vocab_size(), "id ", id, " of a vocabulary of ", corpus->vocab_size());
    tessera::fuzz::expect(corpus->text_bytes() >= 0 && std::isfinite(corpus->bytes(0, corpus->tokens())), "the text has no size");
    const int64_t long_enough = std::max<int64_t>(2, corpus->tokens());  // for any document
    tessera::fuzz::expect(corpus->windows(long_enough) >= 0 && corpus->tokenizer().size() <= 64 && corpus->content().size() <= 24, "impossible facts");
  });
}

/// The bytes with the hashes that let them past the first checks, as far as there is room for hashes.
std::string with_hashes(std::string bytes) {
  CorpusHeader header;
  if (bytes.size() < sizeof header) return bytes;
  std::memcpy(&header, bytes.data(), sizeof header);
  const uint64_t behind = bytes.size() - sizeof header;
  const uint64_t payload = header.payload_bytes(), hashes = header.blocks() * sizeof(uint64_t);
  if (payload <= behind && hashes <= behind - payload) {
    char* const data = bytes.data() + sizeof header;
    for (uint64_t begin = 0, block = 0; begin < payload; begin += corpus_block_bytes, ++block) {
      const uint64_t hash = tessera::hash_bytes(data + begin, std::min<uint64_t>(corpus_block_bytes, payload - begin));
      std::memcpy(data + payload + block * sizeof hash, &hash, sizeof hash);
    }
    header.blocks_hash = tessera::hash_bytes(data + payload, hashes);
  }
  header.header_hash = header.hash();
  std::memcpy(bytes.data(), &header, sizeof header);
  return bytes;
}

}  // namespace

/// A packed corpus as it is, and with right hashes: a file may be made by hand.
TESSERA_FUZZ_TARGET(corpus) {
  read(input);
  read(with_hashes(std::string(input)));
}
