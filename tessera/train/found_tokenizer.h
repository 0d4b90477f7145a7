#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/manifest.h"
#include "tessera/config/config.h"
#include "tessera/data/tokenizer.h"

/// How text becomes ids, where a configuration leaves that to a Hugging Face folder or to a checkpoint.
namespace tessera {

struct FoundTokenizer {
  std::unique_ptr<data::Tokenizer> tokenizer;
  bool bos = false;                  ///< its beginning-of-text id comes in front of each document, and of a prompt
  std::vector<std::string> remarks;  ///< to be said aloud once: what was taken where nobody named it, or is another than the model was trained with
};

/// What messages call the two.
struct TokenizerKnobs {
  std::string folder = "model.from_hf", tokenizer = "data.tokenizer";
};

/// Where nobody named a tokenizer, that of model.from_hf is taken: ids mean nothing by another.
void take_folder_tokenizer(Config& config);

/// What stands for the data in the agreement of a checkpoint; an empty object where it holds no such.
nlohmann::json data_identity(const checkpoint::Manifest& manifest);

/// Where a text that is made ends.
struct TextEnds {
  std::set<int64_t> ids;             ///< behind any of them
  std::vector<std::string> remarks;  ///< to be said aloud once
};

/// The tokenizer's end-of-text id, and what the folder of model.from_hf calls ends, unless it brings another tokenizer, whose ids stand for other text. The
/// folder of a run (`saved`: its checkpoint) may be gone by now, or damaged, and says nothing then. Throws ConfigError.
TextEnds text_ends(const Config& config, const data::Tokenizer& tokenizer, const checkpoint::Manifest* saved);

/// Opens data.tokenizer, or `named` where it is not empty. Whether its beginning-of-text id comes in front of documents, data.bos says; where it does not,
/// `saved`, the checkpoint that is read or gone on from (null: none), or else the folder of model.from_hf. Throws ConfigError.
FoundTokenizer open_tokenizer(const Config& config, const checkpoint::Manifest* saved, const TokenizerKnobs& knobs = {}, const std::string& named = "");

}  // namespace tessera
