#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

/// Command lines in the manner of torchrun: flags of ours up to the program, whose arguments are its own. Not part of the public surface.
namespace tessera::launch {

struct Flag {
  std::string name{};   ///< "nproc-per-node"; also taken with underscores
  std::string value{};  ///< what it takes, for the help: "N"; empty: a switch
  std::string help{};
  char letter = 0;
  std::string variable{};  ///< of the environment, where the command line does not give it; empty: PET_ and the name
};

/// What was given, by the flags' names.
class FlagValues {
 public:
  std::optional<std::string> text(const std::string& name) const;
  bool given(const std::string& name) const { return text(name).has_value(); }
  /// Throws ConfigError that names flag, value and rule.
  double seconds(const std::string& name, double fallback) const;
  int number(const std::string& name, int low, int fallback) const;

  std::vector<std::pair<std::string, std::string>> values{};
  std::string before_names = "--";  ///< in errors
  std::vector<std::string> rest{};  ///< the program and its arguments
};

using Lookup = std::function<std::optional<std::string>(const std::string& name)>;

/// Reads "--name value", "--name=value", "--na_me", "-l value", "-lvalue", up to the first word that is no flag, or "--". The last one counts. Throws
/// ConfigError, with the nearest known flag, for one that is not in the table, and for one without its value.
FlagValues parse_flags(const std::vector<Flag>& table, const std::vector<std::string>& arguments, const Lookup& environment);

/// One line a flag.
std::string describe_flags(const std::vector<Flag>& table);

}  // namespace tessera::launch
