#include "tessera/train/generate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/core/error.h"
#include "tessera/core/format.h"
#include "tessera/core/json_text.h"
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
  std::string from_hf, checkpoint, tokenizer;
  std::vector<std::string> prompts;
  int64_t max_tokens = 100;
  int64_t samples = 1;  ///< of each prompt
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

/// Writes texts to stdout. One text is written as it is made; of several each comes behind a line that says which it is, and waits for those before it.
class Printer {
 public:
  struct Text {
    std::string title, prompt;
    std::optional<int32_t> last{};  ///< of the prompt's ids
  };
  Printer(const data::Tokenizer& tokenizer, std::vector<Text> texts, int64_t max_tokens, std::set<int64_t> ends)
      : tokenizer_(tokenizer), max_tokens_(max_tokens), ends_(std::move(ends)) {
    for (const Text& text : texts)
      texts_.push_back({.waiting = (texts.size() > 1 ? text.title + "\n" : "") + text.prompt, .decoder = data::StreamDecoder(tokenizer, text.last)});
    write();
  }

  void token(size_t number, int64_t token) {
    Made& text = texts_[number];
    const bool end = ends_.contains(token);
    text.ended = ++text.tokens == max_tokens_ || end;
    const bool stands_for_text = !end && token < tokenizer_.vocab_size();  // ids of the model beyond those stand for nothing
    if (stands_for_text) text.waiting += text.decoder.add(static_cast<int32_t>(token));
    if (text.ended) text.waiting += text.decoder.finish();
    write();
  }

 private:
  struct Made {
    std::string waiting;  ///< to be written
    data::StreamDecoder decoder;
    int64_t tokens = 0;
    bool ended = false;
  };

  void write() {
    while (now_ < texts_.size()) {
      Made& text = texts_[now_];
      const size_t ready = text.ended ? text.waiting.size() : whole_characters(text.waiting);
      std::fwrite(text.waiting.data(), 1, ready, stdout);
      text.waiting.erase(0, ready);
      if (!text.ended) break;
      std::fputc('\n', stdout);
      ++now_;
    }
    std::fflush(stdout);
  }

  const data::Tokenizer& tokenizer_;
  int64_t max_tokens_;
  std::set<int64_t> ends_;
  std::vector<Made> texts_;
  size_t now_ = 0;  ///< that is written
};

/// Before a rank starts, and before the prompt is printed.
void check_sampling(const SampleOptions& sample) {
  require(sample.temperature >= 0 && std::isfinite(sample.temperature), "--temperature = ", sample.temperature,
          ": it must be a number, 0 (always the most likely token) or more");
  require(sample.top_k >= 0, "--top-k = ", sample.top_k, ": it must be at least 1, or 0 for all tokens");
  require(sample.top_p > 0 && sample.top_p <= 1, "--top-p = ", sample.top_p, ": it must be above 0, and at most 1 for all tokens");
}

/// As the model cannot see more tokens at once than it was made for.
void say_what_is_forgotten(size_t prompt, int64_t wanted, const ModelConfig& model) {
  const int64_t most = model.max_seq_len.value_or(0), tokens = static_cast<int64_t>(prompt);
  if (most == 0 || tokens < most) return;
  const int64_t newest = newest_tokens(tokens, most, wanted);
  if (newest == tokens) return;
  log().warn(
      "--prompt has {} tokens, and the model sees at most model.max_seq_len = {} at once, those that it makes included: it goes on from the last {} alone",
      tokens, most, newest);
}

/// A model has learnt nothing of the id that stands for them.
void say_what_cannot_be_spelled(const std::vector<int64_t>& prompt, const data::Tokenizer& tokenizer) {
  const auto unknown = tokenizer.unknown();
  const int64_t unspelled = unknown ? std::ranges::count(prompt, int64_t{*unknown}) : 0;
  if (unspelled == 0) return;
  log().warn("{} of the {} tokens of --prompt are the unknown id, for text that the tokenizer cannot spell: the model goes on from the rest", unspelled,
             prompt.size());
}

/// One text is made by one copy of the model.
void check_layout(const Config& config, int ranks) {
  const auto layout = reading_layout(config, ranks);
  const std::string told_by = comm::read_environment().told_by;
  require(layout.copies == 1, "mesh.dp_replicate = ", layout.copies,
          ": one text is continued by one copy of the model; cut its layers over the ranks, --set mesh.tp=", layout.tensor_ranks * layout.copies,
          ", or deal them as stages, --set mesh.pp=", layout.stage_ranks * layout.copies, ", or start fewer",
          told_by.empty() ? "" : detail::concat(" (there are ", ranks, " by ", told_by, ")"));
}

/// All ranks draw every token, or hear of it.
Settings flag_settings(const GenerateFlags& flags) {
  std::string prompts;
  for (const auto& prompt : flags.prompts) {
    prompts += (prompts.empty() ? "" : ", ") + json_text(nlohmann::json(prompt));
  }
  return {{"--prompt", prompts},
          {"--samples", std::to_string(flags.samples)},
          {"--max-tokens", std::to_string(flags.max_tokens)},
          {"--seed", std::to_string(flags.seed)},
          {"--temperature", format_float(flags.sample.temperature)},
          {"--top-k", std::to_string(flags.sample.top_k)},
          {"--top-p", format_float(flags.sample.top_p)}};
}

/// What the flags ask for: of each prompt so many samples, of which each has a seed of its own, the same beside any others.
struct Wanted {
  std::vector<TextRequest> requests{};
  std::vector<Printer::Text> texts{};
};

Wanted wanted_texts(const GenerateFlags& flags, const FoundTokenizer& found) {
  Wanted wanted;
  for (size_t i = 0; i < flags.prompts.size(); ++i) {
    auto ids = found.tokenizer->encode(flags.prompts[i]);
    require(!ids.empty(), "--prompt is empty: give the text to continue");
    if (found.bos) ids.insert(ids.begin(), found.tokenizer->bos().value());
    for (int64_t sample = 0; sample < flags.samples; ++sample) {
      SampleOptions options = flags.sample;
      options.seed = static_cast<uint64_t>(flags.seed) + static_cast<uint64_t>(sample);
      wanted.requests.push_back({.prompt = {ids.begin(), ids.end()}, .sample = options});
      wanted.texts.push_back({.title = detail::concat("--- prompt ", i + 1, ", seed ", options.seed), .prompt = flags.prompts[i], .last = ids.back()});
    }
  }
  return wanted;
}

int generate_text(const GenerateFlags& flags) {
  require(flags.max_tokens >= 1, "--max-tokens = ", flags.max_tokens, ": it must be at least 1");
  constexpr int64_t kMostSamples = 10'000;
  require(flags.samples >= 1 && flags.samples <= kMostSamples, "--samples = ", flags.samples, ": give the texts to make of each prompt, 1 to ", kMostSamples);
  check_sampling(flags.sample);
  require(flags.seed >= 0, "--seed = ", flags.seed, ": it must be at least 0");
  require(flags.seed <= std::numeric_limits<int64_t>::max() - (flags.samples - 1), "--seed = ", flags.seed, ": with --samples = ", flags.samples,
          " the last would have a seed beyond 64 bits; give a smaller one");
  auto source = find_model({.from_hf = flags.from_hf, .checkpoint = flags.checkpoint}, flags.sets);
  const Config& config = source.config;
  check_generates(config.model);
  const FoundTokenizer found = find_tokenizer(source, flags.tokenizer);
  const data::Tokenizer& tokenizer = *found.tokenizer;
  const auto remarks = reading_remarks(source, flags.sets);
  const Wanted wanted = wanted_texts(flags, found);
  TextEnds ends = text_ends(config, tokenizer, source.checkpoint ? &source.checkpoint->manifest : nullptr);
  const int ranks = world_size(flags.nproc);
  check_layout(config, ranks);
  const at::Device device = device_for(config.run.device, flags.nproc);
  if (starts_copies(flags.nproc)) return run_copies(flags.nproc);

  say_once(remarks);
  say_once(found.remarks);
  say_once(ends.remarks);
  if (comm::read_environment().rank == 0) {
    for (size_t i = 0; i < wanted.requests.size(); i += static_cast<size_t>(flags.samples)) {
      say_what_cannot_be_spelled(wanted.requests[i].prompt, tokenizer);
      say_what_is_forgotten(wanted.requests[i].prompt.size(), flags.max_tokens, config.model);
    }
  }
  auto options = comm::world_options(config.comm);
  options.device = device;
  auto world = comm::World::from_environment(options);
  world.guard([&] {
    choose_together(source, world.group());
    Settings settings = reading_settings(source, found);
    for (auto& flag : flag_settings(flags)) settings.push_back(std::move(flag));
    check_ranks_agree(world.group(), settings);
    take_ends_of_rank_0(ends, world.group());
    precision::settle_compute(source.config, device, world.group());
    RankScope scope(config, world.local_size());
    scope.compute_on(device);
    const Mesh mesh(world, mesh_shape(config.mesh, config.zero.stage, ranks));
    within_memory(config, "give fewer --prompt, --samples or --max-tokens", [&] {
      const auto loaded = load_newest(source, reading_groups(config, mesh), device, world.group());
      ForwardEngine engine(loaded);
      std::optional<Printer> printer;  // every rank knows every token, and one writes it
      if (world.rank() == 0) printer.emplace(tokenizer, wanted.texts, flags.max_tokens, ends.ids);
      const auto print = [&](size_t text, int64_t token) {
        if (printer) printer->token(text, token);
        return !ends.ids.contains(token);
      };
      generate(engine, wanted.requests, {.max_new_tokens = flags.max_tokens, .on_token = print});
    });
  });
  return 0;
}

}  // namespace

void add_generate(Command app, int& exit_code) {
  auto flags = std::make_shared<GenerateFlags>();
  auto command = app.add_command("generate", "Continue a prompt with a trained model");
  command.add_option("--from-hf", flags->from_hf, "Folder of a Hugging Face model");
  command.add_option("--checkpoint", flags->checkpoint, "A checkpoint, or a folder of checkpoints (the newest valid one)");
  command.add_option("--tokenizer", flags->tokenizer, "byte, or a SentencePiece .model; default: the checkpoint's");
  command
      .add_option(
          "--prompt", flags->prompts,
          "Text to continue; of one that fills model.max_seq_len the model sees its end, as much as leaves room for --max-tokens, at least half, which is "
          "said; may be given several times")
      .required()
      .one_at_a_time();
  command.add_option("--samples", flags->samples, "Texts to make of each prompt, with seed, seed + 1, ...").shows_default();
  command.add_option("--max-tokens", flags->max_tokens, "Tokens to write at most").shows_default();
  command.add_option("--temperature", flags->sample.temperature, "0: always the most likely token").shows_default();
  command.add_option("--top-k", flags->sample.top_k, "Only the k most likely tokens; 0: all").shows_default();
  command.add_option("--top-p", flags->sample.top_p, "Only the most likely tokens that together reach this probability").shows_default();
  command.add_option("--seed", flags->seed, "The same text for the same seed; 0 to 9223372036854775807").shows_default();
  command
      .add_option(
          "--nproc", flags->nproc,
          "Ranks to start on this machine, with --set mesh.tp=N to cut the layers over them, mesh.pp=N to deal them as stages, or mesh.cp=N to cut the prompt")
      .shows_default();
  command.add_option("--set", flags->sets, "key=value, over the model's configuration").one_at_a_time();
  add_device_option(command, flags->sets);
  command.when_chosen([flags, &exit_code] { exit_code = generate_text(*flags); });
}

}  // namespace tessera::cli
