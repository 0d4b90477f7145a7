#include <algorithm>
#include <cstdio>
#include <utility>

#include <fmt/ranges.h>

#include "cli/bench/bench.h"
#include "cli/bench/layer.h"
#include "cli/common.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/log.h"

namespace tessera::cli {
namespace {

using bench::LayerCase;
using bench::LayerRow;

constexpr int64_t most_hidden = 32768, most_tokens = 1 << 20;

/// What to measure, smallest first, after every check that needs no process.
std::vector<LayerCase> read_cases(const BenchTpFlags& flags, int ranks) {
  require_known("--dtype", flags.dtype, {"fp32", "bf16"});
  require(flags.head_dim >= 2 && flags.head_dim % 2 == 0, "--head-dim = ", flags.head_dim, ": rotary positions turn pairs of features; give an even number");
  const int64_t least_tokens = flags.sequence_parallel ? ranks : 1;
  require(flags.tokens >= least_tokens && flags.tokens <= most_tokens, "--tokens = ", flags.tokens, ": ", least_tokens, " at least",
          flags.sequence_parallel ? " (one a rank, with --sequence-parallel)" : "", ", and at most ", most_tokens);
  std::vector<LayerCase> cases;
  for (const int64_t hidden : flags.hidden) {
    require(hidden > 0 && hidden <= most_hidden && hidden % flags.head_dim == 0, "--hidden = ", hidden, ": must be a multiple of --head-dim = ", flags.head_dim,
            ", and at most ", most_hidden);
    const int64_t heads = hidden / flags.head_dim;
    require(heads >= ranks, "--hidden = ", hidden, ": ", heads, heads == 1 ? " head" : " heads", " of --head-dim = ", flags.head_dim, " cannot be dealt to ",
            ranks, " ranks; give a larger size, smaller heads, or fewer ranks by --nproc");
    cases.push_back({.hidden = hidden,
                     .heads = heads,
                     .tokens = flags.tokens,
                     .sequence_parallel = flags.sequence_parallel,
                     .overlap = flags.overlap,
                     .compute = flags.dtype == "bf16" ? at::kBFloat16 : at::kFloat});
  }
  std::ranges::sort(cases, {}, &LayerCase::hidden);
  require(std::ranges::adjacent_find(cases, {}, &LayerCase::hidden) == cases.end(), "--hidden = ", fmt::format("{}", fmt::join(flags.hidden, ",")),
          ": a size stands there twice");
  return cases;
}

std::vector<LayerRow> measure_here(const BenchTpFlags& flags, const std::vector<LayerCase>& cases) {
  const at::Device device = device_for(flags.device, static_cast<int>(bench_ranks(flags.nproc)));
  const auto world = comm::World::from_environment({.backend = flags.backend, .interface = flags.interface});
  std::vector<LayerRow> rows;
  world.guard([&] {
    for (auto what : cases) {
      what.device = device;
      rows.push_back(bench::measure_layer(world.group(), what, {.seconds = flags.seconds, .iterations = flags.iterations}));
    }
  });
  return rows;
}

/// Returns the exit code.
int measure_in_copies(const BenchTpFlags& flags, int nproc, std::vector<LayerRow>& rows) {
  std::vector<std::string> command{"bench", "tp"};
  const auto add = [&](const std::string& flag, const std::string& value) { command.insert(command.end(), {flag, value}); };
  add("--hidden", fmt::format("{}", fmt::join(flags.hidden, ",")));
  add("--tokens", std::to_string(flags.tokens));
  add("--head-dim", std::to_string(flags.head_dim));
  add("--dtype", flags.dtype);
  add("--backend", flags.backend);
  add("--device", flags.device);
  add("--seconds", format_float(flags.seconds));
  if (flags.sequence_parallel) command.emplace_back("--sequence-parallel");
  if (flags.overlap) command.emplace_back("--overlap");
  if (flags.iterations > 0) add("--iterations", std::to_string(flags.iterations));
  if (!flags.interface.empty()) add("--interface", flags.interface);
  std::vector<std::string> lines;
  if (const int exit_code = rows_of_copies(nproc, flags.backend, std::move(command), lines); exit_code != 0) return exit_code;
  rows = bench::read_json_lines(lines);
  return 0;
}

void present(const BenchTpFlags& flags, const std::vector<LayerRow>& rows) {
  std::fputs((flags.json ? bench::json_lines(rows) : bench::format_table(rows)).c_str(), stdout);
  std::fflush(stdout);
  if (!flags.svg.empty()) write_file("--svg", flags.svg, bench::plot(rows));
}

}  // namespace

int bench_tp(const BenchTpFlags& flags) {
  require_known("--backend", flags.backend, comm::engine_names());
  check_limits(flags.seconds, flags.iterations);
  check_output_file("--svg", flags.svg);
  const int nproc = bench_ranks(flags.nproc);
  const auto cases = read_cases(flags, nproc);
  device_for(flags.device, nproc);  // or a refusal
  const auto environment = comm::read_environment();
  if (!environment.launched) {
    check_launchers({flags.backend});
    log().info("a layer over {} ranks", nproc);
    std::vector<LayerRow> rows;
    if (const int exit_code = measure_in_copies(flags, nproc, rows); exit_code != 0) return exit_code;
    present(flags, rows);
    return 0;
  }
  const auto rows = measure_here(flags, cases);
  if (environment.rank != 0) return 0;
  if (flags.rows.empty()) {
    present(flags, rows);
  } else {
    write_file("--rows", flags.rows, bench::json_lines(rows));
  }
  return 0;
}

}  // namespace tessera::cli
