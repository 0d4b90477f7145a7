#include <algorithm>
#include <utility>

#include <fmt/ranges.h>

#include "cli/bench/frame.h"
#include "cli/bench/layer.h"
#include "cli/common.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"

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
  const at::Device device = device_for(flags.device, static_cast<int>(bench_ranks(flags.nproc)), "--device");
  const auto world = comm::World::from_environment({.backend = flags.backend, .interface = flags.interface, .device = device});
  std::vector<LayerRow> rows;
  world.guard([&] {
    for (auto what : cases) {
      what.device = device;
      rows.push_back(bench::measure_layer(world.group(), what, {.seconds = flags.seconds, .iterations = flags.iterations}));
    }
  });
  return rows;
}

std::vector<std::string> arguments_of(const BenchTpFlags& flags) {
  std::vector<std::string> arguments{"--hidden",   fmt::format("{}", fmt::join(flags.hidden, ",")),
                                     "--tokens",   std::to_string(flags.tokens),
                                     "--head-dim", std::to_string(flags.head_dim),
                                     "--dtype",    flags.dtype};
  if (flags.sequence_parallel) arguments.emplace_back("--sequence-parallel");
  if (flags.overlap) arguments.emplace_back("--overlap");
  return arguments;
}

}  // namespace

int bench_tp(const BenchTpFlags& flags) {
  require_known("--backend", flags.backend, comm::engine_names());
  check_limits(flags.seconds, flags.iterations);
  check_output_file("--svg", flags.svg);
  const int nproc = bench_ranks(flags.nproc);
  const auto cases = read_cases(flags, nproc);
  device_for(flags.device, nproc, "--device");  // or a refusal
  return run_bench<LayerRow>(
      flags, nproc,
      {.name = "tp",
       .jobs = {{flags.backend, fmt::format("a layer over {} ranks", nproc), arguments_of(flags)}},
       .measure = [&] { return measure_here(flags, cases); },
       .lines = [](const auto& rows) { return bench::json_lines(rows); },
       .read = [](const auto& lines) { return bench::read_json_lines(lines); },
       .present =
           [&](const auto& rows) { show_rows(flags, flags.json ? bench::json_lines(rows) : bench::format_table(rows), [&] { return bench::plot(rows); }); }});
}

}  // namespace tessera::cli
