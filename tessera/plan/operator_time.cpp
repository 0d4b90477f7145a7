#include "tessera/plan/operator_time.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <string_view>

#include <c10/core/ScalarType.h>

#include "tessera/core/error.h"

// A roofline with two bends. The roof of a product is not the data sheet's, but what its shape lets the device reach: whole waves of whole tiles, each with a
// prologue and an epilogue that computes nothing. This is what tells a layer that is cut eight times from one that is whole, which a constant share of the
// peak does not (docs/plan-accuracy.md has both scores).

namespace tessera::plan {
namespace {

struct Tile {
  int64_t rows, columns;
  double share;  ///< of a multiprocessor's rate: small tiles read more for what they compute
};
constexpr std::array<Tile, 5> kTiles = {{{128, 256, 1.0}, {128, 128, 0.92}, {64, 128, 0.75}, {64, 64, 0.55}, {16, 64, 0.25}}};
constexpr double kEdge = 96;  ///< what a tile's prologue and epilogue take, in columns of its k

int64_t cut(int64_t length, int64_t piece) { return (length + piece - 1) / piece; }

/// As files of devices name it.
std::string key_of(c10::ScalarType type) {
  return type == at::kFloat ? "fp32" : type == at::kHalf ? "fp16" : type == at::kBFloat16 ? "bf16" : type == at::kFloat8_e4m3fn ? "fp8" : c10::toString(type);
}

double rate_of(c10::ScalarType type, const DeviceRates& device) {
  const auto found = device.flops.find(type);
  if (found == device.flops.end()) {
    std::string known;
    for (const auto& [other, rate] : device.flops) known += (known.empty() ? "" : ", ") + key_of(other);
    throw NoRate(detail::concat("the step multiplies in ", key_of(type), ", for which the device of --device has no rate (it has ", known,
                                "); set precision.compute to one of those, or give a file of your own that has tflops.", key_of(type)));
  }
  return found->second;
}

bool starts_with_any(std::string_view name, std::initializer_list<std::string_view> begins) {
  return std::ranges::any_of(begins, [&](std::string_view begin) { return name.starts_with(begin); });
}

bool is_attention(std::string_view name) { return name.find("attention") != std::string_view::npos; }
/// Of rows by groups, each with a matrix of its own.
bool is_grouped(std::string_view name) { return name.starts_with("tessera::grouped_product"); }
/// Whose operands have another type than its result.
bool multiplies_fp8(std::string_view name) { return name.starts_with("aten::_scaled_mm"); }
bool is_product(std::string_view name) {
  return starts_with_any(name, {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul"}) || is_grouped(name) ||
         multiplies_fp8(name);
}
bool is_view(std::string_view name) { return name == "aten::_unsafe_view"; }
/// Whether the operator overwrites its argument without reading it.
bool only_writes(std::string_view name) { return starts_with_any(name, {"aten::copy_", "aten::zero_", "aten::fill_"}); }

double crossing_seconds(int64_t bytes, const DeviceRates& device) { return static_cast<double>(bytes) / (device.memory_bandwidth * device.memory_share); }

/// Attention that has its scores in memory: two products forward, four backward, and what passes over the scores between them.
double plain_attention_seconds(const OperatorEvent& ran, double passes, const DeviceRates& device) {
  const int64_t rows = ran.shape[ran.shape.size() - 2], features = ran.shape.back();
  const int64_t batch = std::accumulate(ran.shape.begin(), ran.shape.end() - 2, int64_t{1}, std::multiplies<>());
  const auto bytes = static_cast<int64_t>(c10::elementSize(ran.dtype));
  const double rate = rate_of(ran.dtype, device);
  const double products = product_seconds(rows, rows, features, batch, bytes, rate, device) + product_seconds(rows, features, rows, batch, bytes, rate, device);
  const double scores = static_cast<double>(batch) * static_cast<double>(rows) * static_cast<double>(rows) * static_cast<double>(bytes);
  return products * (ran.name.find("backward") == std::string::npos ? 1 : 2) + passes * scores / (device.memory_bandwidth * device.memory_share);
}

}  // namespace

bool has_cost(const OperatorEvent& ran, const OperatorHabit* habit) {
  if (ran.flops > 0 || habit != nullptr) return true;
  if (is_attention(ran.name) || !starts_with_any(ran.name, {"aten::", "tessera::"})) return false;
  return !starts_with_any(
      ran.name, {"aten::convolution",  "aten::_convolution", "aten::conv", "aten::slow_conv",        "aten::mkldnn_", "aten::_fft",   "aten::linalg_",
                 "aten::_linalg_",     "aten::cholesky",     "aten::lu_",  "aten::triangular_solve", "aten::geqrf",   "aten::_cdist", "aten::_ctc_loss",
                 "aten::_grouped_mm",  "aten::sort",         "aten::topk", "aten::unique",           "aten::_unique", "aten::histc",  "aten::bincount",
                 "aten::searchsorted", "aten::bucketize"});
}

bool is_copy(const std::string& name) { return starts_with_any(name, {"aten::copy_", "aten::_to_copy"}); }

double product_seconds(int64_t m, int64_t n, int64_t k, int64_t batch, int64_t element_bytes, double flops_per_second, const DeviceRates& device) {
  const double each = flops_per_second * device.product_share / device.multiprocessors;
  double fastest = INFINITY;
  for (const Tile& tile : kTiles) {
    const int64_t tiles = batch * cut(m, tile.rows) * cut(n, tile.columns);
    const auto waves = static_cast<double>(cut(tiles, device.multiprocessors));
    const double of_one = 2.0 * static_cast<double>(tile.rows * tile.columns) * (static_cast<double>(k) / tile.share + kEdge) / each;
    fastest = std::min(fastest, waves * of_one);
  }
  return std::max(fastest, crossing_seconds(element_bytes * batch * (m * k + k * n + m * n), device));
}

double operator_seconds(const OperatorEvent& ran, const DeviceRates& device, const OperatorHabit* habit) {
  if (is_view(ran.name)) return 0;
  if (habit != nullptr && habit->score_passes > 0 && is_attention(ran.name) && ran.shape.size() > 2) {
    return plain_attention_seconds(ran, habit->score_passes, device);
  }
  const int64_t bytes = ran.read_bytes + ran.written_bytes - (only_writes(ran.name) ? ran.written_bytes : 0);
  const double crossing = crossing_seconds(bytes, device) * (habit != nullptr ? habit->passes : 1);
  if (ran.flops == 0) return crossing;
  const c10::ScalarType type = multiplies_fp8(ran.name) ? at::kFloat8_e4m3fn : ran.dtype;
  const double rate = rate_of(type, device);
  if (is_attention(ran.name)) return std::max(ran.flops / (ran.causal ? 2 : 1) / (rate * device.attention_share), crossing);
  if (!is_product(ran.name) || ran.shape.size() < 2) return std::max(ran.flops / (rate * device.product_share), crossing);
  const int64_t m = ran.shape[ran.shape.size() - 2], n = ran.shape.back();
  const int64_t batch = std::accumulate(ran.shape.begin(), ran.shape.end() - 2, int64_t{1}, std::multiplies<>());
  if (m * n * batch == 0) return 0;
  const auto k = static_cast<int64_t>(ran.flops / (2.0 * static_cast<double>(m * n * batch)));
  // By its shape alone one would be of another type, and of groups one matrix would cross the memory for all.
  const bool moves_other_bytes = multiplies_fp8(ran.name) || is_grouped(ran.name);
  return std::max(product_seconds(m, n, k, batch, static_cast<int64_t>(c10::elementSize(type)), rate, device), moves_other_bytes ? crossing : 0);
}

}  // namespace tessera::plan
