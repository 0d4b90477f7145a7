#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include <c10/util/Exception.h>
#include <unistd.h>

#include "cli/commands.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/version.h"
#include "tessera/launch/local.h"

namespace {

// Without the destructors of statics: libtorch's give back operator by operator what the process is about to lose, which takes a quarter of a short command's
// time. Whoever has others to tell (MPI) asked to be called at a quick exit.
[[noreturn]] void leave(int exit_code) {
  std::cout.flush();
  std::fflush(nullptr);
  std::quick_exit(exit_code);
}

// The reason of a failure is the last line on stderr. A worker leaves it for its launcher instead, which prints it once for all ranks.
[[noreturn]] void fail(tessera::launch::Failure kind, std::string reason) {
  for (char& c : reason)
    if (c == '\n' || c == '\r') c = ' ';
  if (!tessera::launch::report_failure(kind, reason)) std::fprintf(stderr, "tessera: %s\n", reason.c_str());
  std::fflush(nullptr);
  // Other ranks may be inside a collective with us: to wait for them would turn a failure into a hang.
  _exit(kind == tessera::launch::Failure::Config ? 2 : 1);
}

// What was printed is the result; a full disk behind a redirection must not pass for success.
void finish_output() {
  const bool lost_before = std::ferror(stdout) != 0;
  errno = 0;
  if (std::fflush(stdout) == 0 && !lost_before) return;
  const std::string reason = errno != 0 ? std::string(": ") + std::strerror(errno) : "";
  fail(tessera::launch::Failure::Other, "standard output cannot be written" + reason + "; what it holds is not whole: make room, and run this again");
}

// The first word names a command or is one of few flags; the parser would only say that a command is missing.
void refuse_unknown_word(const CLI::App& app, const std::string& word) {
  std::vector<std::string> known;
  for (const auto* command : app.get_subcommands({})) known.push_back(command->get_name());
  const bool is_flag = word.starts_with('-') && app.get_option_no_throw(word) != nullptr;
  if (word.empty() || is_flag || std::ranges::find(known, word) != known.end()) return;
  const std::string what = word.starts_with('-') ? ": no such flag before a command" : ": no such command; did you mean " + tessera::nearest(word, known) + "?";
  fail(tessera::launch::Failure::Config, word + what + "; --help says what there is");
}

// What is beyond 64 bits the parser takes for the largest number there is.
void refuse_clamped_numbers(CLI::App& app) {
  const auto check = [](const std::string& text) -> std::string {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool beyond = error == std::errc::result_out_of_range && end == text.data() + text.size();
    return beyond ? text + " is beyond 64 bits: expected an integer of at most 9223372036854775807" : "";
  };
  for (auto* command : app.get_subcommands({})) {
    for (auto* option : command->get_options()) {
      if (option->get_type_name() == "INT") option->check(check);
    }
    refuse_clamped_numbers(*command);
  }
}

/// Where a variable of a script was not set: without a word nothing would be written. A prompt may be empty, and --set has its own sentence.
void refuse_empty_values(CLI::App& app) {
  const auto check = [](const std::string& text) -> std::string { return text.empty() ? "is empty: give a value, or leave the flag out" : ""; };
  for (auto* command : app.get_subcommands({})) {
    for (auto* option : command->get_options()) {
      const bool may_be_empty = option->get_positional() || option->check_name("--prompt") || option->check_name("--set");
      if (option->get_type_name() == "TEXT" && !may_be_empty) option->check(check);
    }
    refuse_empty_values(*command);
  }
}

}  // namespace

/// The program's main, called by start.cpp.
extern "C" int tessera_command(int argc, char** argv) {
  using tessera::launch::Failure;
  CLI::App app{"tessera trains models that do not fit, or do not finish, on one device."};
  app.set_version_flag("--version", tessera::version());
  app.require_subcommand(1);
  app.failure_message([](const CLI::App*, const CLI::Error& error) {
    std::string what = error.what();
    constexpr std::string_view no_value = "Could not convert: ";
    if (what.starts_with(no_value)) what = what.substr(no_value.size()) + ": is no value of this flag's kind, or one that is too large for it";
    return "tessera: " + what + "; --help says what there is\n";
  });
  int exit_code = 0;
  tessera::cli::add_train(app, exit_code);
  tessera::cli::add_eval(app, exit_code);
  tessera::cli::add_generate(app, exit_code);
  tessera::cli::add_tokenize(app, exit_code);
  tessera::cli::add_inspect(app, exit_code);
  tessera::cli::add_convert(app, exit_code);
  tessera::cli::add_plan(app, exit_code);
  tessera::cli::add_schedule(app, exit_code);
  tessera::cli::add_trace(app, exit_code);
  tessera::cli::add_verify(app, exit_code);
  tessera::cli::add_run(app, exit_code);
  tessera::cli::add_bench(app, exit_code);
  // The flags of `run`, and its program's, are read by the launcher as torchrun reads them: "--" included, which CLI11 would take for its own.
  refuse_unknown_word(app, argc > 1 ? argv[1] : "");
  refuse_clamped_numbers(app);
  refuse_empty_values(app);
  const bool runs = argc > 1 && std::string_view(argv[1]) == "run";
  try {
    app.parse(runs ? 2 : argc, argv);
  } catch (const CLI::ParseError& e) {
    if (app.exit(e) != 0) leave(2);
    finish_output();
    leave(0);
  } catch (const tessera::ConfigError& e) {
    fail(Failure::Config, e.what());
  } catch (const tessera::CommError& e) {
    fail(Failure::Comm, e.what());
  } catch (const c10::Error& e) {
    fail(Failure::Other, e.what_without_backtrace());
  } catch (const std::exception& e) {
    fail(Failure::Other, e.what());
  }
  finish_output();
  leave(exit_code);
}
