#include "tessera/train/found_tokenizer.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"

namespace tessera {
namespace {

/// Whether the pieces of the two have the same ids; what the folder's adds beyond those of `tokenizer` is no difference.
bool same_ids(const std::map<std::string, int64_t>& pieces, const data::Tokenizer& tokenizer) {
  return std::ranges::all_of(pieces, [&](const auto& each) {
    const auto id = tokenizer.id_of(each.first);
    return each.second < tokenizer.vocab_size() ? id == each.second : !id;
  });
}

/// `tokenizer`: that of the fingerprint, where it is at hand.
std::optional<std::filesystem::path> other_tokenizer(const Config& config, const std::string& fingerprint, const data::Tokenizer* tokenizer) {
  if (config.model.from_hf.empty()) return std::nullopt;
  const auto own = checkpoint::hugging_face_tokenizer(config.model.from_hf);
  try {
    if (own) return data::Tokenizer::load(own->string())->fingerprint() == fingerprint ? std::nullopt : own;
  } catch (const ConfigError&) {  // nobody can tell what it is, but for what follows
  }
  const auto vocabulary = checkpoint::hugging_face_vocabulary(config.model.from_hf);
  if (fingerprint == "byte") return own ? own : vocabulary ? std::optional(vocabulary->file) : std::nullopt;
  if (!vocabulary || (tokenizer != nullptr && same_ids(vocabulary->ids, *tokenizer))) return std::nullopt;
  return vocabulary->file;
}

/// What is to be said of a tokenizer that nobody named, or that is not the one which the folder brings: a saved configuration names the tokenizer that its run
/// took, also where another folder is set over it.
std::vector<std::string> tokenizer_remarks(const Config& config, const data::Tokenizer& tokenizer, const checkpoint::Manifest* saved,
                                           const TokenizerKnobs& knobs) {
  if (config.model.from_hf.empty()) return {};
  if (config.given.contains("data.tokenizer")) {
    const auto own = saved == nullptr ? folders_other_tokenizer(config, tokenizer) : std::nullopt;  // a checkpoint's is what it was trained with
    if (!own) return {};
    const std::string name = own->extension() == ".model" ? "that one" : "the same vocabulary as a tokenizer.model, as this file is not read for ids,";
    return {detail::concat("data.tokenizer = ", config.data.tokenizer, ": is not the tokenizer that ", knobs.folder, " brings, ", own->string(),
                           ", by which the same ids stand for other text; name ", name, " with ", knobs.tokenizer, ", unless this one is meant")};
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

/// The number of a token that has a text.
std::optional<int64_t> id_in(const checkpoint::HuggingFaceToken& token, const data::Tokenizer& tokenizer) {
  if (token.id) return token.id;
  return tokenizer.id_of(token.text.value());
}

/// Of an id that a folder's tokenizer puts behind each text: here the tokenizer's own alone stands there, and not behind every text.
std::string behind_remark(const std::string& folder, const checkpoint::HuggingFaceToken& token, const data::Tokenizer& tokenizer) {
  const std::optional<int64_t> eos = tokenizer.eos();
  const auto id = token.text ? id_in(token, tokenizer) : eos;
  const std::string which = id == eos ? "an id" : "'" + *token.text + "'" + (id ? detail::concat(", id ", *id, ",") : "");
  const std::string here = !eos        ? "none stands behind a text here, as the tokenizer has none for the end of one"
                           : id == eos ? "here it stands behind documents or files (data.documents), and behind no prompt"
                                       : detail::concat("here the tokenizer's own for the end of one, id ", *eos,
                                                        ", stands behind documents or files (data.documents), and none behind a prompt");
  return detail::concat(folder, ": its tokenizer puts ", which, " behind a text, too; ", here);
}

/// Refuses a folder that puts another id in front of a text than `bos`, the one that can be put there.
void check_front(const checkpoint::HuggingFaceFrame& frame, const data::Tokenizer& tokenizer, int32_t bos) {
  if (!frame.bos_token.text) return;
  const auto id = id_in(frame.bos_token, tokenizer);
  require(id == bos, frame.file.string(), ": puts '", *frame.bos_token.text, "' in front of a text, ",
          id ? detail::concat("id ", *id) : "which is no piece of the tokenizer", ", and only the tokenizer's own beginning of text, id ", bos,
          ", can be put there; data.bos = true puts that one, and data.bos = false none");
}

bool puts_bos(const Config& config, const checkpoint::Manifest* saved, FoundTokenizer& found) {
  if (config.data.bos) {
    if (*config.data.bos) data::require_bos(*found.tokenizer, "data.bos = true");
    return *config.data.bos;
  }
  const data::Tokenizer& tokenizer = *found.tokenizer;
  const auto bos = tokenizer.bos();
  if (saved != nullptr) return bos && data_identity(*saved).value("bos", false);  // also one from before there was such a key
  const std::string& folder = config.model.from_hf;
  if (folder.empty() || tokenizer.fingerprint() == "byte") return false;
  const auto frame = checkpoint::hugging_face_frame(folder);
  const bool own = !folders_other_tokenizer(config, tokenizer);
  found.remarks.insert(found.remarks.end(), frame.remarks.begin(), frame.remarks.end());
  if (frame.eos && own) found.remarks.push_back(behind_remark(folder, frame.eos_token, tokenizer));
  if (!frame.bos) return false;
  if (!bos) {
    found.remarks.push_back(
        detail::concat(frame.file.string(), ": puts an id in front of a text, and the tokenizer in use has none for the beginning of one: none is put"));
    return false;
  }
  if (own) check_front(frame, tokenizer, *bos);
  found.remarks.push_back(detail::concat(frame.file.string(), ": puts id ", *bos,
                                         " in front of a text, and so it is in front of each document and prompt here; data.bos = false leaves it out"));
  return true;
}

}  // namespace

void take_folder_tokenizer(Config& config) {
  if (config.model.from_hf.empty() || config.given.contains("data.tokenizer")) return;
  if (const auto own = checkpoint::hugging_face_tokenizer(config.model.from_hf)) config.data.tokenizer = own->string();
}

std::optional<std::filesystem::path> folders_other_tokenizer(const Config& config, const data::Tokenizer& tokenizer) {
  return other_tokenizer(config, tokenizer.fingerprint(), &tokenizer);
}

std::optional<std::filesystem::path> folders_other_tokenizer(const Config& config, const std::string& fingerprint) {
  return other_tokenizer(config, fingerprint, nullptr);
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

void take_ends_of_rank_0(TextEnds& ends, const comm::Group& group) { ends.ids = checkpoint::gather_json(group, ends.ids).front().get<std::set<int64_t>>(); }

FoundTokenizer open_tokenizer(const Config& config, const checkpoint::Manifest* saved, const TokenizerKnobs& knobs, const std::string& named) {
  FoundTokenizer found;
  found.tokenizer = named.empty() ? data::Tokenizer::load(config.data.tokenizer) : data::Tokenizer::load(named, knobs.tokenizer);
  if (named.empty()) found.remarks = tokenizer_remarks(config, *found.tokenizer, saved, knobs);
  data::check_vocabulary(*found.tokenizer, config.model.vocab_size);
  found.bos = puts_bos(config, saved, found);
  return found;
}

}  // namespace tessera
