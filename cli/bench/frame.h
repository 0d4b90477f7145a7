#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "cli/bench/bench.h"
#include "tessera/comm/world.h"
#include "tessera/core/format.h"
#include "tessera/core/log.h"

/// What every `tessera bench` does around its measuring: ranks of a launcher measure here and the first of them shows the rows; without one, copies of this
/// command are started, and answer in rows.
namespace tessera::cli {

/// Copies of the command over one backend.
struct BenchJob {
  std::string backend;
  std::string said;                    ///< before they start
  std::vector<std::string> arguments;  ///< of the copies, but for those that all benchmarks have
};

/// Their command line: the job's arguments, and what all benchmarks have.
std::vector<std::string> command_of_copies(const BenchFlags& flags, const std::string& bench, const BenchJob& job);

template <class Row>
struct Bench {
  std::string name;  ///< "tp"
  std::vector<BenchJob> jobs;
  std::function<std::vector<Row>()> measure;  ///< on this rank, one of a launcher's; every rank gets the rows
  std::function<std::string(const std::vector<Row>&)> lines;
  std::function<std::vector<Row>(const std::vector<std::string>&)> read;  ///< of such lines
  std::function<void(const std::vector<Row>&)> present;
};

/// `text`, JSON or a table, on standard output, and the picture that --svg asks for.
void show_rows(const BenchFlags& flags, const std::string& text, const std::function<std::string()>& picture);

/// Returns the exit code. `flags` and jobs have been checked.
template <class Row>
int run_bench(const BenchFlags& flags, int nproc, const Bench<Row>& bench) {
  const auto environment = comm::read_environment();
  if (environment.launched) {
    const std::vector<Row> rows = bench.measure();
    if (environment.rank != 0) return 0;
    flags.rows.empty() ? bench.present(rows) : write_file("--rows", flags.rows, bench.lines(rows));
    return 0;
  }
  std::vector<std::string> backends;
  for (const BenchJob& job : bench.jobs) backends.push_back(job.backend);
  check_launchers(backends);
  std::vector<Row> rows;
  for (const BenchJob& job : bench.jobs) {
    log().info("{}", job.said);
    std::vector<std::string> lines;
    if (const int exit_code = rows_of_copies(nproc, job.backend, command_of_copies(flags, bench.name, job), lines); exit_code != 0) return exit_code;
    for (Row& row : bench.read(lines)) rows.push_back(std::move(row));
  }
  bench.present(rows);
  return 0;
}

}  // namespace tessera::cli
