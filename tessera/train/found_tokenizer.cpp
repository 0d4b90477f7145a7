#include "tessera/train/found_tokenizer.h"

#include <filesystem>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"

namespace tessera {

namespace {

/// What is to be said of a tokenizer that nobody named.
std::vector<std::string> tokenizer_remarks(const Config& config, const data::Tokenizer& tokenizer, const TokenizerKnobs& knobs) {
  if (config.model.from_hf.empty() || config.given.contains("data.tokenizer")) return {};
  if (config.data.tokenizer != "byte") return {detail::concat(config.data.tokenizer, ": is the tokenizer that is taken; ", knobs.tokenizer, " names another")};
  if (config.model.vocab_size <= tokenizer.vocab_size()) return {};
  return {detail::concat(knobs.folder, " = ", config.model.from_hf, ": brings no tokenizer.model, and the text is read as bytes, ids 0 to ",
                         tokenizer.vocab_size() - 1, " of a vocabulary of ", config.model.vocab_size, "; name its tokenizer with ", knobs.tokenizer,
                         ", unless it was trained on bytes")};
}

bool puts_bos(const Config& config, const checkpoint::Manifest* saved, FoundTokenizer& found) {
  if (config.data.bos) {
    if (*config.data.bos) data::require_bos(*found.tokenizer, "data.bos = true");
    return *config.data.bos;
  }
  const auto bos = found.tokenizer->bos();
  if (!bos) return false;
  if (saved != nullptr) return data_identity(*saved).value("bos", false);  // also one from before there was such a key
  const std::string& folder = config.model.from_hf;
  if (folder.empty() || !checkpoint::hugging_face_adds_bos(folder)) return false;
  found.remarks.push_back(detail::concat((std::filesystem::path(folder) / "tokenizer_config.json").string(), ": puts id ", *bos,
                                         " in front of a text, and so it is in front of each document and prompt here; data.bos = false leaves it out"));
  return true;
}

}  // namespace

void take_folder_tokenizer(Config& config) {
  if (config.model.from_hf.empty() || config.given.contains("data.tokenizer")) return;
  if (const auto own = checkpoint::hugging_face_tokenizer(config.model.from_hf)) config.data.tokenizer = own->string();
}

nlohmann::json data_identity(const checkpoint::Manifest& manifest) {
  const auto identity = manifest.agreement.find("data.files");
  return identity != manifest.agreement.end() && identity->is_object() ? *identity : nlohmann::json::object();
}

FoundTokenizer open_tokenizer(const Config& config, const checkpoint::Manifest* saved, const TokenizerKnobs& knobs, const std::string& named) {
  FoundTokenizer found;
  found.tokenizer = named.empty() ? data::Tokenizer::load(config.data.tokenizer) : data::Tokenizer::load(named, knobs.tokenizer);
  if (named.empty()) found.remarks = tokenizer_remarks(config, *found.tokenizer, knobs);
  data::check_vocabulary(*found.tokenizer, config.model.vocab_size);
  found.bos = puts_bos(config, saved, found);
  return found;
}

}  // namespace tessera
