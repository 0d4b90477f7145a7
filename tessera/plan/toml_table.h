#pragma once

#include <cmath>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <toml++/toml.h>

#include "tessera/config/config.h"
#include "tessera/config/detail.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/format.h"
#include "tessera/core/text_file.h"

/// How files of devices and of frameworks are found, read, and refused by the names that they have for things.
namespace tessera::plan {

inline toml::table parse_toml(const std::string& text, const std::string& origin) {
  try {
    return toml::parse(text, origin);
  } catch (const toml::parse_error& error) {
    std::ostringstream where;
    where << error.source().begin;
    throw ConfigError(detail::concat(origin, ": ", error.description(), " (", where.str(), ")"));
  }
}

/// What a name stands for, and a name for it in messages.
struct NamedText {
  std::string text, origin;
};

/// The files that tessera brings, by name: kHardwareFiles, kFrameworkFiles.
using BuiltInFiles = std::span<const std::pair<std::string_view, std::string_view>>;

inline std::vector<std::string> names_of(BuiltInFiles files) {
  std::vector<std::string> names;
  for (const auto& [name, text] : files) names.emplace_back(name);
  return names;
}

/// One of `files` by its name, or a file of the user's. `flag` ("--device") and `kind` ("device") stand in messages. Throws ConfigError for a name that is
/// neither, with the nearest, and for what is no regular file.
inline NamedText find_text(const std::string& name_or_file, BuiltInFiles files, const std::string& flag, const std::string& kind) {
  for (const auto& [name, text] : files) {
    if (name == name_or_file) return {std::string(text), std::string(name)};
  }
  const auto names = names_of(files);
  if (!is_there(name_or_file)) {
    const auto near = nearest(name_or_file, names);
    throw ConfigError(detail::concat(flag, " = ", name_or_file, ": neither a ", kind, " nor a file", near.empty() ? "" : "; did you mean " + near + "?", "; ",
                                     kind, "s: ", fmt::format("{}", fmt::join(names, " "))));
  }
  require(!is_folder(name_or_file), flag, " ", name_or_file, ": is a folder; name a file, or one of the ", kind, "s that tessera plan knows");
  require(std::filesystem::is_regular_file(name_or_file), flag, " ", name_or_file, ": is not a regular file; write it to one, and name that");
  return {read_text_file(flag + " = " + name_or_file, name_or_file), name_or_file};
}

/// And reads it. What is wrong with a file of the user's is said with the flag that named it, and with what was expected ("those of tessera/plan/hardware").
template <class Parse>
auto read_named(const std::string& name_or_file, BuiltInFiles files, const std::string& flag, const std::string& kind, const std::string& like,
                const Parse& parse) {
  const auto [text, origin] = find_text(name_or_file, files, flag, kind);
  try {
    return parse(text, origin);
  } catch (const ConfigError& error) {
    throw ConfigError(detail::concat(flag, " = ", error.what(), "; expected a file such as ", like));
  }
}

/// Reads a table key by key, and refuses what is left.
class TomlTable {
 public:
  TomlTable(const toml::table& table, std::string origin, std::string prefix = {}) : table_(table), origin_(std::move(origin)), prefix_(std::move(prefix)) {}

  /// Above 0.
  std::optional<double> number(const std::string& key) {
    return number(key, "a number above 0", [](double value) { return value > 0; });
  }
  /// What may as well be nothing: a latency, bytes beside others.
  std::optional<double> number_or_none(const std::string& key) {
    return number(key, "0 or a number above it", [](double value) { return value >= 0; });
  }
  /// What there are so many of.
  std::optional<double> count(const std::string& key) {
    return number(key, "a whole number, at least 1", [](double value) { return value >= 1 && value == std::floor(value); });
  }
  double needed(const std::string& key) {
    const auto value = number(key);
    require(value.has_value(), name_of(key), " is missing");
    return *value;
  }
  std::string text(const std::string& key) {
    const toml::node* node = take(key);
    require(node != nullptr, name_of(key), " is missing");
    require(node->is_string(), shown(key, *node), ": expected a text");
    const std::string text = *node->value<std::string>();
    require(text.find('\0') == std::string::npos, shown(key, *node), ": holds a zero, behind which a name ends for whoever reads it; leave the zero out");
    return text;
  }
  std::optional<bool> flag(const std::string& key) {
    const toml::node* node = take(key);
    if (node == nullptr) return std::nullopt;
    require(node->is_boolean(), shown(key, *node), ": expected true or false");
    return node->value<bool>();
  }
  std::optional<TomlTable> table(const std::string& key) {
    const toml::node* node = take(key);
    if (node == nullptr) return std::nullopt;
    require(node->is_table(), shown(key, *node), ": expected a table");
    return TomlTable(*node->as_table(), origin_, prefix_ + key + ".");
  }
  /// As a value of --set would be written.
  std::string written(const std::string& key) {
    const toml::node* node = take(key);
    require(node->is_string() || node->is_boolean() || node->is_number(), shown(key, *node), ": expected a text, a number, true or false");
    if (node->is_string()) return text(key);
    if (node->is_boolean()) return *node->value<bool>() ? "true" : "false";
    return node->is_integer() ? std::to_string(*node->value<int64_t>()) : format_float(*node->value<double>());
  }
  std::vector<std::string> keys() const {
    std::vector<std::string> all;
    for (const auto& [key, node] : table_) all.emplace_back(key.str());
    return all;
  }
  /// `known`: what else could have been meant.
  void end(const std::vector<std::string>& known) const {
    for (const std::string& key : keys()) {
      if (taken_.contains(key)) continue;
      const auto near = nearest(key, known);
      throw ConfigError(detail::concat(name_of(key), " is unknown", near.empty() ? "" : "; did you mean " + near + "?"));
    }
  }
  std::string name_of(const std::string& key) const { return detail::concat(origin_, ": ", prefix_, key); }
  /// With its value, as a refusal names it.
  std::string shown(const std::string& key) const {
    const toml::node* node = table_.get(key);
    return node == nullptr ? name_of(key) : shown(key, *node);
  }

 private:
  std::optional<double> number(const std::string& key, const char* expected, bool (*good)(double)) {
    const toml::node* node = take(key);
    if (node == nullptr) return std::nullopt;
    constexpr double most = 1e9;  // of any figure, in the units of the file: an exabyte of memory
    const auto value = node->value<double>();
    require(value && node->is_number() && good(*value), shown(key, *node), ": expected ", expected);
    require(*value <= most, shown(key, *node), ": expected at most ", format_float(most));
    return value;
  }
  std::string shown(const std::string& key, const toml::node& node) const {
    std::ostringstream value;
    node.visit([&](const auto& one) {
      using Value = std::decay_t<decltype(one)>;
      if constexpr (std::is_same_v<Value, toml::value<std::string>>) {
        value << detail::quoted(one.get());
      } else if constexpr (std::is_same_v<Value, toml::table>) {
        value << "a table";
      } else if constexpr (std::is_same_v<Value, toml::array>) {
        value << "a list";
      } else if constexpr (std::is_same_v<Value, toml::value<double>>) {
        value << format_float(one.get());
      } else {
        value << one;
      }
    });
    return name_of(key) + " = " + std::move(value).str();
  }
  const toml::node* take(const std::string& key) {
    taken_.insert(key);
    return table_.get(key);
  }

  const toml::table& table_;
  std::string origin_, prefix_;
  std::set<std::string> taken_;
};

}  // namespace tessera::plan
