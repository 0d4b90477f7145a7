#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/group.h"
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

/// The file of the tokenizer that the folder of model.from_hf brings, where it is another than `tokenizer`: tokenizer.model of another content, or, where there
/// is none, a vocabulary as JSON in which a piece has another id. Nothing where the folder brings none, or it cannot be read; but whatever it brings, bytes are
/// another.
std::optional<std::filesystem::path> folders_other_tokenizer(const Config& config, const data::Tokenizer& tokenizer);
/// Of a tokenizer that is gone, of which the fingerprint is known alone: a vocabulary as JSON, against which it cannot be held, is another.
std::optional<std::filesystem::path> folders_other_tokenizer(const Config& config, const std::string& fingerprint);

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

/// Those of rank 0, for all: hosts may have another folder each, or none, and ranks that took other ends would wait for each other. Collective. Traffic: as of
/// checkpoint::gather_json, some bytes a rank.
void take_ends_of_rank_0(TextEnds& ends, const comm::Group& group);

/// Opens data.tokenizer, or `named` where it is not empty. Whether its beginning-of-text id comes in front of documents, data.bos says; where it does not,
/// `saved`, the checkpoint that is read or gone on from (null: none), or else the folder of model.from_hf. Throws ConfigError.
FoundTokenizer open_tokenizer(const Config& config, const checkpoint::Manifest* saved, const TokenizerKnobs& knobs = {}, const std::string& named = "");

}  // namespace tessera
