#include "tessera/launch/flags.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <utility>

#include "tessera/config/config.h"
#include "tessera/core/error.h"

namespace tessera::launch {
namespace {

std::string with_dashes(std::string name) {
  std::ranges::replace(name, '_', '-');
  return name;
}

std::string variable_of(const Flag& flag) {
  if (!flag.variable.empty()) return flag.variable;
  std::string name = "PET_" + flag.name;
  std::ranges::replace(name, '-', '_');
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::toupper(c); });
  return name;
}

std::string spelling(const Flag& flag) { return (flag.letter != 0 ? std::string("-") + flag.letter + ", " : "    ") + "--" + flag.name; }

[[noreturn]] void refuse_unknown(const std::vector<Flag>& table, const std::string& flag) {
  std::vector<std::string> known;
  for (const Flag& entry : table) known.push_back("--" + entry.name);
  throw ConfigError(detail::concat(flag, ": no such flag; the nearest is ", nearest(with_dashes(flag), known), "; flags of the program come after its name"));
}

/// One flag as it was written: its entry, and its value where one was attached.
struct Written {
  const Flag* flag;
  std::optional<std::string> value;
};

Written read_flag(const std::vector<Flag>& table, const std::string& argument) {
  if (argument.starts_with("--")) {
    const size_t equals = argument.find('=');
    const auto found = std::ranges::find(table, with_dashes(argument.substr(2, equals == std::string::npos ? equals : equals - 2)), &Flag::name);
    if (found == table.end()) refuse_unknown(table, argument.substr(0, equals));
    return {&*found, equals == std::string::npos ? std::nullopt : std::optional(argument.substr(equals + 1))};
  }
  const auto found = std::ranges::find(table, argument[1], &Flag::letter);
  if (found == table.end()) refuse_unknown(table, argument);
  return {&*found, argument.size() > 2 ? std::optional(argument.substr(argument[2] == '=' ? 3 : 2)) : std::nullopt};
}

template <class Number>
Number parse(const std::string& flag, const std::string& text, Number low) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  require(!text.empty() && error == std::errc() && end == text.data() + text.size() && number >= low, flag, " = ", text, ": a number, at least ", low);
  return number;
}

}  // namespace

std::optional<std::string> FlagValues::text(const std::string& name) const {
  const auto found = std::ranges::find(values.rbegin(), values.rend(), name, &std::pair<std::string, std::string>::first);
  return found == values.rend() ? std::nullopt : std::optional(found->second);
}

double FlagValues::seconds(const std::string& name, double fallback) const {
  const auto value = text(name);
  if (!value) return fallback;
  const auto seconds = parse<double>(before_names + name, *value, 0);
  constexpr double most = 1e9;  // 30 years; clocks count nanoseconds in 64 bits
  require(seconds <= most, before_names, name, " = ", *value, ": at most ", most, " seconds");
  return seconds;
}

int FlagValues::number(const std::string& name, int low, int fallback) const {
  const auto value = text(name);
  return value ? parse<int>(before_names + name, *value, low) : fallback;
}

FlagValues parse_flags(const std::vector<Flag>& table, const std::vector<std::string>& arguments, const Lookup& environment) {
  FlagValues found;
  for (const Flag& flag : table) {
    const auto value = environment(variable_of(flag));
    // torchrun's switches are off where their variable says 0.
    if (value && !(flag.value.empty() && (*value == "0" || value->empty()))) found.values.emplace_back(flag.name, *value);
  }
  size_t next = 0;
  for (; next < arguments.size() && arguments[next].size() > 1 && arguments[next][0] == '-'; ++next) {
    if (arguments[next] == "--") {
      ++next;
      break;
    }
    const Written written = read_flag(table, arguments[next]);
    if (written.flag->value.empty()) {
      require(!written.value, "--", written.flag->name, " takes no value; it was given '", written.value.value_or(""), "'");
      found.values.emplace_back(written.flag->name, "1");
      continue;
    }
    require(written.value || next + 1 < arguments.size(), "--", written.flag->name, " takes a value: --", written.flag->name, '=', written.flag->value);
    found.values.emplace_back(written.flag->name, written.value ? *written.value : arguments[++next]);
  }
  found.rest.assign(arguments.begin() + static_cast<std::ptrdiff_t>(next), arguments.end());
  return found;
}

std::string describe_flags(const std::vector<Flag>& table) {
  std::string text;
  for (const Flag& flag : table) {
    std::string left = "  " + spelling(flag) + (flag.value.empty() ? "" : " " + flag.value);
    left.resize(std::max<size_t>(left.size() + 2, 38), ' ');
    text += left + flag.help + "\n";
  }
  return text;
}

}  // namespace tessera::launch
