#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <ranges>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>
#include <sys/wait.h>
#include <unistd.h>

#include "cli/bench.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/launch/local.h"
#include "tessera/launch/verdict.h"
#include "tessera/launch/worker.h"

namespace tessera::cli {
namespace {

using comm::bench::Row;

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ",") + word;
  return text;
}

/// This command again, for one backend and one algorithm. Its first rank writes the rows into `rows`.
std::vector<std::string> copy_command(const BenchFlags& flags, const std::string& backend, const std::string& algorithm, const std::string& rows) {
  std::vector<std::string> command{launch::self_command().front(), "bench", "comm"};
  const auto add = [&](const std::string& flag, const std::string& value) { command.insert(command.end(), {flag, value}); };
  add("--op", joined(flags.ops));
  add("--backend", backend);
  add("--algorithm", algorithm);
  add("--bytes", joined(flags.bytes));
  add("--dtype", flags.dtype);
  add("--buffer", flags.buffers);
  add("--seconds", format_float(flags.seconds));
  if (flags.iterations > 0) add("--iterations", std::to_string(flags.iterations));
  if (!flags.interface.empty()) add("--interface", flags.interface);
  add("--rows", rows);
  return command;
}

/// Runs mpirun to its end. A rank's reason, where one left it, becomes an exception here, after what mpirun says of it.
bool run_under_mpi(int nproc, const std::vector<std::string>& command) {
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
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return true;
  const auto reason = launch::read_report(report.contents());
  if (!reason)
    throw CommError(
        detail::concat("backend mpi: mpirun ended with ", WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), "; its own words are above"));
  if (reason->kind == launch::Failure::Config) throw ConfigError(reason->reason);
  throw CommError(reason->reason);
}

bool run_here(int nproc, const std::vector<std::string>& command) {
  launch::LocalOptions options;
  options.nproc = nproc;
  options.command = command;
  return launch::run_local(options) == 0;
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

void check_launchers(const BenchPlan& plan) {
  const bool needs_mpi = std::ranges::find(plan.backends, "mpi") != plan.backends.end();
  require(!needs_mpi || in_path("mpirun"),
          "--backend mpi: there is no mpirun in PATH, which starts its ranks; install Open MPI (Debian: openmpi-bin), or leave mpi out");
}

std::optional<std::vector<Row>> measure_in_copies(const BenchFlags& flags, const BenchPlan& plan, const std::string& backend, const std::string& algorithm) {
  const launch::MemoryFile file("tessera_rows");
  const auto command = copy_command(flags, backend, algorithm, file.path());
  if (!(backend == "mpi" ? run_under_mpi(plan.nproc, command) : run_here(plan.nproc, command))) return std::nullopt;
  std::vector<Row> rows;
  std::istringstream lines(file.contents());
  for (std::string line; std::getline(lines, line);) rows.push_back(nlohmann::json::parse(line).get<Row>());
  return rows;
}

}  // namespace tessera::cli
