#pragma once

#include <array>

#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// A byte is its value: vocabulary 256, nothing added, any cut possible.
class ByteTokenizer : public Tokenizer {
 public:
  ByteTokenizer();
  int64_t vocab_size() const override { return 256; }
  std::string decode(std::span<const int32_t> ids) const override;
  std::optional<int32_t> bos() const override { return std::nullopt; }
  std::optional<int32_t> eos() const override { return std::nullopt; }
  const std::string& fingerprint() const override { return fingerprint_; }
  std::span<const uint32_t> token_bytes() const override { return token_bytes_; }
  size_t boundary(std::string_view text, size_t from) const override;
  std::unique_ptr<Encoder> encoder() const override;

 private:
  std::string fingerprint_ = "byte";
  std::array<uint32_t, 256> token_bytes_;
};

}  // namespace tessera::data
