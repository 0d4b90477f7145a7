#include "tessera/checkpoint/agreement.h"

#include <optional>
#include <string>

#include "tessera/core/error.h"

// The fields of a section are taken as they are declared, not from a list here: a key that is added later is agreed upon without anybody's thinking of it. What
// a checkpoint from before it does not say, the key's default says: that is what held then.

namespace tessera::checkpoint {
namespace {

template <class T>
nlohmann::json to_json(const T& value) {
  return value;
}
template <class T>
nlohmann::json to_json(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json();
}
nlohmann::json to_json(const ByPattern& places) { return places.by_pattern.empty() ? nlohmann::json(places.everywhere) : nlohmann::json(places.by_pattern); }

/// Every field of a section but its paths, which may differ from machine to machine; `names`: with those that may be a name instead.
template <class Section>
void add_fields(nlohmann::json& fields, const std::string& name, const Section& section, bool names = false) {
  Section::for_each_field(section, [&](const char* key, const auto& value, const FieldRule& rule, std::string_view) {
    if (!rule.path || (names && !rule.choices.empty())) fields[name + "." + key] = to_json(value);
  });
}

/// As a person writes it.
std::string text(const nlohmann::json& value) {
  if (value.is_null()) return "unset";
  return value.is_string() ? value.get<std::string>() : value.dump();
}

/// The identity of the text is made of fingerprints, which say nothing to a person; that one of them differs does.
void check_data(const nlohmann::json& saved, const nlohmann::json& current, const std::string& source) {
  const auto identity = [](const nlohmann::json& agreement) { return agreement.value("data.files", nlohmann::json()); };
  const auto before = identity(saved), now = identity(current);
  if (!before.is_object() || !now.is_object() || before == now) return;
  const auto bos_of = [](const nlohmann::json& data) { return data.value("bos", false) ? "true" : "false"; };
  const bool same_tokenizer = before.value("tokenizer", nlohmann::json()) == now.value("tokenizer", nlohmann::json());
  require(!same_tokenizer || bos_of(before) == bos_of(now), "data.bos = ", bos_of(now), ": ", source, " was written with ", bos_of(before),
          "; resume with the same value, or start anew with checkpoint.resume = \"\"");
  const std::string content = before.value("content", "");
  require(!same_tokenizer, "data.files: the files do not hold, byte for byte, what ", source,
          " was written with: another text, or the same one compressed otherwise, or unpacked; resume with the files as they were then",
          content.empty() ? "" : detail::concat(", or with what was packed of them (*-", content, ".bin in data.cache_dir then) as data.files"),
          ", or start anew with checkpoint.resume = \"\"");
  throw ConfigError(detail::concat("data.tokenizer: the tokenizer is not the one that ", source,
                                   " was written with; resume with the same, as it was then, or start anew with checkpoint.resume = \"\""));
}

/// What a checkpoint was written with, by key; of a key that it is older than, what held then.
class Saved {
 public:
  explicit Saved(const nlohmann::json& agreement) : agreement_(agreement), defaults_(agreement_of(Config{}, {})) {
    add_fields(defaults_, "quantize", Config{}.quantize);  // also of one without quantised weights
  }
  std::string at(const std::string& key) const { return (agreement_.contains(key) ? agreement_ : defaults_).at(key).dump(); }

 private:
  const nlohmann::json& agreement_;
  nlohmann::json defaults_;
};

}  // namespace

nlohmann::json agreement_of(const Config& config, const nlohmann::json& data_identity) {
  auto fields = nlohmann::json::object();
  add_fields(fields, "model", config.model);
  add_fields(fields, "data", config.data);
  fields.erase("data.seq_len");
  fields.erase("data.bos");  // where nobody gave it, files say it: what it was is part of the identity
  fields["data.files"] = data_identity;
  fields["run.seed"] = config.run.seed;
  fields["lora.modules"] = config.lora.modules;
  fields["lora.rank"] = config.lora.rank;
  fields["lora.alpha"] = config.lora.alpha;
  fields["quantize.modules"] = config.quantize.modules;
  if (!config.quantize.modules.empty()) add_fields(fields, "quantize", config.quantize);
  fields["optim.name"] = config.optim.name;
  return fields;
}

std::vector<std::string> changed_settings(const Config& saved, const Config& current) {
  const auto all = [](const Config& config) {
    auto fields = nlohmann::json::object();
    Config::for_each_section(config, [&](const char* name, const auto& section, std::string_view) { add_fields(fields, name, section, /*names=*/true); });
    fields.erase("data.tokenizer");  // is held to its content
    return fields;
  };
  const nlohmann::json before = all(saved), now = all(current);
  std::vector<std::string> changed;
  for (const auto& [key, value] : now.items()) {
    if (key.starts_with("checkpoint.") || key.starts_with("log.") || key == "run.steps" || before.at(key) == value) continue;
    const auto asked = current.asked.find(key);
    if (asked != current.asked.end() && before.at(key) == asked->second) continue;
    changed.push_back(detail::concat(key, " = ", text(value), " (was ", text(before.at(key)), ")"));
  }
  return changed;
}

std::vector<Disagreement> model_disagreements(const nlohmann::json& saved, const Config& current) {
  std::vector<Disagreement> found;
  if (!saved.is_object()) return found;
  const Saved written(saved);
  // Of adapters, and of weights in fewer bits, that it has none of, the rest of the section says nothing.
  const auto says_how = [&](const std::string& key, const std::string& section) {
    return key.starts_with(section) && (key == section + "modules" || written.at(section + "modules") != "\"\"");
  };
  const nlohmann::json now = agreement_of(current, {});
  for (const auto& [key, value] : now.items()) {
    const bool of_the_model = key.starts_with("model.") || says_how(key, "lora.") || says_how(key, "quantize.");
    if (!of_the_model || written.at(key) == value.dump()) continue;
    found.push_back({.key = key, .saved = written.at(key), .current = value.dump()});
  }
  return found;
}

void check_agreement(const nlohmann::json& saved, const nlohmann::json& current, const std::string& source,
                     const std::map<std::string, std::string>& followed) {
  require(saved.is_object() && current.is_object(), source, ": holds no configuration to agree with");
  const Saved written(saved);
  const auto theirs = [&](const std::string& key) { return written.at(key); };
  check_data(saved, current, source);
  const auto agree = [&](const std::string& key) {
    const std::string value = current.at(key).dump(), before = theirs(key);
    require(before == value, key, " = ", value, ": ", source, " was written with ", before,
            "; resume with the same value, or start anew with checkpoint.resume = \"\"");
  };
  const auto is_idle = [&](const std::string& key) {  // not both runs read it: what makes them do so has to agree itself
    const auto both_have = [&](const char* what, const std::string& nothing) {
      return !current.contains(what) || (current.at(what).dump() != nothing && theirs(what) != nothing);  // not there: it may differ, and is judged elsewhere
    };
    if (key == "lora.rank" || key == "lora.alpha") return !both_have("lora.modules", "\"\"");
    return key == "data.seed" && !both_have("data.shuffle", "false");
  };
  for (const auto& [key, value] : current.items()) {
    if (is_idle(key)) continue;
    if (const auto other = followed.find(key); other != followed.end()) {
      if (current.contains(other->second)) agree(other->second);
      require(theirs(key) == value.dump(), other->second, " = ", value.dump(), ": ", key, " is not set and follows it, and ", source, " was written with ", key,
              " = ", theirs(key), "; set ", key, " = ", theirs(key), ", or start anew with checkpoint.resume = \"\"");
    }
    agree(key);
  }
}

}  // namespace tessera::checkpoint
