#include "tessera/train/inputs.h"

#include <iterator>
#include <limits>

#include "tessera/checkpoint/agreement.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/comm/call_site.h"
#include "tessera/core/error.h"
#include "tessera/data/loader.h"

namespace tessera {

namespace {

std::vector<std::filesystem::path> paths(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }

/// The newest valid checkpoint below step `before`.
std::optional<ResumePoint> find_newest(const Config& config, checkpoint::Thoroughness thoroughness, std::vector<std::string>& remarks,
                                       int64_t before = std::numeric_limits<int64_t>::max()) {
  const auto& dir = config.checkpoint.dir;
  const auto found = checkpoint::find_latest(dir, thoroughness, before);
  for (const auto& reason : found.skipped) remarks.push_back("passing over " + reason);
  if (!found.folder) {
    remarks.push_back("no checkpoint in " + dir + ": starting afresh");
    return std::nullopt;
  }
  return ResumePoint{.folder = *found.folder, .manifest = checkpoint::read_manifest(*found.folder), .newest = true};
}

void refuse_named(const std::string& folder, const std::string& problem) {
  throw ConfigError(detail::concat("checkpoint.resume = ", folder, ": ", problem, "; name another checkpoint, or \"latest\" for the newest valid one"));
}

std::optional<ResumePoint> find_resume(const Config& config, const OpenOptions& options, std::vector<std::string>& remarks) {
  const auto& from = config.checkpoint;
  const bool latest = from.resume == "latest" || (from.resume.empty() && options.restarted && !from.dir.empty());
  if (!latest && from.resume.empty()) return std::nullopt;
  require(!latest || !from.dir.empty(), "checkpoint.resume = latest: there is no checkpoint.dir to look in; set checkpoint.dir, or name the checkpoint");
  const bool known = !options.hashed.empty() && options.hashed == from.resume;
  const bool hashing = from.verify && !known && !options.one_of_several;
  const auto thoroughness = hashing ? checkpoint::Thoroughness::Hashes : checkpoint::Thoroughness::Sizes;
  std::optional<ResumePoint> found;
  if (latest) {
    found = find_newest(config, thoroughness, remarks);
  } else {
    if (const auto problem = checkpoint::problem_with(from.resume, thoroughness)) refuse_named(from.resume, *problem);
    found = ResumePoint{.folder = from.resume, .manifest = checkpoint::read_manifest(from.resume)};
  }
  if (found) found->hashed = hashing || known;
  return found;
}

/// What the checkpoint must agree with. A partial load is there for models that differ.
nlohmann::json agreement_with(const Config& config, const data::Corpus& corpus) {
  auto agreement = checkpoint::agreement_of(config, data_identity(corpus));
  if (config.checkpoint.partial.empty()) return agreement;
  for (auto entry = agreement.begin(); entry != agreement.end();) entry = entry.key().starts_with("model.") ? agreement.erase(entry) : std::next(entry);
  return agreement;
}

void check_fit(const Config& config, const Inputs& inputs) {
  if (!inputs.resume) return;
  const std::string folder = inputs.resume->folder.string();
  const auto& manifest = inputs.resume->manifest;
  checkpoint::check_agreement(manifest.agreement, agreement_with(config, *inputs.corpus), folder);
  require(manifest.step <= config.run.steps, "run.steps = ", config.run.steps, ": ", folder, " is already at step ", manifest.step,
          "; raise run.steps, or resume from an earlier checkpoint");
}

}  // namespace

Config read_config(const std::filesystem::path& file, const std::vector<std::string>& sets) {
  Config config = load_config(file, sets);
  if (!config.model.from_hf.empty()) config.model = checkpoint::read_hugging_face_config(config);
  resolve(config);
  return config;
}

nlohmann::json data_identity(const data::Corpus& corpus) { return {{"content", corpus.content()}, {"tokenizer", corpus.tokenizer()}}; }

Inputs open_inputs(const Config& config, const OpenOptions& options) {
  Inputs inputs;
  inputs.tokenizer = data::Tokenizer::load(config.data.tokenizer);
  data::check_vocabulary(*inputs.tokenizer, config.model.vocab_size);
  inputs.corpus = data::Corpus::open_or_build(paths(config.data.files), *inputs.tokenizer, config.data.cache_dir);
  data::check_windows(*inputs.corpus, config.data.seq_len, config.batch.global_size, "batch.global_size");
  if (!config.data.validation_files.empty()) {
    inputs.validation = data::Corpus::open_or_build(paths(config.data.validation_files), *inputs.tokenizer, config.data.cache_dir);
    data::check_windows(*inputs.validation, config.data.seq_len, 1, "data.validation_files");
  }
  inputs.resume = find_resume(config, options, inputs.remarks);
  check_fit(config, inputs);
  return inputs;
}

void check_hashes(Inputs& inputs, const Config& config, const comm::World& world) {
  const comm::CallSite site("start");
  for (;;) {
    auto& resume = inputs.resume;
    nlohmann::json mine{{"step", resume ? resume->manifest.step : 0}};
    if (resume && config.checkpoint.verify && !resume->hashed) {
      const auto problem =
          checkpoint::problem_with(resume->folder, checkpoint::Thoroughness::Hashes, {.index = world.local_rank(), .parts = world.local_size()});
      if (problem) mine["problem"] = *problem;
    }
    std::string problem;
    for (int rank = 0; const auto& theirs : checkpoint::gather_json(world.group(), mine)) {
      require(theirs["step"] == mine["step"], "checkpoint.resume: rank ", rank, " goes on from step ", theirs["step"].dump(), " and rank ", world.rank(),
              " from step ", mine["step"].dump(), "; let every rank see the same checkpoint.dir");
      if (problem.empty()) problem = theirs.value("problem", "");
      ++rank;
    }
    if (problem.empty()) {
      if (resume) resume->hashed = config.checkpoint.verify;
      return;
    }
    if (!resume->newest) refuse_named(resume->folder.string(), problem);
    inputs.remarks.push_back("passing over " + problem);
    resume = find_newest(config, checkpoint::Thoroughness::Sizes, inputs.remarks, resume->manifest.step);
    check_fit(config, inputs);
  }
}

}  // namespace tessera
