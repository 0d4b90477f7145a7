#include "tessera/train/reading.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/checkpoint/agreement.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/core/error.h"
#include "tessera/train/inputs.h"
#include "tessera/train/progress.h"
#include "tessera/train/ranks_agree.h"

namespace tessera {

FoundTokenizer find_tokenizer(const FoundModel& model, const std::string& flag) {
  const Config& config = model.config;
  const checkpoint::Manifest* const trained = model.checkpoint ? &model.checkpoint->manifest : nullptr;
  FoundTokenizer found = open_tokenizer(config, trained, {.folder = "--from-hf", .tokenizer = "--tokenizer"}, flag);
  if (!model.checkpoint) return found;
  const auto& folder = model.checkpoint->folder;
  const auto& manifest = model.checkpoint->manifest;
  const auto identity = data_identity(manifest);
  if (identity.empty() || identity.value("tokenizer", "") == found.tokenizer->fingerprint()) return found;
  const std::string saved = config_of(manifest.progress, folder.string()).data.tokenizer;
  const bool named = !flag.empty() || config.data.tokenizer != saved;
  const std::string knob = flag.empty() ? "data.tokenizer = " + config.data.tokenizer : "--tokenizer = " + flag;
  const std::string what = knob + ": is not the tokenizer that " + folder.string() + " was trained with (" + saved + ", as it was then)";
  require(named, what, "; put that one back, or name it with --tokenizer");
  found.remarks.push_back(what + ": the same ids stand for other text");
  return found;
}

int64_t windows_of_a_pass(const FoundModel& model) {
  const bool as_trained = model.checkpoint && model.config.model.router == "expert_choice";
  return as_trained ? trained_config(*model.checkpoint).batch.micro_size : 1;
}

Settings reading_settings(const FoundModel& model, const FoundTokenizer& found) {
  const Config& config = model.config;
  Settings settings = shared_settings(config);
  for (auto& setting : pipeline_settings(config)) settings.push_back(std::move(setting));
  const StartingFiles read = starting_files(model);
  if (model.checkpoint) {
    const auto& [step, run] = std::tie(model.checkpoint->manifest.step, model.checkpoint->manifest.run);
    settings.emplace_back("--checkpoint", detail::concat("step ", step, " of run ", run.run, ", start ", run.start));
    if (read.weights || read.fewer_bits) settings.emplace_back("model.from_hf", "content " + checkpoint::hugging_face_fingerprint(config.model.from_hf));
  } else {
    settings.emplace_back("--from-hf", "content " + checkpoint::hugging_face_fingerprint(config.model.from_hf));
  }
  if (read.adapters) settings.emplace_back("lora.from_peft", "content " + checkpoint::peft_fingerprint(config.lora.from_peft));
  settings.emplace_back("--tokenizer", "content " + found.tokenizer->fingerprint());
  // Where nobody gave it, a file says it, of which each host may have its own.
  std::ranges::find(settings, "data.bos", &Settings::value_type::first)->second = found.bos ? "true" : "false";
  return settings;
}

namespace {

/// Why no run of one rank, as the layout is not the reader's, has such settings; empty: one may.
std::string problem_of_run(Config run) {
  run.mesh = {};
  run.zero = {};
  run.tensor = {};
  run.offload = {};
  if (std::isfinite(run.moe.capacity_factor) && run.moe.capacity_factor > 0) run.moe.capacity_factor = 0;  // what room it leaves, a batch in training says
  try {
    validate(run, 1, Purpose::Plan);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return {};
}

/// Refuses settings without effect that no run takes: neither the one that trained the model, nor one of all that was set. What is read may be what no training
/// takes (weights in fewer bits without adapters), and the rest may mean something beside it alone.
void check_without_effect(const FoundModel& model, const std::vector<std::string>& sets) {
  std::vector<std::string> idle;
  std::ranges::copy_if(sets, std::back_inserter(idle), [&](const auto& set) { return !settings_without_effect_on_reading(model.config, {set}).empty(); });
  if (idle.empty()) return;
  const std::string problem = problem_of_run(trained_config(*model.checkpoint, idle));
  require(problem.empty() || problem_of_run(model.config).empty(), problem);
}

/// Of folders that `sets` name, those that nobody reads.
std::vector<std::string> unread_folders(const FoundModel& model, const std::vector<std::string>& sets) {
  const auto& [from_hf, lora] = std::tie(model.config.model.from_hf, model.config.lora);
  const std::set<std::string> named = parse_config("", std::filesystem::current_path(), sets).given;
  const StartingFiles read = starting_files(model);
  const std::string folder = model.checkpoint ? model.checkpoint->folder.string() : "";
  std::vector<std::string> remarks;
  if (named.contains("lora.from_peft") && !lora.from_peft.empty() && !read.adapters) {
    remarks.push_back(detail::concat("lora.from_peft = ", lora.from_peft,
                                     lora.modules.empty()
                                         ? ": has no effect without lora.modules"
                                         : ": is not read, as adapters are those of " + folder + ", but for what checkpoint.partial lets it lack"));
  }
  if (named.contains("model.from_hf") && !from_hf.empty() && !read.weights && !read.fewer_bits)
    remarks.push_back(detail::concat("model.from_hf = ", from_hf, ": the weights are those of ", folder, ", and that folder's are not read"));
  return remarks;
}

/// Of folders that the run began with, those that are not read for what they do not hold.
std::vector<std::string> folders_without(const FoundModel& model) {
  const StartingFiles read = starting_files(model);
  const auto remark = [&](const std::string& key, const std::string& folder, const char* what) {
    return detail::concat(key, " = ", folder, ", of the run that saved ", model.checkpoint->folder.string(), ": does not hold ", what,
                          " (any more), and is not read: what begins anew is drawn; to read a folder name it (--set ", key, "=DIR)");
  };
  std::vector<std::string> remarks;
  if (read.no_weights) remarks.push_back(remark("model.from_hf", model.config.model.from_hf, "this model"));
  if (read.no_adapters) remarks.push_back(remark("lora.from_peft", model.config.lora.from_peft, "these adapters"));
  return remarks;
}

}  // namespace

std::vector<std::string> reading_remarks(const FoundModel& model, const std::vector<std::string>& sets) {
  auto idle = settings_without_effect_on_reading(model.config, sets);
  for (auto& remark : unread_folders(model, sets)) idle.push_back(std::move(remark));
  if (!model.checkpoint) {
    const LoraConfig& lora = model.config.lora;
    if (!lora.modules.empty() && lora.from_peft.empty())
      idle.push_back(
          detail::concat("lora.modules = ", lora.modules, ": has no effect on a model of --from-hf, which brings no adapters; name theirs by lora.from_peft"));
    return idle;
  }
  check_without_effect(model, sets);
  const auto& [folder, manifest] = std::tie(model.checkpoint->folder, model.checkpoint->manifest);
  auto remarks = model.checkpoint->remarks;
  if (!model.config.checkpoint.partial.empty()) {
    if (auto remark = partial_remark(partial_load(manifest, model.config), folder.string()); !remark.empty()) remarks.push_back(std::move(remark));
  }
  for (auto& remark : folders_without(model)) remarks.push_back(std::move(remark));
  for (const auto& [key, saved, current] : checkpoint::model_disagreements(manifest.agreement, model.config))
    remarks.push_back(detail::concat(folder.string(), ": was trained with ", key, " = ", saved, "; this is another model, with ", current));
  remarks.insert(remarks.end(), idle.begin(), idle.end());
  return remarks;
}

}  // namespace tessera
