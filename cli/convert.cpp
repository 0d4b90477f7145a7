#include "tessera/checkpoint/convert.h"

#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cli/commands.h"
#include "cli/common.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/train/adapters.h"
#include "tessera/train/found_tokenizer.h"
#include "tessera/train/load_model.h"

namespace tessera::cli {

namespace {

struct ConvertFlags {
  std::string checkpoint, out, to, dtype;
  std::vector<std::string> sets;
  bool merge_lora = false;
  std::optional<int64_t> experts, experts_per_token, seed;
  int64_t max_shard_bytes = checkpoint::ExportOptions{}.max_shard_bytes;
};

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "fp32") return at::kFloat;
  return name == "fp16" ? at::kHalf : at::kBFloat16;
}

/// What --to moe was told; what it was told in vain is refused.
std::optional<checkpoint::Upcycling> upcycling_of(const ConvertFlags& flags) {
  const std::pair<const char*, const std::optional<int64_t>&> given[] = {
      {"--experts", flags.experts}, {"--experts-per-token", flags.experts_per_token}, {"--seed", flags.seed}};
  if (flags.to != "moe") {
    for (const auto& [name, value] : given) {
      require(!value, name, ": says what mixture a dense model becomes, and --to ", flags.to, " writes the model as it is; leave it out, or write --to moe");
    }
    return std::nullopt;
  }
  require(flags.seed.value_or(0) >= 0, "--seed = ", flags.seed.value_or(0), ": it must be at least 0");
  const checkpoint::Upcycling unset;
  return checkpoint::Upcycling{.experts = flags.experts.value_or(unset.experts),
                               .experts_per_token = flags.experts_per_token.value_or(unset.experts_per_token),
                               .seed = static_cast<uint64_t>(flags.seed.value_or(0))};
}

/// By the tokenizer that the run had, which may be gone, or another by now. `folder`: that of model.from_hf can be read.
checkpoint::TextIds text_ids_of(const FoundCheckpoint& source, bool folder) {
  const std::string& name = source.config.data.tokenizer;
  const auto identity = data_identity(source.manifest);
  const auto folders = [&](const auto& tokenizer) { return !folders_other_tokenizer(source.config, tokenizer); };
  std::string problem;
  try {
    const auto tokenizer = data::Tokenizer::load(name);
    const std::string& is = tokenizer->fingerprint();
    if (identity.value("tokenizer", is) == is)
      return {.bos = tokenizer->bos(), .ends = text_ends(source.config, *tokenizer, &source.manifest).ids, .folders = folders(*tokenizer)};
    problem = detail::concat("data.tokenizer = ", name, ": is not the tokenizer that ", source.folder.string(), " was trained with");
  } catch (const ConfigError& error) {
    problem = error.what();
  }
  const bool known = folder && (!identity.contains("tokenizer") || folders(identity.value("tokenizer", std::string())));
  if (!known) say_once({problem + ": config.json is written without the ids at which texts begin and end"});
  return {.folders = known};
}

/// No file that is written says how texts begin: those that do are the tokenizer's, which is not written. Beside adapters stands the folder that they were
/// trained beside, which mostly says it.
void say_how_texts_begin(const FoundCheckpoint& source, const ConvertFlags& flags) {
  const bool begin_so = data_identity(source.manifest).value("bos", false);
  if (!begin_so || (flags.to == "peft" && !source.config.data.bos.value_or(false))) return;
  say_once({detail::concat(source.folder.string(), ": was trained with data.bos = true, an id of their own in front of texts, and ", flags.out,
                           " does not say so: give `train`, `eval` and `generate` of it --set data.bos=true, and elsewhere a tokenizer that puts it "
                           "(add_bos_token)")});
}

/// What lies in a checkpoint is its own.
void check_outside(const std::string& out) {
  std::filesystem::path folder = std::filesystem::weakly_canonical(out).parent_path();
  for (; folder.has_relative_path(); folder = folder.parent_path()) {
    require(!is_there(folder / "manifest.json"), "OUT = ", out, ": lies in the checkpoint ", folder.string(),
            ", which is whole as it is; name a folder elsewhere");
  }
}

/// A checkpoint is written as the run's settings say it is; where the files are that it was made beside is another matter.
void check_sets(const std::vector<std::string>& sets) {
  for (const std::string& set : sets) {
    const std::string key = set.substr(0, set.find('='));
    require(key == "model.from_hf" || key == "data.tokenizer", "--set ", set,
            ": a checkpoint is written as it was trained; only where files are now can be set (model.from_hf, data.tokenizer)");
  }
}

/// The model whose folder, if any, adapters are to name as what they were trained beside. One that is gone cannot be compared.
ModelConfig model_beside(const FoundCheckpoint& source) {
  ModelConfig model = source.config.model;
  if (model.from_hf.empty()) return model;
  if (!is_there(std::filesystem::path(model.from_hf) / "config.json")) {
    say_once({detail::concat("model.from_hf = ", model.from_hf,
                             ": is no folder of a model (any more), so the adapters name none that they were trained beside; "
                             "to name one give --set model.from_hf=DIR")});
    model.from_hf.clear();
    return model;
  }
  check_quantized_source(source.config, {.folder = &source.folder, .manifest = &source.manifest});
  return model;
}

int convert(const ConvertFlags& flags) {
  require(!flags.out.empty(), "OUT is empty: name the folder to write");
  require(flags.max_shard_bytes > 0, "--max-shard-bytes = ", flags.max_shard_bytes, ": it must be at least 1");
  check_sets(flags.sets);
  auto source = find_checkpoint(flags.checkpoint, "CHECKPOINT", flags.sets);
  check_outside(flags.out);
  say_once(source.remarks);
  const LoraConfig& lora = source.config.lora;
  checkpoint::ExportOptions options{.dtype = dtype_of(flags.dtype), .max_shard_bytes = flags.max_shard_bytes, .upcycling = upcycling_of(flags)};
  require(!flags.merge_lora || flags.to != "peft", "--merge-lora: adds adapters to weights, and --to peft writes adapters alone; leave one of the two out");
  for (std::string& name : quantized_weights(source.config)) options.remade.insert(std::move(name));
  options.remake = quantized_weight_maker(source.config);
  options.text_ids = [&](bool folder) { return text_ids_of(source, folder); };
  if (flags.merge_lora) check_quantized_source(source.config, {.folder = &source.folder, .manifest = &source.manifest});
  if (flags.merge_lora) options.lora_scale = lora.alpha / static_cast<double>(lora.rank);
  const auto exported = read_newest(source, [&] {
    return flags.to == "peft" ? checkpoint::export_peft(source.folder, model_beside(source), lora, flags.out, options)
                              : checkpoint::export_hugging_face(source.folder, source.config.model, flags.out, options);
  });
  say_once(exported.remarks);
  say_how_texts_begin(source, flags);
  std::printf("%s: %lld tensors, %lld bytes in %lld %s, from %s\n", flags.out.c_str(), static_cast<long long>(exported.tensors),
              static_cast<long long>(exported.bytes), static_cast<long long>(exported.files), exported.files == 1 ? "file" : "files",
              source.folder.string().c_str());
  const std::string problem = problem_of_output(stdout, flags.out + " is written, and whole");
  if (!problem.empty()) throw Error("standard output " + problem);
  return 0;
}

}  // namespace

void add_convert(Command app, int& exit_code) {
  auto flags = std::make_shared<ConvertFlags>();
  auto command = app.add_command("convert", "Write a checkpoint's weights in another format");
  command.add_option("checkpoint", flags->checkpoint, "A checkpoint, or a folder of checkpoints (the newest valid one)").required();
  command.add_option("out", flags->out, "Folder to write; it must not exist").required();
  command
      .add_option("--to", flags->to,
                  "hf: a Hugging Face model, safetensors and config.json; moe: the same of a Mixtral whose experts begin as a LLaMA's feed-forward layers; "
                  "peft: the adapters of a run with lora.modules alone, in PEFT's format")
      .required()
      .one_of({"hf", "moe", "peft"});
  command.add_option("--set", flags->sets, "model.from_hf=DIR or data.tokenizer=FILE: where what the run read is now").one_at_a_time();
  command.add_flag("--merge-lora", flags->merge_lora, "Adds adapters to the weights: W + alpha / rank * B A");
  command.add_option("--experts", flags->experts, "With --to moe: experts of a block (8)");
  command.add_option("--experts-per-token", flags->experts_per_token, "With --to moe: experts that a token visits (2)");
  command.add_option("--seed", flags->seed, "With --to moe: of the routers (0)");
  command.add_option("--dtype", flags->dtype, "Of the tensors; default: as stored").one_of({"fp32", "fp16", "bf16"});
  command.add_option("--max-shard-bytes", flags->max_shard_bytes, "Of one file; beyond it, several with an index").shows_default();
  command.when_chosen([flags, &exit_code] { exit_code = convert(*flags); });
}

}  // namespace tessera::cli
