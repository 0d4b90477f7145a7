#include "tessera/plan/presets.h"

#include <array>
#include <filesystem>

#include <fmt/format.h>

namespace tessera::plan {

namespace {

struct Shape {
  const char* name;
  const char* family;
  int64_t dim, layers, heads, kv_heads, ffn_dim, vocab_size, seq_len;
  double rope_theta;
  const char* source;
  int64_t experts = 0, experts_per_token = 0;
};

// Shapes as their papers and published configurations give them. Where a family of ours differs from the published one in a detail (Nemotron's
// squared ReLU has two feed-forward matrices where ours has three), ffn_dim is what gives the published number of parameters.
constexpr std::array kShapes{
    Shape{"7b", "llama", 4096, 32, 32, 32, 11008, 32000, 2048, 1e4, "LLaMA, arXiv:2302.13971"},
    Shape{"llama3-8b", "llama", 4096, 32, 32, 8, 14336, 128256, 8192, 5e5, "Llama 3, arXiv:2407.21783"},
    Shape{"llama3-70b", "llama", 8192, 80, 64, 8, 28672, 128256, 8192, 5e5, "Llama 3, arXiv:2407.21783"},
    Shape{"llama3-405b", "llama", 16384, 126, 128, 8, 53248, 128256, 8192, 5e5, "Llama 3, arXiv:2407.21783"},
    Shape{"mistral-large-123b", "llama", 12288, 88, 96, 8, 28672, 32768, 8192, 1e6, "Mistral Large 2, published configuration"},
    Shape{"nemotron4-340b", "llama", 18432, 96, 96, 8, 49152, 256000, 4096, 1e4, "Nemotron-4 340B, arXiv:2406.11704"},
    Shape{"gpt3-175b", "gpt2", 12288, 96, 96, 96, 49152, 50257, 2048, 1e4, "GPT-3, arXiv:2005.14165"},
    Shape{"mixtral-8x7b", "mixtral", 4096, 32, 32, 8, 14336, 32000, 4096, 1e6, "Mixtral, arXiv:2401.04088", 8, 2},
};

}  // namespace

std::optional<Config> preset(const std::string& name, const std::vector<std::string>& sets) {
  for (const auto& s : kShapes) {
    if (name != s.name) continue;
    const std::string text = fmt::format(
        "[model]\nfamily = \"{}\"\ndim = {}\nlayers = {}\nheads = {}\nkv_heads = {}\nffn_dim = {}\nexperts = {}\nexperts_per_token = {}\nvocab_size = "
        "{}\nrope_theta = {:.1f}\ntie_embeddings = {}\n"
        "[data]\nseq_len = {}\n[batch]\nglobal_size = 1024\nmicro_size = 1\n[optim]\nlr = 3e-4\nmax_grad_norm = 1.0\n[precision]\ncompute = "
        "\"bf16\"\n[run]\nsteps = 1000\n",
        s.family, s.dim, s.layers, s.heads, s.kv_heads, s.ffn_dim, s.experts, s.experts_per_token, s.vocab_size, s.rope_theta, std::string(s.family) == "gpt2",
        s.seq_len);
    Config config = parse_config(text, std::filesystem::current_path(), sets, name);
    config.name = name;
    return config;
  }
  return std::nullopt;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const auto& s : kShapes) names.emplace_back(s.name);
  return names;
}

}  // namespace tessera::plan
