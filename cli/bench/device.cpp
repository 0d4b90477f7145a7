#include "cli/bench/device.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <c10/core/InferenceMode.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/bench/bench.h"
#include "cli/bench/rows.h"
#include "cli/common.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/host_name.h"
#include "tessera/kernels/fp32_products.h"
#include "tessera/kernels/products.h"
#include "tessera/memory/host_memory.h"
#include "tessera/plan/collective_time.h"
#include "tessera/plan/rates_picture.h"

// A CPU is planned like any other device: a rate of products, a memory, and what an operator costs that does nothing. Its host is the device itself, so what
// asking for an operator takes stands between operators (gap_us), and the host is never ahead.

namespace tessera::bench {
namespace {

double seconds_of(const std::function<void()>& call, const Limits& limits) {
  const Ranks alone{.barrier = [] {}, .slowest = [](const std::vector<double>& mine) { return mine; }};
  return measure(alone, call, limits).median_us * 1e-6;
}

double product_rate(int64_t m, int64_t n, int64_t k, at::ScalarType type, const Limits& limits) {
  const at::Tensor a = at::randn({m, k}).to(type), b = at::randn({n, k}).to(type);
  at::Tensor result = at::empty({m, n}, a.options());
  return 2.0 * static_cast<double>(m * n * k) / seconds_of([&] { at::mm_out(result, a, b.t()); }, limits);
}

double attention_rate(at::ScalarType type, const Limits& limits) {
  constexpr int64_t heads = 8, tokens = 512, features = 64;
  const at::Tensor q = at::randn({1, heads, tokens, features}).to(type);
  const double flops = 2.0 * heads * tokens * tokens * features;  // causal: half of the four
  return flops / seconds_of([&] { (void)at::scaled_dot_product_attention(q, q, q, {}, 0.0, /*is_causal=*/true); }, limits);
}

/// Bytes read and written a second, of tensors that no cache holds.
double memory_rate(const Limits& limits) {
  constexpr int64_t elements = int64_t{16} << 20;
  const at::Tensor from = at::randn({elements});
  at::Tensor into = at::empty({elements});
  return 2.0 * elements * static_cast<double>(sizeof(float)) / seconds_of([&] { into.copy_(from); }, limits);
}

}  // namespace

plan::Device measure_device(const Limits& limits) {
  const c10::InferenceMode inference;
  const kernels::FastProducts fast;
  const std::string processor = processor_name();
  plan::Device device{.key = "this machine", .name = fmt::format("{}, {} threads", processor.empty() ? "CPU" : processor, at::get_num_threads())};
  device.memory_bytes = static_cast<double>(host_memory_bytes());
  device.memory_bytes_per_s = memory_rate(limits);
  device.host = plan::HostSide{.link = "its own memory", .bytes_per_s = device.memory_bytes_per_s / 2, .memory_bytes_per_s = device.memory_bytes_per_s};
  constexpr std::array<std::array<int64_t, 3>, 3> shapes{{{512, 512, 512}, {1024, 1024, 1024}, {512, 2048, 1024}}};
  double share = 1;
  const auto add = [&](const std::string& format, at::ScalarType type) {
    double best = 0, sum = 0;
    for (const auto& [m, n, k] : shapes) {
      const double rate = product_rate(m, n, k, type, limits);
      best = std::max(best, rate);
      sum += rate;
    }
    device.flops_per_s[format] = best;
    share = std::min(share, sum / static_cast<double>(shapes.size()) / best);
    return best;
  };
  const double best = add("fp32", at::kFloat);
  if (!kernels::is_widened(at::kBFloat16, at::kCPU)) add("bf16", at::kBFloat16);
  const at::Tensor few = at::ones({16});
  device.reaches = {{"multiprocessors", 1},
                    {"products", share},
                    {"attention", std::min(1.0, attention_rate(at::kFloat, limits) / best)},
                    {"memory", 1},
                    {"host", 1},
                    {"host_memory", 1},
                    {"launch_us", 0.01},
                    {"collective_launch_us", 0.01},
                    {"gap_us", 1e6 * seconds_of([&] { (void)few.add(few); }, limits)}};
  device.sources["device"] = "tessera bench device";
  return device;
}

void add_links(plan::Device& device, const AllReduces& measured) {
  const double sent = 2.0 * static_cast<double>(measured.large_bytes) * (measured.ranks - 1) / measured.ranks;
  const double rate = sent / std::max(1e-9, measured.large - measured.small);
  device.inside = plan::Link{.name = fmt::format("{} ranks of this host", measured.ranks), .bytes_per_s = rate * plan::with_last_sums(measured.ranks)};
  device.reaches["inside"] = 1;
  device.reaches["inside_us"] = 1e6 * measured.small / 2 / std::ceil(std::log2(measured.ranks));
}

}  // namespace tessera::bench

namespace tessera::cli {

namespace {

/// Of the file's text, as whoever reads the file later would draw it.
void draw_rates(const plan::Device& device, const std::string& path) {
  if (path.empty()) return;
  std::vector<plan::Device> data_sheets;
  for (const std::string& name : plan::device_names()) data_sheets.push_back(plan::find_device(name));
  write_file("--svg", path, plan::rates_svg(device, std::move(data_sheets)));
}

int draw_file(const BenchDeviceFlags& flags) {
  require(flags.output.empty(), "--output = ", flags.output, ": --from measures nothing that a file could be written of; leave one out");
  check_output_files({{"--svg", flags.svg}}, {flags.from});
  draw_rates(plan::find_device(flags.from, "--from"), flags.svg);
  return 0;
}

}  // namespace

int bench_device(const BenchDeviceFlags& flags) {
  if (!flags.from.empty()) return draw_file(flags);
  check_limits(flags.seconds, flags.iterations);
  require(flags.threads >= 0 && flags.threads <= 4096, "--threads = ", flags.threads, ": expected 1 to 4096, or 0 for as many as there are");
  require(flags.nproc.value_or(1) >= 1, "--nproc = ", flags.nproc.value_or(1), ": 1 times no all-reduces; give that, or ranks to time them with");
  const int ranks = flags.nproc == 1 ? 1 : bench_ranks(flags.nproc);  // one has no links
  check_output_files({{"--output", flags.output}, {"--svg", flags.svg}}, {});
  if (flags.threads > 0) at::set_num_threads(flags.threads);
  plan::Device device = bench::measure_device({.seconds = flags.seconds, .iterations = flags.iterations});
  device.devices_per_node = ranks;
  device.memory_bytes /= ranks;  // which they share
  if (ranks > 1) {
    std::vector<std::string> lines;
    const std::string sizes = "4K,16M";
    const int failed = rows_of_copies(
        ranks, "auto",
        {"bench", "comm", "--op", "all_reduce", "--backend", "auto", "--algorithm", "engine", "--bytes", sizes, "--seconds", fmt::format("{}", flags.seconds)},
        lines);
    if (failed != 0) return failed;
    bench::AllReduces measured{.ranks = ranks};
    for (const std::string& line : lines) {
      const Row row = nlohmann::json::parse(line).get<Row>();
      const bool small = row.bytes < (1 << 20);
      (small ? measured.small_bytes : measured.large_bytes) = row.whole_bytes;
      (small ? measured.small : measured.large) = row.timing.median_us * 1e-6;
    }
    bench::add_links(device, measured);
  }
  const std::string text = plan::to_toml(device);
  if (!flags.output.empty()) write_file("--output", flags.output, text);
  draw_rates(plan::parse_device(text, flags.output.empty() ? "this machine" : flags.output), flags.svg);
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace tessera::cli
