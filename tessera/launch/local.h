#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::launch {

struct LocalOptions {
  int nproc = 1;
  std::vector<std::string> command = {};                              ///< program (looked up in PATH) and arguments
  std::vector<std::pair<std::string, std::string>> environment = {};  ///< set in every worker, over what it inherits
  double grace_s = 30;  ///< between handing on a signal, by which ranks save and end, and ending them by SIGKILL; after a failure at most 3 s
};

/// This very program with the arguments it was started with, to be started again as workers.
std::vector<std::string> self_command();

/// Starts `nproc` processes of `command` on this machine and waits for them. Returns the exit code of the whole:
///   0  every rank ended with 0
///   2  a rank refused its input (exit 2); its reason is the last line on stderr, once
///   1  anything else; the last line on stderr names rank and cause
///
/// Workers inherit standard output and error and find torchrun's variables (docs/launch.md); this process serves the store, so no port is raced for, and a rank
/// 0 that dies does not take the store along.
///
/// A rank that dies ends all: the others get SIGTERM, and SIGKILL later. SIGINT, SIGTERM and SIGHUP to this process are handed to
/// every rank once, whatever threads this process has; the same signal again, more than a second later, ends those that are left by SIGKILL. If this process is
/// killed, the kernel kills its workers. One launch at a time in a process. Throws ConfigError for nproc < 1, an empty command, or a program that cannot be
/// started.
int run_local(const LocalOptions& options);

/// What ended a worker; tells a cause from its consequences on other ranks.
enum class Failure { Config, Comm, Other };

/// Worker's side: leaves a one-line reason for the launcher, which prints it once for all ranks. False where no launcher of ours waits for it
/// (TESSERA_ERROR_FILE unset or not writable): print it yourself.
bool report_failure(Failure kind, std::string_view reason);

}  // namespace tessera::launch
