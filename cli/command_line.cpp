#include "cli/command_line.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>

#include <CLI/CLI.hpp>

#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"

namespace tessera::cli {
namespace {

// The first word names a command or is one of few flags; the parser would only say that a command is missing.
void refuse_unknown_word(const CLI::App& app, const std::string& word) {
  std::vector<std::string> known;
  for (const auto* command : app.get_subcommands({})) known.push_back(command->get_name());
  const bool is_flag = word.starts_with('-') && app.get_option_no_throw(word) != nullptr;
  if (word.empty() || is_flag || std::ranges::find(known, word) != known.end()) return;
  const std::string what = word.starts_with('-') ? ": no such flag before a command" : ": no such command; did you mean " + nearest(word, known) + "?";
  throw ConfigError(word + what + "; --help says what there is");
}

// What is beyond 64 bits the parser takes for the largest number there is, and 010 for 8.
std::string problem_of_integer(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool read = error != std::errc::invalid_argument && end == text.data() + text.size();
  if (read && error == std::errc::result_out_of_range) return text + " is beyond 64 bits: expected an integer of at most 9223372036854775807";
  return read && text == std::to_string(value) ? "" : text + ": expected an integer in decimal digits, such as 8, without a 0 in front";
}

// The parser reads hexadecimal ones, too.
std::string problem_of_number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error != std::errc::invalid_argument && end == text.data() + text.size() ? "" : text + ": expected a decimal number, such as 0.5";
}

// Where a variable of a script was not set, a text would be none without a word, and a number 0.
std::string problem_of_nothing(const std::string& text) { return text.empty() ? "is empty: give a value, or leave the flag out" : ""; }

// A prompt may be empty, and --set has its own sentence.
void check_values(CLI::App& app) {
  for (auto* command : app.get_subcommands({})) {
    for (auto* option : command->get_options()) {
      const std::string type = option->get_type_name();
      const bool may_be_empty = option->get_positional() || option->check_name("--prompt") || option->check_name("--set");
      if (!type.empty() && !may_be_empty) option->check(problem_of_nothing);
      if (type == "INT" || type == "UINT") option->check(problem_of_integer);
      if (type == "FLOAT") option->check(problem_of_number);
    }
    check_values(*command);
  }
}

// The parser's own sentence has them from the last to the first.
std::string refuse_extras(const CLI::App& app) {
  const std::vector<std::string> words = app.remaining(true);
  std::string what = words.size() == 1 ? "The following argument was not expected:" : "The following arguments were not expected:";
  for (const auto& word : words) what += ' ' + word;
  const auto flag = std::ranges::find_if(words, [](const std::string& word) { return word.starts_with("--") && word.size() > 2; });
  if (flag == words.end()) return what;
  const CLI::App* command = &app;
  while (!command->get_subcommands().empty()) command = command->get_subcommands().front();
  std::vector<std::string> known;
  for (const auto* option : command->get_options()) {
    for (const auto& name : option->get_lnames()) known.push_back("--" + name);
  }
  return what + "; the flag nearest to " + *flag + " is " + nearest(flag->substr(0, flag->find('=')), known);
}

std::string refusal(const CLI::App* app, const CLI::Error& error) {
  std::string what = dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr ? refuse_extras(*app) : error.what();
  constexpr std::string_view no_value = "Could not convert: ";
  constexpr std::string_view once = ": At Most 1 required but received ", unasked = "The following argument was not expected: ";
  if (what.starts_with(no_value)) what = what.substr(no_value.size()) + ": is no value of this flag's kind, or one that is too large for it";
  if (const size_t at = what.find(once); at != std::string::npos)
    what = what.substr(0, at) + ": is given " + what.substr(at + once.size()) + " times; give it once";
  if (what == unasked) what = "an argument is empty, and nothing is expected there: was a variable not set?";
  return "tessera: " + one_line(what) + "; --help says what there is\n";
}

}  // namespace

Option& Option::required() { return option_->required(), *this; }
Option& Option::shows_default() { return option_->capture_default_str(), *this; }
Option& Option::one_at_a_time() { return option_->allow_extra_args(false), *this; }
Option& Option::separated_by(char c) { return option_->delimiter(c), *this; }
Option& Option::one_of(const std::vector<std::string>& words) { return option_->check(CLI::IsMember(words)), *this; }
Option& Option::needs(const std::string& flag) { return option_->needs(flag), *this; }
Option& Option::hidden() { return option_->group(""), *this; }
bool Option::given() const { return option_->count() > 0; }
std::string Option::name() const { return option_->get_name(); }

Command Command::add_command(const std::string& name, const std::string& about) { return Command(*app_->add_subcommand(name, about)); }
void Command::requires_command() { app_->require_subcommand(1); }
bool Command::has_chosen_command() const { return !app_->get_subcommands().empty(); }
std::vector<std::string> Command::given() const {
  std::vector<std::string> names;
  for (const CLI::Option* option : app_->parse_order()) names.push_back(option->get_name());
  return names;
}

template <class T>
Option Command::add_option(const std::string& names, T& value, const std::string& about) {
  return Option(*app_->add_option(names, value, about));
}
template Option Command::add_option(const std::string&, std::string&, const std::string&);
template Option Command::add_option(const std::string&, int&, const std::string&);
template Option Command::add_option(const std::string&, int64_t&, const std::string&);
template Option Command::add_option(const std::string&, size_t&, const std::string&);
template Option Command::add_option(const std::string&, double&, const std::string&);
template Option Command::add_option(const std::string&, std::vector<std::string>&, const std::string&);
template Option Command::add_option(const std::string&, std::vector<int64_t>&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<std::string>&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<int>&, const std::string&);
template Option Command::add_option(const std::string&, std::optional<int64_t>&, const std::string&);

Option Command::add_option(const std::string& names, const std::function<void(const std::string&)>& take, const std::string& about) {
  return Option(*app_->add_option_function<std::string>(names, take, about));
}

Option Command::add_flag(const std::string& names, bool& value, const std::string& about) { return Option(*app_->add_flag(names, value, about)); }
Option Command::add_flag(const std::string& names, std::string& value, const std::string& about) {
  return Option(*app_->add_flag(names, value, about)->multi_option_policy(CLI::MultiOptionPolicy::Throw));
}

void Command::takes_all_that_follows() {
  app_->set_help_flag();
  app_->prefix_command();
  app_->allow_extras();
}

void Command::when_chosen(const std::function<void()>& action) { app_->callback(action); }

CommandLine::CommandLine(const std::string& about, const std::string& version) : app_(std::make_unique<CLI::App>(about)) {
  app_->set_version_flag("--version", version);
  app_->require_subcommand(1);
  app_->failure_message(refusal);
}

CommandLine::~CommandLine() = default;

Command CommandLine::program() { return Command(*app_); }

std::optional<int> CommandLine::parse(int argc, char** argv) {
  refuse_unknown_word(*app_, argc > 1 ? argv[1] : "");
  check_values(*app_);
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app_->exit(error) == 0 ? 0 : 2;
  }
  return std::nullopt;
}

}  // namespace tessera::cli
