#include "tessera/train/reading.h"

#include <cmath>
#include <filesystem>

#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"
#include "tessera/train/progress.h"

namespace tessera {

FoundTokenizer find_tokenizer(const FoundModel& model, const std::string& flag) {
  const Config& config = model.config;
  FoundTokenizer found;
  const bool is_named = !flag.empty() || config.model.from_hf.empty() || model.checkpoint || config.given.contains("data.tokenizer");
  const std::filesystem::path own = is_named ? "" : std::filesystem::path(config.model.from_hf) / "tokenizer.model";
  if (!is_named && std::filesystem::exists(own)) {
    found.tokenizer = data::Tokenizer::load(own.string(), "--from-hf");
    found.remarks.push_back(own.string() + ": is the tokenizer that is taken; --tokenizer names another");
  } else {
    found.tokenizer = flag.empty() ? data::Tokenizer::load(config.data.tokenizer) : data::Tokenizer::load(flag, "--tokenizer");
    if (!is_named && config.model.vocab_size > found.tokenizer->vocab_size())
      found.remarks.push_back(detail::concat("--from-hf = ", config.model.from_hf, ": brings no tokenizer.model, and the text is read as bytes, ids 0 to ",
                                             found.tokenizer->vocab_size() - 1, " of a vocabulary of ", config.model.vocab_size,
                                             "; name its tokenizer with --tokenizer, unless it was trained on bytes"));
  }
  data::check_vocabulary(*found.tokenizer, config.model.vocab_size);
  if (!model.checkpoint) return found;
  const auto& [folder, manifest, unused, remarks] = *model.checkpoint;
  const auto identity = manifest.agreement.value("data.files", nlohmann::json());  // data_identity()
  if (!identity.is_object() || identity.value("tokenizer", "") == found.tokenizer->fingerprint()) return found;
  const std::string saved = config_of(manifest.progress, folder.string()).data.tokenizer;
  const bool named = !flag.empty() || config.data.tokenizer != saved;
  const std::string knob = flag.empty() ? "data.tokenizer = " + config.data.tokenizer : "--tokenizer = " + flag;
  const std::string what = knob + ": is not the tokenizer that " + folder.string() + " was trained with (" + saved + ", as it was then)";
  require(named, what, "; put that one back, or name it with --tokenizer");
  found.remarks.push_back(what + ": the same ids stand for other text");
  return found;
}

Settings reading_settings(const FoundModel& model, const data::Tokenizer& tokenizer) {
  Settings settings = shared_settings(model.config);
  if (model.checkpoint) {
    const auto& manifest = model.checkpoint->manifest;
    settings.emplace_back("--checkpoint", detail::concat("step ", manifest.step, " of run ", manifest.run.run));
  } else {
    settings.emplace_back("--from-hf", "content " + checkpoint::hugging_face_fingerprint(model.config.model.from_hf));
  }
  settings.emplace_back("--tokenizer", "content " + tokenizer.fingerprint());
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
  remarks.insert(remarks.end(), idle.begin(), idle.end());
  return remarks;
}

}  // namespace tessera
