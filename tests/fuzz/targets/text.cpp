#include "tessera/data/text.h"

#include "tests/fuzz/target.h"

/// A plain text is its bytes, unless it begins as none does. A .gz is read block by block, so that its memory is a block's however much it unfolds to.
TESSERA_FUZZ_TARGET(text) {
  using namespace tessera;
  const auto plain = fuzz::scratch_file("text.txt", input);
  fuzz::accepts(plain.string(), [&] { fuzz::expect(data::read_text(plain) == input, "a plain text is read as another"); });

  const auto packed = fuzz::scratch_file("text.txt.gz", input);
  fuzz::accepts(packed.string(), [&] {
    data::TextReader reader(packed);
    constexpr size_t block = 1 << 16;
    std::string text;
    for (int blocks = 0; blocks < 256; ++blocks, text.clear()) {
      const size_t bytes = reader.read(text, block);
      fuzz::expect(bytes == text.size() && bytes <= block, "a read of ", bytes, " bytes gave ", text.size());
      if (bytes == 0) break;
    }
  });
}
