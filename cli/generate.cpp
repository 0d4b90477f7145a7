#include "tessera/models/generate.h"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/log.h"
#include "tessera/data/tokenizer.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/precision/compute_format.h"
#include "tessera/train/load_model.h"
#include "tessera/train/ranks_agree.h"
#include "tessera/train/reading.h"
#include "tessera/train/stepper.h"

namespace tessera::cli {

namespace {

struct GenerateFlags {
  std::string from_hf, checkpoint, tokenizer, prompt;
  int64_t max_tokens = 100;
  int64_t seed = 0;
  int nproc = 1;
  SampleOptions sample{.temperature = 0.8, .top_k = 40};
  std::vector<std::string> sets;
};

// Length of the longest beginning of `text` that does not end inside a UTF-8 character: a terminal is given whole characters only.
size_t whole_characters(const std::string& text) {
  for (size_t back = 1; back <= 3 && back <= text.size(); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xC0) == 0x80) continue;
    const size_t length = byte >= 0xF0 ? 4 : byte >= 0xE0 ? 3 : byte >= 0xC0 ? 2 : 1;
    return length > back ? text.size() - back : text.size();
  }
  return text.size();
}

/// Writes tokens to stdout as they come.
class Printer {
 public:
  explicit Printer(const data::Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  void prompt(const std::string& text) { std::fputs(text.c_str(), stdout); }

  void token(int64_t token) {
    if (token >= tokenizer_.vocab_size()) return;  // ids that the model has beyond the tokenizer's stand for nothing
    const int32_t id = static_cast<int32_t>(token);
    waiting_ += tokenizer_.decode({&id, 1});
    const size_t ready = whole_characters(waiting_);
    std::fwrite(waiting_.data(), 1, ready, stdout);
    std::fflush(stdout);
    waiting_.erase(0, ready);
  }

  void end() {
    std::fwrite(waiting_.data(), 1, waiting_.size(), stdout);
    std::fputc('\n', stdout);
  }

 private:
  const data::Tokenizer& tokenizer_;
  std::string waiting_;
};

/// Before a rank starts, and before the prompt is printed.
void check_sampling(const SampleOptions& sample) {
  require(sample.temperature >= 0, "--temperature = ", sample.temperature, ": it must be 0 (always the most likely token) or more");
  require(sample.top_k >= 0, "--top-k = ", sample.top_k, ": it must be at least 1, or 0 for all tokens");
  require(sample.top_p > 0 && sample.top_p <= 1, "--top-p = ", sample.top_p, ": it must be above 0, and at most 1 for all tokens");
}

/// As the model cannot see more tokens at once than it was made for.
void say_what_is_forgotten(int64_t tokens, const ModelConfig& model) {
  const int64_t most = model.max_seq_len.value_or(0);
  if (most == 0 || tokens < most) return;
  log().warn(
      "--prompt has {} tokens, and the model sees at most model.max_seq_len = {} at once, those that it makes included: it goes on from the last {} alone",
      tokens, most, std::max<int64_t>(most / 2, 1));
}

/// One text is made by one copy of the model.
void check_layout(const Config& config, int ranks) {
  const auto layout = reading_layout(config, ranks);
  require(layout.copies == 1, "mesh.dp_replicate = ", layout.copies,
          ": one text is continued by one copy of the model; cut its layers over the ranks, --set mesh.tp=", ranks, ", or start fewer");
}

/// All ranks draw every token.
Settings flag_settings(const GenerateFlags& flags) {
  return {{"--prompt", nlohmann::json(flags.prompt).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)},
          {"--max-tokens", std::to_string(flags.max_tokens)},
          {"--seed", std::to_string(flags.seed)},
          {"--temperature", format_float(flags.sample.temperature)},
          {"--top-k", std::to_string(flags.sample.top_k)},
          {"--top-p", format_float(flags.sample.top_p)}};
}

int generate_text(const GenerateFlags& flags) {
  require(flags.max_tokens >= 1, "--max-tokens = ", flags.max_tokens, ": it must be at least 1");
  check_sampling(flags.sample);
  require(flags.seed >= 0, "--seed = ", flags.seed, ": it must be at least 0");
  SampleOptions sample = flags.sample;
  sample.seed = static_cast<uint64_t>(flags.seed);
  auto source = find_model({.from_hf = flags.from_hf, .checkpoint = flags.checkpoint}, flags.sets);
  const Config& config = source.config;
  const auto [tokenizer, said_of_it] = find_tokenizer(source, flags.tokenizer);
  const auto remarks = reading_remarks(source, flags.sets);
  const auto ids = tokenizer->encode(flags.prompt);
  require(!ids.empty(), "--prompt is empty: give the text to continue");
  const std::vector<int64_t> prompt(ids.begin(), ids.end());
  const auto end_of_text = tokenizer->eos() ? std::optional<int64_t>(*tokenizer->eos()) : std::nullopt;
  const int ranks = world_size(flags.nproc);
  check_layout(config, ranks);
  if (starts_copies(flags.nproc)) return run_copies(flags.nproc);

  say_once(remarks);
  say_once(said_of_it);
  Settings settings = reading_settings(source, *tokenizer);
  for (auto& flag : flag_settings(flags)) settings.push_back(std::move(flag));
  if (comm::read_environment().rank == 0) say_what_is_forgotten(static_cast<int64_t>(prompt.size()), config.model);
  auto world = comm::World::from_environment(comm::world_options(config.comm));
  world.guard([&] {
    check_ranks_agree(world.group(), settings);
    precision::settle_compute(source.config, at::kCPU, world.group());
    RankScope scope(config, world.local_size());
    const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, ranks));
    const auto loaded = load_model(source, mesh[mesh_roles(config).layers]);
    std::optional<Printer> printer;  // every rank draws every token, and one writes it
    if (world.rank() == 0) printer.emplace(*tokenizer).prompt(flags.prompt);
    generate(*loaded.model, prompt, flags.max_tokens, sample, end_of_text, [&](int64_t token) {
      if (printer) printer->token(token);
      return true;
    });
    if (printer) printer->end();
  });
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<GenerateFlags>();
  auto* command = app.add_subcommand("generate", "Continue a prompt with a trained model");
  command->add_option("--from-hf", flags->from_hf, "Folder of a Hugging Face model");
  command->add_option("--checkpoint", flags->checkpoint, "A checkpoint, or a folder of checkpoints (the newest valid one)");
  command->add_option("--tokenizer", flags->tokenizer, "byte, or a SentencePiece .model; default: the checkpoint's");
  command->add_option("--prompt", flags->prompt, "Text to continue; of one that fills model.max_seq_len the model sees the end alone, which is said")
      ->required();
  command->add_option("--max-tokens", flags->max_tokens, "Tokens to write at most")->capture_default_str();
  command->add_option("--temperature", flags->sample.temperature, "0: always the most likely token")->capture_default_str();
  command->add_option("--top-k", flags->sample.top_k, "Only the k most likely tokens; 0: all")->capture_default_str();
  command->add_option("--top-p", flags->sample.top_p, "Only the most likely tokens that together reach this probability")->capture_default_str();
  command->add_option("--seed", flags->seed, "The same text for the same seed; 0 to 9223372036854775807")->capture_default_str();
  command->add_option("--nproc", flags->nproc, "Ranks to start on this machine, with --set mesh.tp=N to cut the layers over them")->capture_default_str();
  command->add_option("--set", flags->sets, "key=value, over the model's configuration")->allow_extra_args(false);
  command->callback([flags, &exit_code] { exit_code = generate_text(*flags); });
}

}  // namespace tessera::cli
