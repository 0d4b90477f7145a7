#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iostream>
#include <new>
#include <string>
#include <string_view>
#include <system_error>

#include <c10/util/Exception.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/common.h"
#include "cli/memory_limit.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/system_reason.h"
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
  reason = tessera::one_line(reason);
  if (!tessera::launch::report_failure(kind, reason)) std::fprintf(stderr, "tessera: %s\n", reason.c_str());
  std::fflush(nullptr);
  // Other ranks may be inside a collective with us: to wait for them would turn a failure into a hang.
  _exit(kind == tessera::launch::Failure::Config ? 2 : 1);
}

// What was printed is the result; a full disk behind a redirection must not pass for success.
void finish_output() {
  const std::string problem = tessera::cli::problem_of_output(stdout);
  if (!problem.empty()) fail(tessera::launch::Failure::Other, "standard output " + problem);
}

// Nobody here calls exit(): a library does that meets what it cannot go on from. libgomp is one, where it cannot start its threads.
void say_that_a_library_ends_us(int exit_code, void*) {
  if (exit_code == 0) return;
  const auto reason = tessera::detail::concat("a library ended this process, and says why above; where it could not create a thread: ", tessera::kNoMoreThreads,
                                              ", such as by run.threads = 1");
  if (!tessera::launch::report_failure(tessera::launch::Failure::Other, reason)) std::fprintf(stderr, "tessera: %s\n", reason.c_str());
}

}  // namespace

/// The program's main, called by start.cpp.
extern "C" int tessera_command(int argc, char** argv) {
  using tessera::launch::Failure;
  tessera::cli::CommandLine line("tessera trains models that do not fit, or do not finish, on one device.", tessera::version());
  tessera::cli::Command program = line.program();
  int exit_code = 0;
  ::on_exit(say_that_a_library_ends_us, nullptr);
  tessera::cli::add_train(program, exit_code);
  tessera::cli::add_eval(program, exit_code);
  tessera::cli::add_generate(program, exit_code);
  tessera::cli::add_tokenize(program, exit_code);
  tessera::cli::add_inspect(program, exit_code);
  tessera::cli::add_convert(program, exit_code);
  tessera::cli::add_plan(program, exit_code);
  tessera::cli::add_schedule(program, exit_code);
  tessera::cli::add_trace(program, exit_code);
  tessera::cli::add_verify(program, exit_code);
  tessera::cli::add_run(program, exit_code);
  tessera::cli::add_bench(program, exit_code);
  // The flags of `run`, and its program's, are read by the launcher as torchrun reads them: "--" included, which the parser would take for its own.
  const bool runs = argc > 1 && std::string_view(argv[1]) == "run";
  try {
    if (const auto answered = line.parse(runs ? 2 : argc, argv)) exit_code = *answered;
  } catch (const tessera::ConfigError& e) {
    fail(Failure::Config, e.what());
  } catch (const tessera::CommError& e) {
    fail(Failure::Comm, e.what());
  } catch (const std::filesystem::filesystem_error& e) {
    fail(Failure::Other, e.path1().string() + ": " + e.code().message());
  } catch (const std::system_error& e) {
    fail(Failure::Other, tessera::reason_of(e));
  } catch (const c10::Error& e) {
    fail(Failure::Other, e.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    char why[512];
    tessera::cli::describe_memory_limit(why, sizeof why);
    fail(Failure::Other, std::string("out of memory: ") + why);
  } catch (const std::exception& e) {
    fail(Failure::Other, e.what());
  }
  finish_output();
  leave(exit_code);
}
