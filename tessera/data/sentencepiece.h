#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "tessera/data/tokenizer.h"

namespace tessera::data {

/// Loads a SentencePiece model (arXiv:1808.06226). Without the library in the build: ConfigError that says so. Errors name `knob`.
std::unique_ptr<Tokenizer> load_sentencepiece(const std::filesystem::path& file, const std::string& knob);

}  // namespace tessera::data
