#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

// CLI11 behind three classes: its headers take four seconds of each file that reads them.

namespace tessera::cli {

/// A flag or a word of a command; a handle, valid as long as the CommandLine.
class Option {
 public:
  explicit Option(CLI::Option& option) : option_(&option) {}

  Option& required();
  Option& shows_default();       ///< in --help; as the variable is now
  Option& one_at_a_time();       ///< of a list: each entry behind a flag of its own, so that what follows is not taken for another
  Option& separated_by(char c);  ///< of a list: in one word
  Option& one_of(const std::vector<std::string>& words);
  Option& needs(const std::string& flag);
  Option& hidden();

  bool given() const;
  std::string name() const;

 private:
  CLI::Option* option_;
};

/// One command, to which flags and commands of its own are added; a handle, valid as long as the CommandLine. Variables have to outlive what was parsed.
class Command {
 public:
  explicit Command(CLI::App& app) : app_(&app) {}

  Command add_command(const std::string& name, const std::string& about);
  void requires_command();
  bool has_chosen_command() const;
  /// Names of the flags and words that were given, in their order.
  std::vector<std::string> given() const;

  /// `names`: "--seed", "-o,--output", or without dashes a word by its place. T: a string, int, int64_t, size_t, double, lists of strings and of int64_t, and
  /// what of these may be missing.
  template <class T>
  Option add_option(const std::string& names, T& value, const std::string& about = "");
  /// With what to do with each value in place of a variable.
  Option add_option(const std::string& names, const std::function<void(const std::string&)>& take, const std::string& about);
  Option add_flag(const std::string& names, bool& value, const std::string& about);
  /// "--name{}": a flag that may be given a value, behind "=".
  Option add_flag(const std::string& names, std::string& value, const std::string& about);

  /// All that follows the command's name, --help included, is for `action` to read.
  void takes_all_that_follows();
  void when_chosen(const std::function<void()>& action);

 private:
  CLI::App* app_;
};

/// What the whole program may be given.
class CommandLine {
 public:
  CommandLine(const std::string& about, const std::string& version);
  ~CommandLine();

  Command program();
  /// Does what the chosen command does. Returns an exit code where the parser has answered by itself: 0 for --help and --version, 2 for a refusal, said on
  /// stderr. Throws what the command throws, and ConfigError where the first word is no command.
  std::optional<int> parse(int argc, char** argv);

 private:
  std::unique_ptr<CLI::App> app_;
};

}  // namespace tessera::cli
