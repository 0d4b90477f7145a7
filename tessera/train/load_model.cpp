#include "tessera/train/load_model.h"

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/core/error.h"
#include "tessera/nn/meta.h"
#include "tessera/precision/policy.h"
#include "tessera/train/hook_state.h"
#include "tessera/train/progress.h"

namespace tessera {

namespace {

std::filesystem::path checkpoint_folder(const std::filesystem::path& given, const std::string& flag) {
  if (std::filesystem::exists(given / "manifest.json")) return given;
  const auto found = checkpoint::find_latest(given);
  std::string skipped;
  for (const auto& reason : found.skipped) skipped += "; " + reason;
  require(found.folder.has_value(), flag, " ", given.string(), ": no valid checkpoint there", skipped,
          "; name a folder that `tessera train` wrote with checkpoint.dir");
  return *found.folder;
}

std::shared_ptr<LanguageModel> build(const Config& config, at::Device device) {
  auto model = on_meta([&] { return make_model(config.model); });
  precision::apply(*model, precision::policy_from(config.precision));
  materialize(*model, 0, device);
  model->eval();
  return model;
}

}  // namespace

FoundCheckpoint find_checkpoint(const std::filesystem::path& given, const std::string& flag, const std::vector<std::string>& sets) {
  FoundCheckpoint found;
  found.folder = checkpoint_folder(given, flag);
  found.manifest = checkpoint::read_manifest(found.folder);
  const std::string source = found.folder.string();
  Config saved = config_of(found.manifest.progress, source);
  saved.checkpoint = {};  // how that run resumed is not how its checkpoint is to be read
  found.config = parse_config(to_toml(saved), std::filesystem::current_path(), sets, source);
  resolve(found.config);
  return found;
}

LoadedModel load_model(const ModelSource& source, const std::vector<std::string>& sets, at::Device device) {
  require(source.from_hf.empty() != source.checkpoint.empty(), "a model comes from --from-hf DIR or from --checkpoint DIR: give one of the two");
  LoadedModel loaded;
  if (!source.from_hf.empty()) {
    auto all = sets;
    all.push_back("model.from_hf=" + source.from_hf.string());
    loaded.config = parse_config("", std::filesystem::current_path(), all, "--from-hf");
    loaded.config.model = checkpoint::read_hugging_face_config(loaded.config);
    resolve(loaded.config);
    loaded.model = build(loaded.config, device);
    checkpoint::load_hugging_face(source.from_hf, loaded.config.model, checkpoint::parameter_tensors(*loaded.model));
    return loaded;
  }
  const auto found = find_checkpoint(source.checkpoint, "--checkpoint", sets);
  loaded.config = found.config;
  loaded.model = build(loaded.config, device);
  checkpoint::load(found.folder, found.manifest, checkpoint::training_tensors(*loaded.model, nullptr),
                   {.verify = loaded.config.checkpoint.verify, .ignore_prefixes = {"optimizer.", hook_prefix}, .partial = loaded.config.checkpoint.partial});
  return loaded;
}

}  // namespace tessera
