// Stands in for sentencepiece.cpp and train_tokenizer.cpp in a build without the library.
#ifndef TESSERA_WITH_SENTENCEPIECE

#include "tessera/core/error.h"
#include "tessera/data/sentencepiece.h"

namespace tessera::data {
namespace {

constexpr const char* way_out = "this build has no SentencePiece; install libsentencepiece-dev and build again, or use the tokenizer `byte`";

}  // namespace

std::unique_ptr<Tokenizer> load_sentencepiece(const std::filesystem::path& file, const std::string& knob) {
  throw ConfigError(knob + " = " + file.string() + ": " + way_out);
}

std::filesystem::path train_tokenizer(const std::vector<std::filesystem::path>&, int64_t, const std::filesystem::path&, const TokenizerTraining&) {
  throw ConfigError(std::string("tokenize --train: ") + way_out);
}

}  // namespace tessera::data

#endif
