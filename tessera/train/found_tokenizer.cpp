#include "tessera/train/found_tokenizer.h"

#include <filesystem>
#include <iterator>
#include <optional>
#include <utility>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"

namespace tessera {

namespace {

/// The tokenizer that the folder of model.from_hf brings, where this one is another by content; nothing where it cannot be read.
std::optional<std::filesystem::path> folders_other_tokenizer(const Config& config, const data::Tokenizer& tokenizer) {
  if (config.model.from_hf.empty()) return std::nullopt;
  const auto own = checkpoint::hugging_face_tokenizer(config.model.from_hf);
  if (!own) return std::nullopt;
  try {
    return data::Tokenizer::load(own->string())->fingerprint() == tokenizer.fingerprint() ? std::nullopt : own;
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

/// What is to be said of a tokenizer that nobody named, or that is not the one which the folder brings: a saved configuration names the tokenizer that its run
/// took, also where another folder is set over it.
std::vector<std::string> tokenizer_remarks(const Config& config, const data::Tokenizer& tokenizer, const checkpoint::Manifest* saved,
                                           const TokenizerKnobs& knobs) {
  if (config.model.from_hf.empty()) return {};
  if (config.given.contains("data.tokenizer")) {
    const auto own = saved == nullptr ? folders_other_tokenizer(config, tokenizer) : std::nullopt;  // a checkpoint's is what it was trained with
    if (!own) return {};
    return {detail::concat("data.tokenizer = ", config.data.tokenizer, ": is not the tokenizer that ", knobs.folder, " brings, ", own->string(),
                           ", by which the same ids stand for other text; name that one with ", knobs.tokenizer, ", unless this one is meant")};
  }
  if (config.data.tokenizer != "byte") return {detail::concat(config.data.tokenizer, ": is the tokenizer that is taken; ", knobs.tokenizer, " names another")};
  if (config.model.vocab_size <= tokenizer.vocab_size()) return {};
  return {detail::concat(knobs.folder, " = ", config.model.from_hf, ": brings no tokenizer.model, and the text is read as bytes, ids 0 to ",
                         tokenizer.vocab_size() - 1, " of a vocabulary of ", config.model.vocab_size, "; name its tokenizer with ", knobs.tokenizer,
                         ", unless it was trained on bytes")};
}

std::string added_tokens_remark(const std::string& folder, int64_t ids) {
  const auto added = checkpoint::hugging_face_added_tokens(folder, ids);
  if (added.empty()) return {};
  constexpr size_t most = 4;
  std::string list;
  for (auto each = added.begin(); each != added.end() && std::distance(added.begin(), each) < static_cast<int64_t>(most); ++each)
    list += detail::concat(list.empty() ? "" : ", ", each->first, " ", each->second);
  if (added.size() > most) list += detail::concat(" and ", added.size() - most, " more");
  return detail::concat(folder, ": adds tokens beyond the ", ids, " of its tokenizer.model (", list,
                        "): no prompt can spell them, as one that names them is read as other pieces, and those that the model makes are left out of the text");
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

TextEnds text_ends(const Config& config, const data::Tokenizer& tokenizer, const checkpoint::Manifest* saved) {
  TextEnds ends;
  if (tokenizer.eos()) ends.ids.insert(*tokenizer.eos());
  const std::string& folder = config.model.from_hf;
  if (folder.empty() || folders_other_tokenizer(config, tokenizer)) return ends;
  try {
    ends.ids.merge(checkpoint::hugging_face_ends(folder));
    std::string added = checkpoint::hugging_face_tokenizer(folder) ? added_tokens_remark(folder, tokenizer.vocab_size()) : "";
    if (!added.empty()) ends.remarks.push_back(std::move(added));
  } catch (const ConfigError&) {
    if (saved == nullptr) throw;
  }
  return ends;
}

FoundTokenizer open_tokenizer(const Config& config, const checkpoint::Manifest* saved, const TokenizerKnobs& knobs, const std::string& named) {
  FoundTokenizer found;
  found.tokenizer = named.empty() ? data::Tokenizer::load(config.data.tokenizer) : data::Tokenizer::load(named, knobs.tokenizer);
  if (named.empty()) found.remarks = tokenizer_remarks(config, *found.tokenizer, saved, knobs);
  data::check_vocabulary(*found.tokenizer, config.model.vocab_size);
  found.bos = puts_bos(config, saved, found);
  return found;
}

}  // namespace tessera
