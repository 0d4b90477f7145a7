#include <fstream>
#include <sstream>

#include "tessera/config/config.h"
#include "tessera/config/detail.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"

namespace tessera {
namespace detail {

std::vector<std::string> split_choices(std::string_view choices) {
  std::vector<std::string> out;
  while (!choices.empty()) {
    const auto comma = choices.find(", ");
    out.emplace_back(choices.substr(0, comma));
    choices.remove_prefix(comma == std::string_view::npos ? choices.size() : comma + 2);
  }
  return out;
}

std::string quoted(std::string_view text) {
  constexpr char digits[] = "0123456789ABCDEF";
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      out += "\\u00";
      out += digits[c >> 4];
      out += digits[c & 15];
    } else {
      out += c;
    }
  }
  return out += '"';
}

}  // namespace detail

namespace {

constexpr const char* kBecame = "  # became ";  // behind what was asked for

std::string toml_value(bool value) { return value ? "true" : "false"; }
std::string toml_value(int value) { return std::to_string(value); }
std::string toml_value(int64_t value) { return std::to_string(value); }
std::string toml_value(double value) { return format_float(value); }
std::string toml_value(const std::string& value) { return detail::quoted(value); }
std::string toml_value(const ByPattern& places) {
  if (places.by_pattern.empty()) return toml_value(places.everywhere);
  std::string out;
  for (const auto& [pattern, place] : places.by_pattern) out += (out.empty() ? "{ " : ", ") + detail::quoted(pattern) + " = " + detail::quoted(place);
  return out + " }";
}

template <class List>
std::string toml_value(const List& values) {
  std::string out = "[";
  for (const auto& value : values) {
    if (out.size() > 1) out += ", ";
    out += toml_value(value);
  }
  return out += "]";
}

/// Nothing where an optional is not set, or a string is none of its choices yet (model.family, before from_hf is read).
template <class T>
std::optional<std::string> toml_of(const T& field, const FieldRule& rule) {
  if constexpr (detail::is_optional<T>::value) {
    return field ? std::optional(toml_value(*field)) : std::nullopt;
  } else if constexpr (std::is_same_v<T, std::string>) {
    const bool chosen = !field.empty() || rule.choices.empty() || rule.path;
    return chosen ? std::optional(toml_value(field)) : std::nullopt;
  } else {
    return toml_value(field);
  }
}

std::string values_column(std::string_view name, std::string_view type, const FieldRule& rule) {
  std::string listed;
  for (const auto& choice : detail::split_choices(rule.choices)) listed += (listed.empty() ? "`" : ", `") + choice + "`";
  if (rule.number) return listed + ", a number";
  if (rule.path) return listed.empty() ? (type == "a string" ? "a path" : "a list of paths") : listed + ", a path";
  if (type == detail::type_name<ByPattern>()) return listed + (name == "kernels" ? ", a table of kernels and these" : ", a table of patterns and these");
  return listed.empty() ? std::string(type) : listed;
}

}  // namespace

std::optional<std::string> detail::value_text(const Config& config, const std::string& key) {
  std::optional<std::string> text;
  Config::for_each_section(config, [&](const char* section, const auto& fields, std::string_view) {
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, const auto& field, const FieldRule& rule, std::string_view) {
      if (key == detail::concat(section, ".", name)) text = toml_of(field, rule);
    });
  });
  return text;
}

Settings shared_settings(const Config& config) {
  Settings settings;
  Config::for_each_section(config, [&](const char* section, const auto& fields, std::string_view) {
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, const auto& field, const FieldRule& rule, std::string_view) {
      if (!rule.path && !rule.per_rank) settings.emplace_back(detail::concat(section, ".", name), toml_of(field, rule).value_or("unset"));
    });
  });
  return settings;
}

bool is_saved_config(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  std::string text;
  for (std::string line; std::getline(in, line);) text += line.substr(0, line.find(kBecame)) + "\n";
  try {
    return text == to_toml(load_config(file));
  } catch (const ConfigError&) {
    return false;
  }
}

std::string to_toml(const Config& config) {
  std::ostringstream out;
  Config::for_each_section(config, [&](const char* section, const auto& fields, std::string_view) {
    out << (out.tellp() > 0 ? "\n" : "") << "[" << section << "]\n";
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, const auto& field, const FieldRule& rule, std::string_view) {
      const auto asked = config.asked.find(detail::concat(section, ".", name));
      const auto value = toml_of(field, rule);
      if (value && asked != config.asked.end() && toml_value(asked->second) != *value) {
        out << name << " = " << toml_value(asked->second) << kBecame << *value << "\n";
      } else if (value) {
        out << name << " = " << *value << "\n";
      } else {
        out << "# " << name << ": " << (rule.unset.empty() ? "not set" : rule.unset) << "\n";
      }
    });
  });
  return std::move(out).str();
}

std::string configuration_markdown() {
  std::ostringstream out;
  out << "# Configuration\n\n"
         "<!-- Written from tessera/config/fields.h by the test that compares the two, with TESSERA_UPDATE_DOCS=1: change it there. -->\n\n"
         "A run is described by one TOML file. `--set section.key=value` overrides a key of it; it splits at the first `=`, and the value is read as TOML, or, "
         "where\n"
         "that fails or the key is a string, as the bare string: `--set optim.lr=1e-3 --set data.files=text.txt --set pipeline.schedule=1f1b`.\n\n"
         "An integer is accepted for a number with a fraction, and one string for a list of strings. Any other type is refused, as is an unknown section or "
         "key, with the nearest\n"
         "known one. Relative paths in the file are relative to the file, those in `--set` to the working directory. An integer with default 0 and no\n"
         "meaning given for 0 has to be set, but for seeds. All ranks of a run need the same settings, but for paths and those marked \"per rank\" "
         "(docs/launch.md). The\n"
         "complete configuration of a run, with these defaults filled in, is saved as `config.toml` in `log.dir`.\n";
  const Config defaults;
  Config::for_each_section(defaults, [&](const char* section, const auto& fields, std::string_view section_doc) {
    out << "\n## [" << section << "]\n\n" << section_doc << "\n\n| key | default | values | meaning |\n|---|---|---|---|\n";
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, const auto& field, const FieldRule& rule, std::string_view doc) {
      const auto value = toml_of(field, FieldRule{});
      out << "| " << name << " | " << (value ? "`" + *value + "`" : std::string(rule.unset)) << " | "
          << values_column(name, detail::type_name<std::decay_t<decltype(field)>>(), rule) << " | " << doc << (rule.per_rank ? " Per rank." : "") << " |\n";
    });
  });
  return std::move(out).str();
}

}  // namespace tessera
