#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include <ATen/Context.h>
#include <c10/util/Logging.h>
#include <sched.h>
#include <unistd.h>

#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/core/temporary_place.h"
#include "tessera/launch/local.h"
#include "tessera/launch/run_options.h"
#include "tessera/launch/scratch_folder.h"

namespace tessera::cli {
namespace {

constexpr int c10_errors_only = 2;

launch::Devices devices() {
  cpu_set_t allowed;
  const int cpus = sched_getaffinity(0, sizeof allowed, &allowed) == 0 ? CPU_COUNT(&allowed) : 1;
  return {std::max(1, cpus), at::hasCUDA() ? static_cast<int>(at::detail::getCUDAHooks().deviceCount()) : 0};
}

std::optional<std::string> variable(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value != nullptr ? std::optional<std::string>(value) : std::nullopt;
}

[[noreturn]] void run(const std::vector<std::string>& arguments) {
  launch::AgentOptions options = launch::parse_run(arguments, variable, devices());
  launch::Variables inherited = launch::inherited_variables();
  for (const auto& [name, value] : options.job.variables) inherited[name] = value;
  options.job.variables = std::move(inherited);
  options.job.output.capture_errors = isatty(STDERR_FILENO) == 0;

  // A connection that breaks is what an agent is for; c10d would print a stack trace for each.
  if (!variable("TORCH_CPP_LOG_LEVEL")) FLAGS_caffe2_log_level = c10_errors_only;
  // Flight records of a run without a --log-dir: for the verdict at its end, and then gone.
  std::optional<launch::ScratchFolder> scratch;
  if (options.job.output.folder.empty()) scratch.emplace(temporary_place(), "name a folder that keeps the run's records with --log-dir");
  options.record_folder = scratch ? scratch->path().string() : options.job.output.folder;
  options.keeps_records = !scratch;
  leave_signals_to_the_launcher();
  const int exit_code = launch::run_agent(options);
  scratch.reset();
  std::fflush(nullptr);
  _exit(exit_code);  // a thread that waits for a host that does not answer must not hold us up
}

}  // namespace

void add_run(Command app, int&) {
  auto command = app.add_command("run", "Start ranks of any program on this and other machines (torchrun's flags)");
  command.takes_all_that_follows();
  // Read as they were written: what follows the program is the program's, "--" and "--help" included.
  command.when_chosen([] {
    std::vector<std::string> arguments = launch::self_command();
    arguments.erase(arguments.begin(), std::ranges::find(arguments, "run") + 1);
    const bool help = !arguments.empty() && (arguments.front() == "--help" || arguments.front() == "-h");
    if (!help) run(arguments);
    std::printf("%s", launch::describe_run().c_str());
  });
}

}  // namespace tessera::cli
