#include "tessera/train/reading.h"

#include <algorithm>
#include <cmath>

#include "tessera/checkpoint/agreement.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"
#include "tessera/train/progress.h"

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

Settings reading_settings(const FoundModel& model, const FoundTokenizer& found) {
  Settings settings = shared_settings(model.config);
  if (model.checkpoint) {
    const auto& manifest = model.checkpoint->manifest;
    settings.emplace_back("--checkpoint", detail::concat("step ", manifest.step, " of run ", manifest.run.run));
  } else {
    settings.emplace_back("--from-hf", "content " + checkpoint::hugging_face_fingerprint(model.config.model.from_hf));
  }
  settings.emplace_back("--tokenizer", "content " + found.tokenizer->fingerprint());
  // Where nobody gave it, a file says it, of which each host may have its own.
  std::ranges::find(settings, "data.bos", &Settings::value_type::first)->second = found.bos ? "true" : "false";
  return settings;
}

std::vector<std::string> reading_remarks(const FoundModel& model, const std::vector<std::string>& sets) {
  auto idle = settings_without_effect_on_reading(model.config, sets);
  if (!model.checkpoint) {
    const LoraConfig& lora = model.config.lora;
    if (!lora.modules.empty() && lora.from_peft.empty())
      idle.push_back(
          detail::concat("lora.modules = ", lora.modules, ": has no effect on a model of --from-hf, which brings no adapters; name theirs by lora.from_peft"));
    return idle;
  }
  if (!idle.empty()) {  // of a run of one rank, as its layout is not the reader's
    Config run = model.config;
    run.mesh = {};
    run.zero = {};
    run.tensor = {};
    run.offload = {};
    if (std::isfinite(run.moe.capacity_factor) && run.moe.capacity_factor > 0) run.moe.capacity_factor = 0;  // what room it leaves, a batch in training says
    validate(run, 1, Purpose::Plan);
  }
  auto remarks = model.checkpoint->remarks;
  for (const auto& [key, saved, current] : checkpoint::model_disagreements(model.checkpoint->manifest.agreement, model.config))
    remarks.push_back(detail::concat(model.checkpoint->folder.string(), ": was trained with ", key, " = ", saved, "; this is another model, with ", current));
  remarks.insert(remarks.end(), idle.begin(), idle.end());
  return remarks;
}

}  // namespace tessera
