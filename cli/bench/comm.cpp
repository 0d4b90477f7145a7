#include <algorithm>
#include <array>
#include <cstdio>
#include <utility>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "cli/bench/frame.h"
#include "cli/bench/measure.h"
#include "cli/bench/plot.h"
#include "cli/bench/rows.h"
#include "cli/common.h"
#include "tessera/comm/algorithms/message_plan.h"
#include "tessera/comm/algorithms/table.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/world.h"
#include "tessera/config/config.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/json_text.h"
#include "tessera/core/log.h"

namespace tessera::cli {
namespace {

using bench::Buffers;
using bench::Workload;

constexpr std::array<std::pair<const char*, at::ScalarType>, 9> dtypes{{{"fp32", at::kFloat},
                                                                        {"fp64", at::kDouble},
                                                                        {"bf16", at::kBFloat16},
                                                                        {"fp16", at::kHalf},
                                                                        {"int64", at::kLong},
                                                                        {"int32", at::kInt},
                                                                        {"int16", at::kShort},
                                                                        {"int8", at::kChar},
                                                                        {"uint8", at::kByte}}};

/// What the flags come to, after every check that needs no process.
struct Sweep {
  std::vector<std::string> ops, backends, algorithms;
  std::vector<int64_t> bytes;
  at::ScalarType dtype = at::kFloat;
  Buffers buffers = Buffers::Plain;
  bench::Limits limits{};
  int nproc = 2;
};

std::string listed(const std::vector<std::string>& names) { return fmt::format("{}", fmt::join(names, ", ")); }

const std::vector<std::string> everything{"all"};

/// "all", or names out of `known`.
std::vector<std::string> chosen(const char* knob, const std::vector<std::string>& asked, const std::vector<std::string>& known) {
  if (asked == everything) return known;
  for (const auto& name : asked) require_known(knob, name, known);
  return asked;
}

std::vector<std::string> chosen_backends(const std::vector<std::string>& asked) {
  auto chosen_ones = chosen("--backend", asked, comm::engine_names());
  if (asked != chosen_ones) std::erase(chosen_ones, "auto");  // all: it is one of the others
  return chosen_ones;
}

/// The engine's own algorithm serves every operation, another one those that have it.
bool serves(const std::string& algorithm, const std::string& op) { return algorithm == comm::kEngineAlgorithm || comm::has_algorithm(op, algorithm); }

/// "engine", and the algorithms that one of `ops` has.
std::vector<std::string> algorithms_of(const std::vector<std::string>& ops) {
  std::vector<std::string> names{std::string(comm::kEngineAlgorithm)};
  for (const auto& name : comm::algorithm_names()) {
    if (std::ranges::any_of(ops, [&](const auto& op) { return serves(name, op); })) names.push_back(name);
  }
  return names;
}

std::vector<std::string> chosen_algorithms(const std::vector<std::string>& asked, const std::vector<std::string>& ops) {
  if (asked == everything) return algorithms_of(ops);
  for (const auto& name : asked) {  // "two_level:ring:ring" is in no list, but may serve
    if (std::ranges::none_of(ops, [&](const auto& op) { return serves(name, op); })) refuse_unknown("--algorithm", name, algorithms_of(ops));
  }
  return asked;
}

at::ScalarType read_dtype(const std::string& asked) {
  std::vector<std::string> names;
  for (const auto& [name, dtype] : dtypes) {
    if (asked == name) return dtype;
    names.emplace_back(name);
  }
  refuse_unknown("--dtype", asked, names);
}

/// Every check that needs no process.
Sweep read_sweep(const BenchCommFlags& flags) {
  Sweep sweep;
  sweep.ops = chosen("--op", flags.ops, bench::operation_names());
  sweep.backends = chosen_backends(flags.backends);
  sweep.algorithms = chosen_algorithms(flags.algorithms, sweep.ops);
  sweep.dtype = read_dtype(flags.dtype);
  const auto element = static_cast<int64_t>(c10::elementSize(sweep.dtype));
  for (const auto& text : flags.bytes) {
    sweep.bytes.push_back(parse_bytes("--bytes", text));
    require(sweep.bytes.back() % element == 0, "--bytes = ", text, ": not a multiple of the ", element,
            " bytes of an element; give one, or another --dtype than ", flags.dtype);
  }
  require_known("--buffer", flags.buffers, {"plain", "shared"});
  sweep.buffers = flags.buffers == "shared" ? Buffers::Shared : Buffers::Plain;
  check_limits(flags.seconds, flags.iterations);
  check_output_files({{"--table", flags.table}, {"--svg", flags.svg}});
  sweep.limits = {.seconds = flags.seconds, .iterations = flags.iterations};
  sweep.nproc = bench_ranks(flags.nproc);
  const bool on_host = device_for(flags.device, sweep.nproc, "--device").is_cpu();
  require(on_host || sweep.buffers == Buffers::Plain, "--buffer = shared: is memory of this host, and --device = ", flags.device,
          " is not; leave one of them out");
  if (comm::read_environment().launched) {
    require(sweep.backends.size() == 1 && sweep.algorithms.size() == 1, "--backend = ", listed(sweep.backends), ", --algorithm = ", listed(sweep.algorithms),
            ": ranks that a launcher started measure one of each; name one, or run without the launcher");
  }
  return sweep;
}

std::string lines_of(const std::vector<Row>& rows) {
  std::string lines;
  for (const Row& row : rows) lines += json_text(nlohmann::json(row)) + "\n";
  return lines;
}

std::vector<Row> rows_of(const std::vector<std::string>& lines) {
  std::vector<Row> rows;
  for (const auto& line : lines) rows.push_back(nlohmann::json::parse(line).get<Row>());
  return rows;
}

void write_table(const std::string& file, const std::vector<Row>& rows) {
  std::vector<comm::TableRow> table;
  for (const Row& row : rows) {
    if (comm::algorithms_for(row.op).empty()) continue;  // messages between two ranks: nothing to choose
    table.push_back(
        {.op = row.op, .backend = row.backend, .algorithm = row.algorithm, .bytes = row.bytes, .ranks = row.ranks, .time_us = row.timing.median_us});
  }
  comm::write_table(file, table);
}

/// All rows, in the order of operations and sizes, and what is wanted of them.
void present(const BenchCommFlags& flags, const Sweep& sweep, std::vector<Row> rows) {
  for (Row& row : rows) {  // the best link that any algorithm's run over the same backend saw
    for (const Row& other : rows) {
      if (other.backend == row.backend) row.link_bandwidth = std::max(row.link_bandwidth, other.link_bandwidth);
    }
  }
  const auto place = [&](const Row& row) { return std::pair(std::ranges::find(sweep.ops, row.op) - sweep.ops.begin(), row.bytes); };
  std::ranges::stable_sort(rows, {}, place);
  show_rows(flags, flags.json ? lines_of(rows) : format_table(rows), [&] { return plot(rows); });
  if (!flags.table.empty()) write_table(flags.table, rows);
}

/// Measures one backend with one algorithm in this process, one of the ranks. Collective. Every rank gets the rows.
std::vector<Row> measure_here(const BenchCommFlags& flags, const Sweep& sweep, const std::string& backend, const std::string& algorithm) {
  const at::Device device = device_for(flags.device, sweep.nproc, "--device");
  const auto world = comm::World::from_environment({.backend = backend, .interface = flags.interface, .algorithm = algorithm, .device = device});
  std::vector<Row> rows;
  world.guard([&] {
    const auto group = world.group();
    const double link = bench::measure_link(group, {.seconds = std::min(flags.seconds, 0.1), .iterations = flags.iterations}, device);
    for (const auto& op : sweep.ops) {
      if (!serves(algorithm, op)) continue;
      for (const int64_t bytes : sweep.bytes) {
        Workload workload(group, {.op = op, .bytes = bytes, .dtype = sweep.dtype, .buffers = sweep.buffers, .device = device});
        workload.check();
        const auto timing = bench::measure(group, [&] { workload.run(); }, sweep.limits);
        rows.push_back({.op = op,
                        .backend = bench::engine_for(group, device),
                        .algorithm = algorithm,
                        .dtype = flags.dtype,
                        .buffers = flags.buffers,
                        .bytes = bytes,
                        .whole_bytes = workload.whole_bytes(),
                        .ranks = group.size(),
                        .timing = timing,
                        .link_bandwidth = link});
      }
    }
  });
  return rows;
}

BenchJob job_of(const BenchCommFlags& flags, const Sweep& sweep, const std::string& backend, const std::string& algorithm) {
  return {.backend = backend,
          .said = fmt::format("{} ranks over {} with algorithm {}", sweep.nproc, backend, algorithm),
          .arguments = {"--op", fmt::format("{}", fmt::join(flags.ops, ",")), "--algorithm", algorithm, "--bytes",
                        fmt::format("{}", fmt::join(flags.bytes, ",")), "--dtype", flags.dtype, "--buffer", flags.buffers}};
}

}  // namespace

int bench_comm(const BenchCommFlags& flags) {
  const Sweep sweep = read_sweep(flags);
  std::vector<BenchJob> jobs;
  for (const auto& backend : sweep.backends) {
    for (const auto& algorithm : sweep.algorithms) jobs.push_back(job_of(flags, sweep, backend, algorithm));
  }
  return run_bench<Row>(flags, sweep.nproc,
                        {.name = "comm",
                         .jobs = std::move(jobs),
                         .measure = [&] { return measure_here(flags, sweep, sweep.backends.front(), sweep.algorithms.front()); },
                         .lines = lines_of,
                         .read = rows_of,
                         .present = [&](const auto& rows) { present(flags, sweep, rows); }});
}

}  // namespace tessera::cli
