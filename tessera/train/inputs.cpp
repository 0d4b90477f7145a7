#include "tessera/train/inputs.h"

#include "tessera/checkpoint/agreement.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"
#include "tessera/data/loader.h"

namespace tessera {

namespace {

std::vector<std::filesystem::path> paths(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }

std::optional<ResumePoint> find_resume(const Config& config, bool restarted, std::vector<std::string>& remarks) {
  const auto& from = config.checkpoint;
  const bool latest = from.resume == "latest" || (from.resume.empty() && restarted && !from.dir.empty());
  if (!latest && from.resume.empty()) return std::nullopt;
  if (!latest) {
    const auto problem = checkpoint::problem_with(from.resume, checkpoint::Thoroughness::Hashes);
    require(!problem, "checkpoint.resume = ", from.resume, ": ", problem.value_or(""), "; name another checkpoint, or \"latest\" for the newest valid one");
    return ResumePoint{from.resume, checkpoint::read_manifest(from.resume)};
  }
  require(!from.dir.empty(), "checkpoint.resume = latest: there is no checkpoint.dir to look in; set checkpoint.dir, or name the checkpoint");
  auto found = checkpoint::find_latest(from.dir);
  for (const auto& reason : found.skipped) remarks.push_back("passing over " + reason);
  if (!found.folder) {
    remarks.push_back("no checkpoint in " + from.dir + ": starting afresh");
    return std::nullopt;
  }
  return ResumePoint{*found.folder, checkpoint::read_manifest(*found.folder)};
}

}  // namespace

Config read_config(const std::filesystem::path& file, const std::vector<std::string>& sets) {
  Config config = load_config(file, sets);
  if (!config.model.from_hf.empty()) config.model = checkpoint::read_hugging_face_config(config);
  resolve(config);
  return config;
}

nlohmann::json data_identity(const data::Corpus& corpus) { return {{"content", corpus.content()}, {"tokenizer", corpus.tokenizer()}}; }

Inputs open_inputs(const Config& config, bool restarted) {
  Inputs inputs;
  inputs.tokenizer = data::Tokenizer::load(config.data.tokenizer);
  data::check_vocabulary(*inputs.tokenizer, config.model.vocab_size);
  inputs.corpus = data::Corpus::open_or_build(paths(config.data.files), *inputs.tokenizer, config.data.cache_dir);
  data::check_windows(*inputs.corpus, config.data.seq_len, config.batch.global_size, "batch.global_size");
  if (!config.data.validation_files.empty()) {
    inputs.validation = data::Corpus::open_or_build(paths(config.data.validation_files), *inputs.tokenizer, config.data.cache_dir);
    data::check_windows(*inputs.validation, config.data.seq_len, 1, "data.validation_files");
  }
  inputs.resume = find_resume(config, restarted, inputs.remarks);
  if (inputs.resume) {
    const auto& [folder, manifest] = *inputs.resume;
    checkpoint::check_agreement(manifest.agreement, checkpoint::agreement_of(config, data_identity(*inputs.corpus)), folder.string());
    require(manifest.step <= config.run.steps, "run.steps = ", config.run.steps, ": ", folder.string(), " is already at step ", manifest.step,
            "; raise run.steps, or resume from an earlier checkpoint");
  }
  return inputs;
}

}  // namespace tessera
