#include <algorithm>
#include <array>
#include <charconv>
#include <exception>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/ranges.h>

#include "tessera/checkpoint/hugging_face_family.h"
#include "tessera/core/file_type.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// The templates of a post_processor, also of one that is a sequence of them.
void collect_templates(const nlohmann::json& processor, std::vector<const nlohmann::json*>& templates) {
  if (processor.is_null()) return;
  const auto type = processor.at("type").get<std::string>();
  if (type == "TemplateProcessing") {
    templates.push_back(&processor);
  } else if (type == "Sequence") {
    for (const nlohmann::json& each : processor.at("processors")) collect_templates(each, templates);
  } else {
    require(type == "ByteLevel", "it is a ", type);  // which moves offsets, and adds nothing
  }
}

/// What a template has beside the text: its token, or the texts of several.
HuggingFaceToken token_of(const nlohmann::json& processor, const std::vector<std::string>& texts) {
  HuggingFaceToken token{.text = fmt::format("{}", fmt::join(texts, " "))};
  const nlohmann::json& ids = processor.at("special_tokens").at(texts.front()).at("ids");
  if (texts.size() == 1 && ids.size() == 1) token.id = to_integer(ids.front());
  return token;
}

/// What the post_processor of tokenizer.json puts around a text. Throws where that cannot be told.
HuggingFaceFrame read_post_processor(const fs::path& path) {
  const nlohmann::json file = read_json(path);
  HuggingFaceFrame frame{.file = path};
  std::vector<const nlohmann::json*> templates;
  if (const auto found = file.find("post_processor"); found != file.end()) collect_templates(*found, templates);
  if (templates.empty()) return frame;
  require(templates.size() == 1, "it is ", templates.size(), " templates, one around the other");
  const nlohmann::json& single = templates.front()->at("single");
  const auto text = std::ranges::find_if(single, [](const nlohmann::json& piece) { return piece.contains("Sequence"); });
  require(single.is_array() && text != single.end(), "its template has no text");
  std::vector<std::string> front, behind;
  for (auto piece = single.begin(); piece != text; ++piece) front.push_back(piece->at("SpecialToken").at("id").get<std::string>());
  for (auto piece = std::next(text); piece != single.end(); ++piece) behind.push_back(piece->at("SpecialToken").at("id").get<std::string>());
  frame.bos = !front.empty();
  frame.eos = !behind.empty();
  if (frame.bos) frame.bos_token = token_of(*templates.front(), front);
  if (frame.eos) frame.eos_token = token_of(*templates.front(), behind);
  return frame;
}

/// The text of the token under `key`, which is a string or a table that has it; nothing: null.
std::optional<std::string> token_text(const HuggingFaceConfig& file, const std::string& key) {
  const auto said = file.find<nlohmann::json>(key);
  if (!said) return std::nullopt;
  const nlohmann::json text = said->is_object() ? said->value("content", nlohmann::json()) : *said;
  require(text.is_string(), file.file().string(), ": ", key, " = ", said->dump(), " is of the wrong type: expected a text, or a table with its content");
  return text.get<std::string>();
}

/// Gives `token` what tokenizer_config.json names under `key`; of files without added_tokens_decoder, special_tokens_map.json comes first. Where neither has
/// the key, it stays the tokenizer's own. Where the key is null, and there is none: the file that says so.
std::optional<fs::path> read_token(const fs::path& dir, const HuggingFaceConfig& config, const std::string& key, HuggingFaceToken& token) {
  const HuggingFaceConfig* from = &config;
  std::optional<HuggingFaceConfig> map;
  if (const auto path = dir / "special_tokens_map.json"; is_there(path) && !config.contains("added_tokens_decoder")) {
    map.emplace(path);
    if (map->contains(key)) from = &*map;
  }
  if (!from->contains(key)) return std::nullopt;
  token.text = token_text(*from, key);
  if (!token.text) return from->file();
  for (const auto& [id, text] : hugging_face_added_tokens(dir, 0)) {
    if (text == *token.text) token.id = id;
  }
  return std::nullopt;
}

/// What tokenizer_config.json says of a text, and who heeds it beside a tokenizer.json.
struct Stated {
  HuggingFaceFrame frame{};
  std::optional<bool> add_bos{};  ///< what add_bos_token says, of which null is false
  std::string tokenizer_class{};
  bool adds = false;    ///< a LLaMA's: it puts an id in front where add_bos_token is left out, and in version 4 makes the post_processor by the two flags
  bool always = false;  ///< a CodeLLaMA's: in version 5, too, it puts one there, whatever the post_processor and add_bos_token say
};

Stated read_stated(const fs::path& dir, const fs::path& path) {
  static constexpr std::array<std::string_view, 4> kAdding{"LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"};
  Stated stated{.frame = {.file = path}};
  if (!is_there(path)) return stated;
  const HuggingFaceConfig config(path);
  if (config.contains("add_bos_token")) stated.add_bos = config.find<bool>("add_bos_token").value_or(false);
  stated.tokenizer_class = config.find<std::string>("tokenizer_class").value_or("");
  stated.adds = std::ranges::find(kAdding, stated.tokenizer_class) != kAdding.end();
  stated.always = stated.adds && stated.tokenizer_class.starts_with("Code");
  HuggingFaceFrame& frame = stated.frame;
  frame.bos = stated.add_bos.value_or(stated.adds);
  frame.eos = config.find<bool>("add_eos_token").value_or(false);
  if (const auto null = frame.bos ? read_token(dir, config, "bos_token", frame.bos_token) : std::nullopt) {
    frame.remarks.push_back(null->string() + ": bos_token = null: there is no id to put in front of a text, and none is; data.bos = true puts one");
    frame.bos = false;
  }
  if (frame.eos && read_token(dir, config, "eos_token", frame.eos_token)) frame.eos = false;
  return stated;
}

std::string front_of(const HuggingFaceFrame& frame) {
  return !frame.bos ? "puts no id" : frame.bos_token.text ? "puts '" + *frame.bos_token.text + "'" : "puts an id";
}

bool same_front(const HuggingFaceFrame& a, const HuggingFaceFrame& b) {
  return a.bos == b.bos && (!a.bos || !a.bos_token.text || !b.bos_token.text || *a.bos_token.text == *b.bos_token.text);
}

constexpr std::string_view kWayOut = "; data.bos = true or false says which";

/// Of two files that can be read, the frame of the one that is gone by: where somebody wrote add_bos_token, and version 4 heeds it, tokenizer_config.json;
/// where the class puts an id by itself in both versions, too; and else tokenizer.json.
HuggingFaceFrame choose_frame(Stated stated, HuggingFaceFrame processed) {
  const std::string config = stated.frame.file.string(), file = processed.file.string(), &theirs = stated.tokenizer_class;
  const bool differ = !same_front(stated.frame, processed);
  const std::string flag = detail::concat(config, ": add_bos_token = ", stated.add_bos.value_or(false) ? "true" : "false");
  const std::string does = detail::concat(file, ", which ", front_of(processed), " in front of a text");
  if (stated.always) {
    if (!stated.add_bos.value_or(true)) {
      stated.frame.remarks.push_back(detail::concat(
          flag, " is what ", theirs, " of transformers 4 goes by, as is done here, and that of 5 puts an id in front of a text all the same", kWayOut));
    }
    return std::move(stated.frame);
  }
  if (!theirs.empty() && !stated.adds) {
    if (stated.add_bos && differ)
      processed.remarks.push_back(detail::concat(flag, " contradicts the post_processor of ", does, "; ", theirs,
                                                 " of transformers 4 and of 5 goes by the second, as is done here", kWayOut));
    return processed;
  }
  if (!processed.eos && stated.frame.eos) {  // one of the two versions goes by each
    processed.eos = true;
    processed.eos_token = stated.frame.eos_token;
  } else if (processed.eos && !stated.frame.eos) {
    stated.frame.eos = true;
    stated.frame.eos_token = processed.eos_token;
  }
  if (!stated.add_bos) {
    if (stated.frame.bos && differ) {
      processed.remarks.push_back(detail::concat(file, ": its post_processor ", front_of(processed), " in front of a text, and ", theirs, " of transformers 4 ",
                                                 front_of(stated.frame), "; the first is done here", kWayOut));
    }
    return processed;
  }
  if (differ) {
    stated.frame.remarks.push_back(
        detail::concat(flag, " contradicts the post_processor of ", does, "; transformers 4 goes by the first, as is done here, and 5 by the second", kWayOut));
  }
  return std::move(stated.frame);
}

/// What tokenizer_config.json says where no tokenizer.json does; `untold`: why one that is there does not.
HuggingFaceFrame frame_of_config(Stated stated, const std::string& untold) {
  const std::string config = stated.frame.file.string(), &theirs = stated.tokenizer_class;
  const std::string here = stated.frame.bos ? "an id is put in front of a text" : "no id is put in front of a text";
  auto& remarks = stated.frame.remarks;
  if (stated.add_bos) {
    if (!untold.empty() && !theirs.empty() && !stated.adds)
      remarks.push_back(detail::concat(untold, ", and ", theirs, " goes by that: ", here, ", as add_bos_token of ", config, " says", kWayOut));
  } else if (stated.always) {
    return std::move(stated.frame);
  } else if (!untold.empty()) {
    remarks.push_back(detail::concat(untold, ", and ", config, " has no add_bos_token: ", here, theirs.empty() ? "" : ", as " + theirs + " does", kWayOut));
  } else if (stated.frame.bos) {
    remarks.push_back(detail::concat(config, ": has no add_bos_token: ", here, ", as ", theirs, " of transformers 4 does, and that of 5 does not", kWayOut));
  } else if (is_there(stated.frame.file) && theirs.empty() && remarks.empty()) {
    remarks.push_back(detail::concat(config, ": has neither add_bos_token nor tokenizer_class, and there is no tokenizer.json: ", here, kWayOut));
  }
  return std::move(stated.frame);
}

}  // namespace

HuggingFaceFrame hugging_face_frame(const fs::path& dir) {
  const fs::path processor_path = dir / "tokenizer.json";
  std::optional<HuggingFaceFrame> processed;
  std::string untold;
  try {
    if (is_there(processor_path)) processed = read_post_processor(processor_path);
  } catch (const std::exception& error) {  // of a file that is no use here but for this
    untold = detail::concat(processor_path.string(), ": what its post_processor puts around a text cannot be told (", error.what(), ")");
  }
  Stated stated = read_stated(dir, dir / "tokenizer_config.json");
  return processed ? choose_frame(std::move(stated), *std::move(processed)) : frame_of_config(std::move(stated), untold);
}

std::optional<HuggingFaceVocabulary> hugging_face_vocabulary(const fs::path& dir) {
  const bool whole = is_there(dir / "tokenizer.json");
  HuggingFaceVocabulary found{.file = dir / (whole ? "tokenizer.json" : "vocab.json")};
  if (!is_there(found.file)) return std::nullopt;
  try {
    const nlohmann::json file = read_json(found.file);
    const nlohmann::json& pieces = whole ? file.at("model").at("vocab") : file;
    if (pieces.is_object()) {
      for (const auto& [piece, id] : pieces.items()) found.ids.emplace(piece, to_integer(id));
    } else {  // the ids are places in a list of pieces with their scores
      for (int64_t id = 0; const auto& piece : pieces) found.ids.emplace(piece.at(0).get<std::string>(), id++);
    }
    if (const auto added = file.find("added_tokens"); whole && added != file.end()) {
      for (const auto& token : *added) found.ids.emplace(token.at("content").get<std::string>(), to_integer(token.at("id")));
    }
  } catch (const std::exception&) {
    found.ids.clear();
  }
  return found;
}

std::set<int64_t> read_ids(const HuggingFaceConfig& file, const std::string& key) {
  const auto said = file.find<nlohmann::json>(key);
  if (!said) return {};
  if (!said->is_array()) return {file.find<int64_t>(key).value()};
  std::set<int64_t> found;
  try {
    for (const auto& id : *said) found.insert(to_integer(id));
  } catch (const std::exception&) {
    throw ConfigError(
        detail::concat(file.file().string(), ": ", key, " = ", said->dump(), " is of the wrong type: expected an id, or a list of ids; correct the file"));
  }
  return found;
}

std::set<int64_t> hugging_face_ends(const std::filesystem::path& dir) {
  std::set<int64_t> ends;
  for (const char* const name : {"generation_config.json", "config.json"}) {
    if (is_there(dir / name)) ends.merge(read_ids(HuggingFaceConfig(dir / name), "eos_token_id"));
  }
  return ends;
}

std::map<int64_t, std::string> hugging_face_added_tokens(const std::filesystem::path& dir, int64_t ids) {
  std::map<int64_t, std::string> added;
  const auto add = [&](int64_t id, const std::string& text) {
    if (id >= ids) added.emplace(id, text);
  };
  if (const auto path = dir / "added_tokens.json"; is_there(path)) {
    const HuggingFaceConfig file(path);
    for (const std::string& text : file.keys()) add(file.find<int64_t>(text).value_or(-1), text);
  }
  if (const auto path = dir / "tokenizer_config.json"; is_there(path)) {
    const auto tokens = HuggingFaceConfig(path).find<std::map<std::string, nlohmann::json>>("added_tokens_decoder");
    for (const auto& [id, token] : tokens.value_or(std::map<std::string, nlohmann::json>{})) {
      int64_t number = -1;
      const auto [end, error] = std::from_chars(id.data(), id.data() + id.size(), number);
      const bool is_id = error == std::errc() && end == id.data() + id.size();
      require(is_id, path.string(), ": added_tokens_decoder: '", id, "' is no id");
      const auto content = token.is_object() ? token.find("content") : token.end();
      add(number, content != token.end() && content->is_string() ? content->get<std::string>() : "?");
    }
  }
  return added;
}

}  // namespace tessera::checkpoint
