#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <sstream>
#include <utility>

#include <fmt/ranges.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/bench/frame.h"
#include "cli/common.h"
#include "tessera/comm/world.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/text_file.h"
#include "tessera/launch/job_end.h"
#include "tessera/launch/local.h"
#include "tessera/launch/worker.h"

namespace tessera::cli {
namespace {

/// Runs mpirun to its end. A rank's reason, where one left it, becomes an exception here, after what mpirun says of it.
int run_under_mpi(int nproc, const std::vector<std::string>& command) {
  std::vector<std::string> mpirun{"mpirun", "-n", std::to_string(nproc), "--oversubscribe"};
  if (geteuid() == 0) mpirun.emplace_back("--allow-run-as-root");
  mpirun.insert(mpirun.end(), command.begin(), command.end());
  const launch::MemoryFile report("tessera_error");
  auto variables = launch::inherited_variables();
  variables["TESSERA_ERROR_FILE"] = report.path();
  const pid_t process = launch::start_worker(mpirun, variables);
  int status = 0;
  while (waitpid(process, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return 0;
  const auto reason = launch::read_report(report.contents());
  if (!reason)
    throw CommError(
        detail::concat("backend mpi: mpirun ended with ", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), "; its own words are above"));
  if (reason->kind == launch::Failure::Config) throw ConfigError(reason->reason);
  throw CommError(reason->reason);
}

int run_here(int nproc, const std::vector<std::string>& command) {
  launch::LocalOptions options;
  options.nproc = nproc;
  options.command = command;
  return launch::run_local(options);
}

bool in_path(const std::string& program) {
  const char* path = std::getenv("PATH");
  std::istringstream folders(path == nullptr ? "" : path);
  for (std::string folder; std::getline(folders, folder, ':');) {
    if (access((std::filesystem::path(folder) / program).c_str(), X_OK) == 0) return true;
  }
  return false;
}

}  // namespace

void check_limits(double seconds, int64_t iterations) {
  constexpr int64_t most = 1'000'000'000;  // whose times alone take 8 GB
  require(iterations >= 0 && iterations <= most, "--iterations = ", iterations, ": it must be at least 1 and at most ", most,
          "; leave it out to measure for --seconds");
  require(seconds > 0 && seconds <= 3600, "--seconds = ", seconds, ": it must be above 0, and at most 3600");
}

int bench_ranks(const std::optional<int>& nproc) {
  const auto environment = comm::read_environment();
  const int ranks = nproc.value_or(environment.launched ? environment.size : 2);
  require(ranks >= 2, "--nproc = ", ranks, ": one rank has nobody to talk to; give at least 2");
  return world_size(ranks);
}

void refuse_unknown(const char* knob, const std::string& name, const std::vector<std::string>& known) {
  throw ConfigError(detail::concat(knob, " = ", name, ": there is none of this name; did you mean ", nearest(name, known), "? There are ",
                                   fmt::format("{}", fmt::join(known, ", "))));
}

void require_known(const char* knob, const std::string& name, const std::vector<std::string>& known) {
  if (std::ranges::find(known, name) == known.end()) refuse_unknown(knob, name, known);
}

void check_launchers(const std::vector<std::string>& backends) {
  const bool needs_mpi = std::ranges::find(backends, "mpi") != backends.end();
  require(!needs_mpi || in_path("mpirun"),
          "--backend mpi: there is no mpirun in PATH, which starts its ranks; install Open MPI (Debian: openmpi-bin), or leave mpi out");
}

int rows_of_copies(int nproc, const std::string& backend, std::vector<std::string> arguments, std::vector<std::string>& rows) {
  const launch::MemoryFile file("tessera_rows");
  arguments.insert(arguments.begin(), launch::self_command().front());
  arguments.insert(arguments.end(), {"--rows", file.path()});
  const int exit_code = backend == "mpi" ? run_under_mpi(nproc, arguments) : run_here(nproc, arguments);
  if (exit_code != 0) return exit_code;
  std::istringstream lines(file.contents());
  for (std::string line; std::getline(lines, line);) rows.push_back(line);
  return 0;
}

std::vector<std::string> command_of_copies(const BenchFlags& flags, const std::string& bench, const BenchJob& job) {
  std::vector<std::string> command{"bench", bench};
  command.insert(command.end(), job.arguments.begin(), job.arguments.end());
  command.insert(command.end(), {"--backend", job.backend, "--device", flags.device, "--seconds", format_float(flags.seconds)});
  if (flags.iterations > 0) command.insert(command.end(), {"--iterations", std::to_string(flags.iterations)});
  if (!flags.interface.empty()) command.insert(command.end(), {"--interface", flags.interface});
  return command;
}

void show_rows(const BenchFlags& flags, const std::string& text, const std::function<std::string()>& picture) {
  std::fputs(text.c_str(), stdout);
  std::fflush(stdout);
  if (!flags.svg.empty()) write_file("--svg", flags.svg, picture());
}

void write_file(const char* knob, const std::string& name, const std::string& text) { write_text_file(detail::concat(knob, " = ", name), name, text); }

}  // namespace tessera::cli
