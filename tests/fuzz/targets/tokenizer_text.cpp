#include <fstream>
#include <iterator>
#include <memory>

#include "tessera/data/tokenizer.h"
#include "tests/fuzz/target.h"

namespace {

using tessera::data::Tokenizer;

/// `byte`, and the model that the corpus of tokenizer_model holds: it has byte pieces, so any text comes back.
const std::vector<std::unique_ptr<Tokenizer>>& tokenizers() {
  static const auto all = [] {
    std::vector<std::unique_ptr<Tokenizer>> loaded;
    loaded.push_back(Tokenizer::load("byte"));
#ifdef TESSERA_WITH_SENTENCEPIECE
    loaded.push_back(Tokenizer::load(TESSERA_FUZZ_CORPORA "/tokenizer_model/tiny.model"));
#endif
    return loaded;
  }();
  return all;
}

}  // namespace

/// Any bytes are encoded and decoded to themselves, whole or in parts.
TESSERA_FUZZ_TARGET(tokenizer_text) {
  for (const auto& tokenizer : tokenizers()) {
    const auto ids = tokenizer->encode(input);
    for (const int32_t id : ids) tessera::fuzz::expect(id >= 0 && id < tokenizer->vocab_size(), "id ", id, " of ", tokenizer->vocab_size());
    tessera::fuzz::expect(tokenizer->decode(ids) == input, tokenizer->fingerprint(), " does not give the text back");
    if (input.empty()) continue;
    const size_t cut = tokenizer->boundary(input, input.size() / 2);
    std::vector<int32_t> parts;
    const auto encoder = tokenizer->encoder();
    encoder->append(input.substr(0, cut), true, parts);
    encoder->append(input.substr(cut), false, parts);
    tessera::fuzz::expect(parts == ids, tokenizer->fingerprint(), " gives other ids when the text is cut at ", cut);
  }
}
