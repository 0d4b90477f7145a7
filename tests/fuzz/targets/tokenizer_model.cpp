#include <numeric>
#include <vector>

#include "tessera/data/tokenizer.h"
#include "tests/fuzz/target.h"

/// A SentencePiece model: one that loads encodes within its vocabulary, and decodes what it encoded.
TESSERA_FUZZ_TARGET(tokenizer_model) {
  using namespace tessera;
  const auto path = fuzz::scratch_file("tiny.model", input);
  std::unique_ptr<data::Tokenizer> tokenizer;
  if (!fuzz::accepts(path.string(), [&] { tokenizer = data::Tokenizer::load(path.string()); })) return;
  const int64_t size = tokenizer->vocab_size();
  for (const auto bytes : {tokenizer->token_bytes(), tokenizer->first_token_bytes()}) {
    fuzz::expect(static_cast<int64_t>(bytes.size()) == size, "bytes of text of ", bytes.size(), " ids, there are ", size);
  }
  fuzz::accepts("", [&] {
    for (const std::string_view text : {"", "mira tolu\n sano  velu", "caf\xc3\xa9 \xe2\x96\x81 \xf0\x9f\x8c\xb5", "\xff\xfe\x80"}) {
      const auto ids = tokenizer->encode(text);
      for (const int32_t id : ids) fuzz::expect(id >= 0 && id < size, "id ", id, " of a vocabulary of ", size);
      tokenizer->decode(ids);
      for (size_t at = 0; at < text.size();) {
        const size_t next = tokenizer->boundary(text, at);
        fuzz::expect(next > at && next <= text.size(), "a boundary at ", next, " behind ", at);
        at = next;
      }
    }
    if (const auto eos = tokenizer->eos()) fuzz::expect(*eos >= 0 && *eos < size, "an end of text ", *eos, " outside of the vocabulary of ", size);
  });
}
