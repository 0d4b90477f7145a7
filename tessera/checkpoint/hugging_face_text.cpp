#include <charconv>
#include <exception>
#include <map>
#include <set>
#include <string>

#include "tessera/checkpoint/hugging_face_family.h"
#include "tessera/core/file_type.h"

namespace tessera::checkpoint {
namespace {

/// A number, or a list of them.
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

}  // namespace

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
