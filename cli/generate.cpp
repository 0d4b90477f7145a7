#include "tessera/models/generate.h"

#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cli/commands.h"
#include "tessera/core/error.h"
#include "tessera/data/tokenizer.h"
#include "tessera/train/load_model.h"

namespace tessera::cli {

namespace {

struct Flags {
  std::string from_hf, checkpoint, tokenizer, prompt;
  int64_t max_tokens = 100;
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

int generate_text(const Flags& flags) {
  require(flags.max_tokens >= 1, "--max-tokens = ", flags.max_tokens, ": it must be at least 1");
  auto loaded = load_model({.from_hf = flags.from_hf, .checkpoint = flags.checkpoint}, flags.sets);
  const auto tokenizer = data::Tokenizer::load(flags.tokenizer.empty() ? loaded.config.data.tokenizer : flags.tokenizer);
  data::check_vocabulary(*tokenizer, loaded.config.model.vocab_size);
  const auto ids = tokenizer->encode(flags.prompt);
  require(!ids.empty(), "--prompt is empty: give the text to continue");
  const std::vector<int64_t> prompt(ids.begin(), ids.end());

  std::fputs(flags.prompt.c_str(), stdout);
  std::string waiting;
  const auto end_of_text = tokenizer->eos() ? std::optional<int64_t>(*tokenizer->eos()) : std::nullopt;
  generate(*loaded.model, prompt, flags.max_tokens, flags.sample, end_of_text, [&](int64_t token) {
    // Ids that the model has beyond the tokenizer's stand for nothing.
    if (token >= tokenizer->vocab_size()) return true;
    const int32_t id = static_cast<int32_t>(token);
    waiting += tokenizer->decode({&id, 1});
    const size_t ready = whole_characters(waiting);
    std::fwrite(waiting.data(), 1, ready, stdout);
    std::fflush(stdout);
    waiting.erase(0, ready);
    return true;
  });
  std::fwrite(waiting.data(), 1, waiting.size(), stdout);
  std::fputc('\n', stdout);
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, int& exit_code) {
  auto flags = std::make_shared<Flags>();
  auto* command = app.add_subcommand("generate", "Continue a prompt with a trained model");
  command->add_option("--from-hf", flags->from_hf, "Folder of a Hugging Face model");
  command->add_option("--checkpoint", flags->checkpoint, "A checkpoint, or a folder of checkpoints (the newest valid one)");
  command->add_option("--tokenizer", flags->tokenizer, "byte, or a SentencePiece .model; default: the checkpoint's");
  command->add_option("--prompt", flags->prompt, "Text to continue")->required();
  command->add_option("--max-tokens", flags->max_tokens, "Tokens to write at most")->capture_default_str();
  command->add_option("--temperature", flags->sample.temperature, "0: always the most likely token")->capture_default_str();
  command->add_option("--top-k", flags->sample.top_k, "Only the k most likely tokens; 0: all")->capture_default_str();
  command->add_option("--top-p", flags->sample.top_p, "Only the most likely tokens that together reach this probability")->capture_default_str();
  command->add_option("--seed", flags->sample.seed, "The same text for the same seed")->capture_default_str();
  command->add_option("--set", flags->sets, "key=value, over the model's configuration")->allow_extra_args(false);
  command->callback([flags, &exit_code] { exit_code = generate_text(*flags); });
}

}  // namespace tessera::cli
