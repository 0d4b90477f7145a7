#include "tessera/plan/presets.h"

#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <limits>
#include <utility>

#include <fmt/format.h>

#include "tessera/core/error.h"

namespace tessera::plan {

namespace {

struct Shape {
  std::string name, family;
  double parameters = 0;  ///< by its name
  int64_t dim = 0, layers = 0, heads = 0, kv_heads = 0, ffn_dim = 0, vocab_size = 0, seq_len = 0;
  double rope_theta = 0;
  std::string source;
  int64_t experts = 0, experts_per_token = 0, sliding_window = 0;
};

// Shapes as their papers and published configurations give them. Where a family of ours differs from the published one in a detail (Nemotron's
// squared ReLU has two feed-forward matrices where ours has three), ffn_dim is what gives the published number of parameters.
const std::array kShapes{
    Shape{"7b", "llama", 7e9, 4096, 32, 32, 32, 11008, 32000, 2048, 1e4, "LLaMA, arXiv:2302.13971"},
    Shape{"30b", "llama", 30e9, 6656, 60, 52, 52, 17920, 32000, 2048, 1e4, "LLaMA's third size, which has 32.5e9 parameters, arXiv:2302.13971"},
    Shape{"llama3-8b", "llama", 8e9, 4096, 32, 32, 8, 14336, 128256, 8192, 5e5, "Llama 3, arXiv:2407.21783"},
    Shape{"llama3-70b", "llama", 70e9, 8192, 80, 64, 8, 28672, 128256, 8192, 5e5, "Llama 3, arXiv:2407.21783"},
    Shape{"llama3-405b", "llama", 405e9, 16384, 126, 128, 8, 53248, 128256, 8192, 5e5, "Llama 3, arXiv:2407.21783"},
    Shape{"mistral-7b", "llama", 7e9, 4096, 32, 32, 8, 14336, 32000, 8192, 1e4, "Mistral 7B, arXiv:2310.06825", 0, 0, 4096},
    Shape{"mistral-large-123b", "llama", 123e9, 12288, 88, 96, 8, 28672, 32768, 8192, 1e6, "Mistral Large 2, published configuration"},
    Shape{"nemotron4-340b", "llama", 340e9, 18432, 96, 96, 8, 49152, 256000, 4096, 1e4, "Nemotron-4 340B, arXiv:2406.11704"},
    Shape{"gpt3-175b", "gpt2", 175e9, 12288, 96, 96, 96, 49152, 50257, 2048, 1e4, "GPT-3, arXiv:2005.14165"},
    Shape{"mixtral-8x7b", "mixtral", 46.7e9, 4096, 32, 32, 8, 14336, 32000, 4096, 1e6, "Mixtral, arXiv:2401.04088", 8, 2},
};

Preset preset_of(const Shape& shape, const std::vector<std::string>& sets) {
  const std::string text = fmt::format(
      "[model]\nfamily = \"{}\"\ndim = {}\nlayers = {}\nheads = {}\nkv_heads = {}\nffn_dim = {}\nexperts = {}\nexperts_per_token = {}\nvocab_size = "
      "{}\nsliding_window = {}\nrope_theta = {:.1f}\ntie_embeddings = {}\n"
      "[data]\nseq_len = {}\n[batch]\nglobal_size = 1024\nmicro_size = 1\n[optim]\nlr = 3e-4\nmax_grad_norm = 1.0\n[precision]\ncompute = "
      "\"bf16\"\n[run]\nsteps = 1000\n",
      shape.family, shape.dim, shape.layers, shape.heads, shape.kv_heads, shape.ffn_dim, shape.experts, shape.experts_per_token, shape.vocab_size,
      shape.sliding_window, shape.rope_theta, shape.family == "gpt2", shape.seq_len);
  Config config = parse_config(text, std::filesystem::current_path(), sets, shape.name);
  config.name = shape.name;
  return {.config = std::move(config), .parameters = shape.parameters, .source = shape.source};
}

/// A LLaMA of `dim`, as deep as comes nearest to `parameters`; and how many it has.
std::pair<Shape, double> llama_of(int64_t dim, double parameters) {
  const int64_t words = 32000, ffn = (8 * dim / 3 + 255) / 256 * 256, heads = dim / (dim >= 1024 ? 128 : 64);
  const double of_layer = static_cast<double>(4 * dim * dim + 3 * dim * ffn + 2 * dim), outside = static_cast<double>(2 * words * dim + dim);
  const auto layers = std::max<int64_t>(1, std::llround((parameters - outside) / of_layer));
  Shape shape{fmt::format("{:g}", parameters), "llama", parameters, dim, layers, heads, heads, ffn, words, 2048, 1e4, "LLaMA's proportions, arXiv:2302.13971"};
  return {std::move(shape), static_cast<double>(layers) * of_layer + outside};
}

/// Published models are some 100 times as wide as they are deep (LLaMA: 85 to 128), small ones less. Of all widths, the one that comes nearest to that and to
/// the count.
Shape shape_of(double parameters) {
  constexpr double kFewest = 1e7, kMost = 1e14;
  require(parameters >= kFewest && parameters <= kMost, "plan: ", fmt::format("{:.15g}", parameters),
          " parameters: a shape is made for counts from 1e7 to 1e14; name a configuration");
  Shape best;
  double least = std::numeric_limits<double>::infinity();
  for (int64_t dim = 128; dim <= 1 << 18; dim += 128) {
    auto [shape, counted] = llama_of(dim, parameters);
    const double off = std::abs(counted / parameters - 1), wide = std::abs(std::log2(static_cast<double>(dim) / static_cast<double>(shape.layers) / 100));
    const double price = 20 * off + wide;  // a percent counts as much as a fifth of a doubling
    if (price >= least) continue;
    least = price;
    best = std::move(shape);
  }
  return best;
}

std::optional<double> count_in(const std::string& text) {
  double count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(count)) return std::nullopt;
  return count;
}

}  // namespace

std::optional<Preset> preset(const std::string& name, const std::vector<std::string>& sets) {
  for (const auto& shape : kShapes) {
    if (name == shape.name) return preset_of(shape, sets);
  }
  if (const auto count = count_in(name)) return preset_of(shape_of(*count), sets);
  return std::nullopt;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& s : kShapes) names.emplace_back(s.name);
  return names;
}

}  // namespace tessera::plan
