#include <algorithm>
#include <memory>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cli/bench/attention.h"
#include "cli/bench/frame.h"
#include "cli/common.h"
#include "tessera/comm/backends/factory.h"
#include "tessera/comm/world.h"
#include "tessera/core/error.h"

namespace tessera::cli {
namespace {

using bench::AttentionCase;
using bench::AttentionRow;

constexpr int64_t most_length = 1 << 20, packed_length = 2048, windowed_length = 4096;

/// What to measure, shortest first, after every check that needs no process.
std::vector<AttentionCase> cases_of(const BenchCpFlags& flags, int ranks) {
  require_known("--dtype", flags.dtype, {"fp32", "bf16"});
  require(flags.head_dim >= 1, "--head-dim = ", flags.head_dim, ": the features of a head; give at least 1");
  require(flags.heads >= 1 && flags.kv_heads >= 1 && flags.heads % flags.kv_heads == 0, "--heads = ", flags.heads,
          ": must be a multiple of --kv-heads = ", flags.kv_heads);
  for (const auto& method : flags.methods) require_known("--method", method, bench::attention_methods());
  const bool exchanges = std::ranges::find(flags.methods, "ulysses") != flags.methods.end();
  require(!exchanges || flags.heads >= ranks, "--heads = ", flags.heads, ": ulysses deals them to ", ranks, " ranks; give more, or leave it out of --method");
  std::vector<AttentionCase> cases;
  for (const int64_t length : flags.lengths) {
    require(length >= 2 * ranks && length <= most_length, "--length = ", length, ": ", 2 * ranks, " at least (two parts a rank), and at most ", most_length);
    cases.push_back({.length = length,
                     .heads = flags.heads,
                     .kv_heads = flags.kv_heads,
                     .features = flags.head_dim,
                     .dtype = flags.dtype == "bf16" ? at::kBFloat16 : at::kFloat,
                     .methods = flags.methods});
  }
  std::ranges::sort(cases, {}, &AttentionCase::length);
  return cases;
}

std::vector<AttentionRow> measure_attentions(const BenchCpFlags& flags, std::vector<AttentionCase> cases) {
  const at::Device device = device_for(flags.device, static_cast<int>(bench_ranks(flags.nproc)), "--device");
  for (auto& what : cases) what.device = device;
  const auto recorder = std::make_shared<comm::Recorder>();
  const auto world =
      comm::World::from_environment({.backend = flags.backend, .interface = flags.interface, .device = device, .decorators = {comm::recording(recorder)}});
  const bench::Limits limits{.seconds = flags.seconds, .iterations = flags.iterations};
  std::vector<AttentionRow> rows;
  world.guard([&] {
    for (const auto& what : cases) {
      for (auto& row : bench::measure_attention(world, *recorder, what, limits)) rows.push_back(std::move(row));
    }
    if (world.rank() > 0) return;
    AttentionCase one = cases.front();
    one.length = std::min(cases.back().length, packed_length);
    for (const int64_t documents : {4, 32}) rows.push_back(bench::measure_packed(one, documents, limits));
    one.length = std::min(cases.back().length, windowed_length);
    for (const int64_t part : {32, 8}) rows.push_back(bench::measure_window(one, std::max<int64_t>(one.length / part, 1), limits));
    for (const int64_t length : {1024, 4096, 16384, 65536}) {
      rows.push_back({.kind = "memory",
                      .length = length,
                      .fused = bench::share_of_attention(length, kernels::KernelChoice::Auto),
                      .unfused = bench::share_of_attention(length, kernels::KernelChoice::Reference)});
    }
  });
  return rows;
}

std::vector<std::string> arguments_of(const BenchCpFlags& flags) {
  return {"--length",   fmt::format("{}", fmt::join(flags.lengths, ",")),
          "--heads",    std::to_string(flags.heads),
          "--kv-heads", std::to_string(flags.kv_heads),
          "--head-dim", std::to_string(flags.head_dim),
          "--method",   fmt::format("{}", fmt::join(flags.methods, ",")),
          "--dtype",    flags.dtype};
}

}  // namespace

int bench_cp(const BenchCpFlags& flags) {
  require_known("--backend", flags.backend, comm::engine_names());
  check_limits(flags.seconds, flags.iterations);
  check_output_file("--svg", flags.svg);
  const int nproc = bench_ranks(flags.nproc);
  const auto cases = cases_of(flags, nproc);
  device_for(flags.device, nproc, "--device");  // or a refusal
  return run_bench<AttentionRow>(
      flags, nproc,
      {.name = "cp",
       .jobs = {{flags.backend, fmt::format("attention over {} ranks", nproc), arguments_of(flags)}},
       .measure = [&] { return measure_attentions(flags, cases); },
       .lines = [](const auto& rows) { return bench::json_lines(rows); },
       .read = [](const auto& lines) { return bench::read_attention_rows(lines); },
       .present =
           [&](const auto& rows) { show_rows(flags, flags.json ? bench::json_lines(rows) : bench::format_table(rows), [&] { return bench::plot(rows); }); }});
}

}  // namespace tessera::cli
