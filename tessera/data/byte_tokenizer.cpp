#include "tessera/data/byte_tokenizer.h"

#include <algorithm>

#include "tessera/core/error.h"

namespace tessera::data {
namespace {

class ByteEncoder : public Encoder {
 public:
  void append(std::string_view part, bool, std::vector<int32_t>& ids, int64_t) override {
    const size_t before = ids.size();
    ids.resize(before + part.size());
    std::transform(part.begin(), part.end(), ids.begin() + before, [](char c) { return static_cast<unsigned char>(c); });
  }
};

}  // namespace

ByteTokenizer::ByteTokenizer() { token_bytes_.fill(1); }

std::string ByteTokenizer::decode(std::span<const int32_t> ids) const {
  std::string text(ids.size(), '\0');
  for (size_t i = 0; i < ids.size(); ++i) {
    require(ids[i] >= 0 && ids[i] < 256, "tokenizer byte: id ", ids[i], " is outside its vocabulary of 256");
    text[i] = static_cast<char>(ids[i]);
  }
  return text;
}

size_t ByteTokenizer::boundary(std::string_view text, size_t from) const { return std::min(from + 1, text.size()); }

std::unique_ptr<Encoder> ByteTokenizer::encoder() const { return std::make_unique<ByteEncoder>(); }

}  // namespace tessera::data
