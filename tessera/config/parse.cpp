#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <sstream>
#include <type_traits>
#include <utility>

#include <toml++/toml.h>

#include "tessera/config/config.h"
#include "tessera/config/detail.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/format.h"
#include "tessera/core/text_file.h"

// Every key is read by a visit over the fields of its section, as they are declared: there is no second table of names and types that could differ. A --set is
// tried as TOML first and taken as bare text where that fails or the field is a string, so that a shell needs no quotes around quotes.

namespace tessera {
namespace {

/// Where a value came from: for relative paths and for messages.
struct Origin {
  std::filesystem::path base_dir;
  std::string place;  ///< "run.toml:3", "--set"
};

struct Location {
  std::string key;  ///< "optim.lr"
  FieldRule rule;
  const Origin& origin;
};

std::string show(const toml::node& node) {
  std::ostringstream out;
  node.visit([&](const auto& value) {
    using Value = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Value, toml::table>) {
      out << "a table";
    } else if constexpr (std::is_same_v<Value, toml::value<std::string>>) {
      out << detail::quoted(value.get());
    } else if constexpr (std::is_same_v<Value, toml::value<double>>) {
      out << format_float(value.get());
    } else if constexpr (std::is_same_v<Value, toml::array>) {
      out << "[";
      for (const char* comma = ""; const toml::node& entry : value) out << std::exchange(comma, ", ") << show(entry);
      out << "]";
    } else {
      out << value;
    }
  });
  return std::move(out).str();
}

/// A key as messages show it: TOML allows any character in a quoted one, a zero too, behind which a message would end.
std::string show(const std::string& key) {
  const bool plain = std::all_of(key.begin(), key.end(), [](unsigned char c) { return c >= 0x20 && c != 0x7f; });
  return plain ? key : detail::quoted(key);
}

/// A message is a line to be read.
std::string shortened(const std::string& value) {
  constexpr size_t most = 200;
  if (value.size() <= most) return value;
  size_t end = most;
  while (end > 0 && (static_cast<unsigned char>(value[end]) & 0xC0) == 0x80) --end;  // between characters
  return detail::concat(value.substr(0, end), "... (", value.size(), " bytes)");
}

template <class... Rule>
[[noreturn]] void refuse(const Location& at, const std::string& value, Rule&&... rule) {
  throw ConfigError(detail::concat(at.key, " = ", shortened(value), " (", at.origin.place, "): ", std::forward<Rule>(rule)...));
}

template <class... Rule>
[[noreturn]] void refuse(const Location& at, const toml::node& node, Rule&&... rule) {
  refuse(at, show(node), std::forward<Rule>(rule)...);
}

bool is_number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && std::isfinite(value);
}

/// An integer that TOML has no room for, so that a --set leaves it a text.
bool is_beyond_64_bits(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc::result_out_of_range && end == text.data() + text.size();
}

std::string absolute(const std::string& path, const std::filesystem::path& base_dir) {
  return std::filesystem::absolute(base_dir / path).lexically_normal().string();
}

/// Whoever opens a file by such a name would open another one.
void refuse_zeros(const std::string& text, const Location& at) {
  if (text.find('\0') != std::string::npos) refuse(at, detail::quoted(text), "holds a zero, behind which a name ends for whoever reads it; leave the zero out");
}

/// Holds a string against the field's rule.
std::string accept(const std::string& text, const Location& at) {
  refuse_zeros(text, at);
  if (at.rule.path && text.empty()) return text;
  const auto choices = detail::split_choices(at.rule.choices), refused = detail::split_choices(at.rule.refused);
  const bool listed = std::find(choices.begin(), choices.end(), text) != choices.end();
  if (at.rule.path) {
    // Beside names, a word that is no path's and of which there is no file is a name that nobody knows: it is shown as it was given.
    std::error_code ignored;
    const bool word = !choices.empty() && text.find_first_of("/.") == std::string::npos;
    const bool name = listed || (word && !std::filesystem::exists(absolute(text, at.origin.base_dir), ignored));
    return name ? text : absolute(text, at.origin.base_dir);
  }
  if (std::find(refused.begin(), refused.end(), text) != refused.end()) return text;  // validate() knows why not
  if (choices.empty() || listed || (at.rule.number && is_number(text))) return text;
  refuse(at, detail::quoted(text), "expected ", at.rule.number ? "a number, or " : "", "one of ", at.rule.choices, "; did you mean ", nearest(text, choices),
         "?");
}

void assign(bool& field, const toml::node& node, const Location& at) {
  if (!node.is_boolean()) refuse(at, node, "expected ", detail::type_name<bool>());
  field = node.as_boolean()->get();
}

template <class Int>
  requires(std::is_integral_v<Int> && !std::is_same_v<Int, bool>)
void assign(Int& field, const toml::node& node, const Location& at) {
  using Limits = std::numeric_limits<Int>;
  const auto refuse_size = [&](const std::string& text) {
    if (text.starts_with('-')) refuse(at, text, "expected an integer of at least ", Limits::min());
    refuse(at, text, "expected an integer of at most ", Limits::max());
  };
  if (node.is_string() && is_beyond_64_bits(node.as_string()->get())) refuse_size(node.as_string()->get());
  if (!node.is_integer()) refuse(at, node, "expected ", detail::type_name<Int>());
  const int64_t value = node.as_integer()->get();
  if (value < Limits::min() || value > Limits::max()) refuse_size(show(node));
  field = static_cast<Int>(value);
}

void assign(double& field, const toml::node& node, const Location& at) {
  const auto value = node.is_number() ? node.value<double>() : std::nullopt;
  if (!value || !std::isfinite(*value)) refuse(at, node, "expected ", detail::type_name<double>());
  field = *value;
}

void assign(std::string& field, const toml::node& node, const Location& at) {
  if (at.rule.number && node.is_number()) {
    double number = 0;
    assign(number, node, at);
    field = node.is_integer() ? std::to_string(node.as_integer()->get()) : format_float(number);
    return;
  }
  if (!node.is_string()) refuse(at, node, "expected ", detail::type_name<std::string>());
  field = accept(node.as_string()->get(), at);
}

void assign(std::vector<std::string>& field, const toml::node& node, const Location& at) {
  std::vector<std::string> values;
  if (node.is_string()) {
    values.push_back(accept(node.as_string()->get(), at));
  } else if (const auto* array = node.as_array()) {
    for (const auto& entry : *array) {
      if (!entry.is_string()) refuse(at, node, "expected ", detail::type_name<std::vector<std::string>>());
      values.push_back(accept(entry.as_string()->get(), at));
    }
  } else {
    refuse(at, node, "expected ", detail::type_name<std::vector<std::string>>());
  }
  field = std::move(values);
}

void assign(Betas& field, const toml::node& node, const Location& at) {
  const auto* array = node.as_array();
  if (!array || array->size() != field.size()) refuse(at, node, "expected ", detail::type_name<Betas>());
  for (size_t i = 0; i < field.size(); ++i) {
    if (!(*array)[i].is_number()) refuse(at, node, "expected ", detail::type_name<Betas>());
    assign(field[i], (*array)[i], at);
  }
}

void assign(ByPattern& field, const toml::node& node, const Location& at) {
  ByPattern places;
  if (const auto* table = node.as_table()) {
    places.everywhere = detail::split_choices(at.rule.choices).front();
    for (const auto& [pattern, place] : *table) {
      if (!place.is_string()) refuse(at, node, "expected ", detail::type_name<ByPattern>());
      refuse_zeros(std::string(pattern.str()), at);
      places.by_pattern.emplace(pattern.str(), accept(place.as_string()->get(), at));
    }
  } else if (node.is_string()) {
    places.everywhere = accept(node.as_string()->get(), at);
  } else {
    refuse(at, node, "expected ", detail::type_name<ByPattern>());
  }
  field = std::move(places);
}

void assign(std::vector<double>& field, const toml::node& node, const Location& at) {
  const auto* array = node.as_array();
  if (!array) refuse(at, node, "expected ", detail::type_name<std::vector<double>>());
  std::vector<double> values;
  for (const auto& entry : *array) {
    if (!entry.is_number()) refuse(at, node, "expected ", detail::type_name<std::vector<double>>());
    assign(values.emplace_back(), entry, at);
  }
  field = std::move(values);
}

template <class T>
void assign(std::optional<T>& field, const toml::node& node, const Location& at) {
  T value{};
  assign(value, node, at);
  field = std::move(value);
}

/// The known "section.key" that an unknown one most likely means: the same key of another section, else the nearest of its own section, else of all.
std::string nearest_key(const Config& config, const std::string& section, const std::string& key) {
  std::vector<std::string> all, own;
  std::string elsewhere;
  Config::for_each_section(config, [&](const char* section_name, const auto& fields, std::string_view) {
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, const auto&, const FieldRule&, std::string_view) {
      auto full = detail::concat(section_name, ".", name);
      if (key == name && elsewhere.empty()) elsewhere = full;
      if (section == section_name) own.push_back(full);
      all.push_back(std::move(full));
    });
  });
  if (!elsewhere.empty()) return elsewhere;
  return nearest(detail::concat(section, ".", key), own.empty() ? all : own);
}

/// Sets `section.key` from a node; `node_of` gives it per type of the field, since --set reads strings differently.
template <class NodeOf>
void set_key(Config& config, const std::string& section, const std::string& key, const Origin& origin, NodeOf&& node_of) {
  bool found = false;
  Config::for_each_section(config, [&](const char* section_name, auto& fields, std::string_view) {
    if (section != section_name) return;
    std::decay_t<decltype(fields)>::for_each_field(fields, [&](const char* name, auto& field, const FieldRule& rule, std::string_view) {
      if (key != name) return;
      found = true;
      assign(field, node_of(field), Location{detail::concat(section, ".", key), rule, origin});
    });
  });
  if (!found)
    throw ConfigError(
        detail::concat("unknown key ", show(section), ".", show(key), " (", origin.place, "): the nearest known key is ", nearest_key(config, section, key)));
  config.given.insert(detail::concat(section, ".", key));
}

std::vector<std::string> section_names(const Config& config) {
  std::vector<std::string> names;
  Config::for_each_section(config, [&](const char* name, const auto&, std::string_view) { names.emplace_back(name); });
  return names;
}

void apply_table(Config& config, const toml::table& table, const std::filesystem::path& base_dir, const std::string& origin) {
  const auto sections = section_names(config);
  for (const auto& [section_key, section_node] : table) {
    const std::string section(section_key.str());
    const auto place = [&](const toml::node& node) { return detail::concat(origin, ":", node.source().begin.line); };
    const auto* keys = section_node.as_table();
    if (std::find(sections.begin(), sections.end(), section) == sections.end()) {
      if (keys == nullptr)
        throw ConfigError(detail::concat("unknown key ", show(section), " (", place(section_node), "): keys live in sections; the nearest known key is ",
                                         nearest_key(config, "", section)));
      throw ConfigError(
          detail::concat("unknown section [", show(section), "] (", place(section_node), "): the nearest known section is [", nearest(section, sections), "]"));
    }
    if (keys == nullptr)
      throw ConfigError(detail::concat(section, " = ", show(section_node), " (", place(section_node), "): expected a section [", section, "]"));
    for (const auto& [key, node] : *keys) {
      set_key(config, section, std::string(key.str()), Origin{base_dir, place(node)}, [&node = node](const auto&) -> const toml::node& { return node; });
    }
  }
}

/// The value of a --set as TOML; nothing where it is none.
std::optional<toml::table> parse_value(const std::string& text) {
  try {
    auto table = toml::parse("value = " + text);
    if (table.size() == 1) return table;
  } catch (const toml::parse_error&) {
  }
  return std::nullopt;
}

void apply_set(Config& config, const std::string& set) {
  const auto equals = set.find('=');
  require(equals != std::string::npos, "--set ", set, ": expected key=value, such as optim.lr=1e-3");
  const std::string full_key = detail::trimmed(set.substr(0, equals));
  require(!full_key.empty(), "--set ", set, ": there is no key before the =; expected key=value, such as optim.lr=1e-3");
  const std::string text = set.substr(equals + 1);
  require(detail::is_utf8(text), "--set ", full_key, ": the value is not UTF-8, and could not be saved in log.dir/config.toml; ",
          "write it in UTF-8, or rename the file that it names");
  const auto dot = full_key.find('.');
  if (dot == std::string::npos)
    throw ConfigError(detail::concat("unknown key ", full_key, " (--set): expected section.key; the nearest known key is ", nearest_key(config, "", full_key)));
  detail::set_from_text(config, full_key.substr(0, dot), full_key.substr(dot + 1), text, "--set");
}

}  // namespace

std::string detail::trimmed(std::string text) {
  text.erase(0, std::min(text.size(), text.find_first_not_of(" \t")));
  text.erase(text.find_last_not_of(" \t") + 1);
  return text;
}

void detail::set_from_text(Config& config, const std::string& section, const std::string& key, const std::string& text, const std::string& place) {
  const toml::value<std::string> bare(text);
  const auto parsed = parse_value(text);
  set_key(config, section, key, Origin{std::filesystem::current_path(), place}, [&](const auto& field) -> const toml::node& {
    const toml::node* value = parsed ? parsed->get("value") : nullptr;
    const bool wants_string = std::is_same_v<std::decay_t<decltype(field)>, std::string>;
    if (value && (!wants_string || value->is_string())) return *value;
    return bare;
  });
}

bool detail::is_utf8(const std::string& text) { return parse_value(detail::quoted(text)).has_value(); }

Config parse_config(std::string_view text, const std::filesystem::path& base_dir, const std::vector<std::string>& sets, const std::string& origin) {
  Config config;
  try {
    apply_table(config, toml::parse(text), base_dir, origin);
  } catch (const toml::parse_error& error) {
    const auto at = error.source().begin;
    throw ConfigError(detail::concat(origin, ":", at.line, ":", at.column, ": not valid TOML: ", error.description()));
  }
  for (const auto& set : sets) apply_set(config, set);
  return config;
}

Config load_config(const std::filesystem::path& file, const std::vector<std::string>& sets) {
  std::error_code ignored;
  require(is_there(file), "configuration file ", file.string(), ": no such file");
  require(!std::filesystem::is_directory(file, ignored), "configuration file ", file.string(), ": is a folder; name a .toml file");
  // Every rank reads it, and a pipe gives it to one; one that nobody writes holds its reader for ever.
  require(std::filesystem::is_regular_file(file, ignored), "configuration file ", file.string(), ": is not a regular file; write it to one, and name that");
  const std::string text = read_text_file("configuration file " + file.string(), file);
  Config config = parse_config(text, file.parent_path(), sets, file.string());
  const std::string stem = file.stem().string();
  if (stem != "." && stem != "..") config.name = stem;  // it names a folder: of "...toml" it would be the one above
  return config;
}

bool Config::operator==(const Config& other) const {
#define TESSERA_EQUAL_SECTION(Struct, member, fields, doc) &&member == other.member
  return true TESSERA_CONFIG_SECTIONS(TESSERA_EQUAL_SECTION);
#undef TESSERA_EQUAL_SECTION
}

}  // namespace tessera
