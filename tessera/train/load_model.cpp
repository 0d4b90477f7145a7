#include "tessera/train/load_model.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hook_prefix.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/config/expert_rules.h"
#include "tessera/config/offload_rules.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/nn/adapter_names.h"
#include "tessera/nn/meta.h"
#include "tessera/precision/compute_format.h"
#include "tessera/precision/policy.h"
#include "tessera/train/adapters.h"
#include "tessera/train/compose.h"
#include "tessera/train/found_tokenizer.h"
#include "tessera/train/inputs.h"
#include "tessera/train/pipeline_layout.h"
#include "tessera/train/places.h"
#include "tessera/train/progress.h"
#include "tessera/train/synchronize.h"

namespace tessera {

namespace {

std::filesystem::path checkpoint_folder(const std::filesystem::path& given, const std::string& flag, std::vector<std::string>& remarks) {
  if (is_there(given / "manifest.json")) return given;
  const auto found = checkpoint::find_latest(given);
  std::string skipped;
  for (const auto& reason : found.skipped) skipped += "; " + reason;
  require(found.folder.has_value(), flag, " ", given.string(), ": no valid checkpoint there", skipped,
          "; name a folder that `tessera train` wrote with checkpoint.dir");
  for (const auto& reason : found.skipped) remarks.push_back("passing over " + reason);
  return *found.folder;
}

FoundCheckpoint chosen_checkpoint(const std::filesystem::path& given, const std::string& flag) {
  for (int choice = 1;; ++choice) {
    const bool named = is_there(given / "manifest.json");
    const auto before = named ? std::map<int64_t, std::filesystem::path>() : checkpoint::checkpoint_folders(given);
    try {
      FoundCheckpoint found;
      found.folder = checkpoint_folder(given, flag, found.remarks);
      found.flag = flag;
      if (found.folder != given) found.chosen_from = given;
      found.manifest = checkpoint::read_or_name_another([&] {
        const auto problem = checkpoint::problem_with(found.folder, checkpoint::Thoroughness::Sizes);
        require(!problem, problem.value_or(""));
        return checkpoint::read_manifest(found.folder);
      });
      return found;
    } catch (const ConfigError&) {
      // What was listed may have gone before it was looked at, and seem damaged half way.
      if (named || choice == kMostChoices || before == checkpoint::checkpoint_folders(given)) throw;
    }
  }
}

/// Parameters wait elsewhere; the unit in use and those ahead of it are on the device.
void fetch_layers(const Config& config, at::Device device, LoadedModel& model) {
  FullyShardOptions options = stage_3_options(config, precision::policy_from(config.precision), *model.model);
  place_slices(config, device, {}, options);
  if (model.parts.empty()) model.fetched.push_back(fully_shard(*model.model, comm::Group::self(), options));
  for (const ModelShare& part : model.parts) model.fetched.push_back(fully_shard(*part.module.ptr(), comm::Group::self(), options));
}

LoadedModel build(const Config& config, const ReadingGroups& groups, at::Device device, const SavedWeights& saved) {
  const PipelineLayout layout = pipeline_layout(config, groups.stages.size());
  LoadedModel built;
  built.device = device;
  built.channels = groups.stages;
  built.pipeline = groups.stages.ahead;
  built.layers = groups.layers;
  built.columns = {groups.columns, column_rule(config, groups.columns.size())};
  built.model = on_meta([&] { return layout.stages() > 1 ? make_model_for_stages(config.model) : make_model(config.model); });
  built.adapted = add_adapters(config, *built.model);
  Config settled = config;
  precision::settle_compute(settled, device, groups.layers);  // of a caller who has not
  precision::apply(*built.model, precision::policy_from(settled.precision));
  built.experts = deal_experts(*built.model, groups.experts);
  cut_model(config, layout, built);
  for (const at::Tensor& parameter : built.model->parameters()) parameter.set_requires_grad(false);
  quantize_frozen(config, *built.model, device, saved);
  if (!config.offload.params.is("device")) fetch_layers(settled, device, built);
  materialize(*built.model, static_cast<uint64_t>(config.run.seed), device);
  built.model->eval();
  return built;
}

/// With the files alone that are read: of those of a checkpoint's run, which are of no use where it holds all of the model, some may be gone.
Config beginning(const FoundModel& found, const StartingFiles& read) {
  Config config = found.config;
  if (!read.weights) config.model.from_hf.clear();
  if (!read.adapters) config.lora.from_peft.clear();
  return config;
}

}  // namespace

bool FoundCheckpoint::gone() const { return !is_there(folder / "manifest.json"); }

std::string FoundCheckpoint::removal() const {
  const bool named = chosen_from.empty();
  return detail::concat(flag, " ", named ? folder.string() : chosen_from.string(), ": ", folder.filename().string(),
                        " was removed while it was read, as checkpoint.keep of a run that trains does; ",
                        named ? "name one that stays, or the folder that it lay in, for the newest" : "copy one elsewhere, and name that");
}

Config trained_config(const FoundCheckpoint& found, const std::vector<std::string>& sets) {
  const std::string source = found.folder.string();
  Config saved = config_of(found.manifest.progress, source);
  saved.checkpoint = {};  // how that run resumed, and over which ranks it was cut, is not how its checkpoint is to be read
  saved.mesh = {};
  saved.zero = {};
  saved.tensor = {};
  saved.context = {};
  saved.pipeline = {};
  saved.offload = {};
  // Nor are the network, folders and limits of the machine that it was trained on those of the reader's.
  const Config here;
  saved.comm.backend = here.comm.backend;
  saved.comm.algorithm = here.comm.algorithm;
  saved.comm.table = here.comm.table;
  saved.comm.interface = here.comm.interface;
  saved.data.cache_dir = here.data.cache_dir;
  saved.log.dir = here.log.dir;
  saved.run.device = here.run.device;
  saved.run.threads = here.run.threads;
  saved.run.memory_limit_bytes = here.run.memory_limit_bytes;
  saved.run.deterministic = here.run.deterministic;
  Config config = parse_config(to_toml(saved), std::filesystem::current_path(), sets, source);
  config.run.seed = saved.run.seed;  // from which frozen weights in fewer bits are made again
  resolve(config);
  return config;
}

FoundCheckpoint find_checkpoint(const std::filesystem::path& given, const std::string& flag, const std::vector<std::string>& sets) {
  FoundCheckpoint found = chosen_checkpoint(given, flag);
  found.sets = sets;
  found.config = trained_config(found, sets);
  return found;
}

void choose_again(FoundCheckpoint& found) {
  require(!found.chosen_from.empty(), found.removal());
  FoundCheckpoint newest = find_checkpoint(found.chosen_from, found.flag, found.sets);
  require(newest.manifest.run.run == found.manifest.run.run && newest.manifest.agreement == found.manifest.agreement, found.flag, " ",
          found.chosen_from.string(), ": ", found.folder.filename().string(), " was taken away while it was read, and ", newest.folder.filename().string(),
          ", the newest there now, is of another run or model; start again to read that one");
  found = std::move(newest);
}

void choose_together(FoundModel& found, const comm::Group& group) {
  if (group.size() == 1 || !found.checkpoint || found.checkpoint->chosen_from.empty()) return;
  for (int choice = 1; choice <= kMostChoices; ++choice) {
    const auto steps = checkpoint::gather_json(group, found.checkpoint->manifest.step);
    if (std::ranges::all_of(steps, [&](const auto& step) { return step == steps.front(); })) return;
    choose_again(*found.checkpoint);
  }
}

FoundModel find_model(const ModelSource& source, const std::vector<std::string>& sets) {
  require(source.from_hf.empty() != source.checkpoint.empty(), "a model comes from --from-hf DIR or from --checkpoint DIR: give one of the two");
  FoundModel found;
  if (source.from_hf.empty()) {
    found.checkpoint = find_checkpoint(source.checkpoint, "--checkpoint", sets);
    found.config = found.checkpoint->config;
    validate_reading(found.config);
    return found;
  }
  auto all = sets;
  all.push_back("model.from_hf=" + source.from_hf.string());
  found.config = parse_config("", std::filesystem::current_path(), all, "--from-hf");
  found.config.model = checkpoint::read_hugging_face_config(found.config);
  take_folder_tokenizer(found.config);
  resolve(found.config);
  validate_reading(found.config);
  (void)quantized_weights(found.config);  // or a refusal
  return found;
}

ReadingLayout reading_layout(const Config& config, int world_size) {
  require(config.zero.stage == 0, "zero.stage = ", config.zero.stage,
          ": shards what training keeps, and a model that is only read keeps none of it; leave it out");
  const MeshShape axes = mesh_shape(config.mesh, config.zero.stage, world_size);
  validate_places(config.offload);
  if (!config.offload.params.by_pattern.empty()) {
    const auto model = on_meta([&] { return make_model(config.model); });
    check_places("offload.params", config.offload.params, nn::unique_parameters(*model));
  }
  const MeshRoles roles = mesh_roles(config);
  const ReadingLayout layout{.copies = size_along(axes, roles.replicate),
                             .tensor_ranks = size_along(axes, roles.layers),
                             .stage_ranks = size_along(axes, roles.stages),
                             .column_ranks = size_along(axes, roles.columns)};
  const int shards = size_along(axes, roles.batch) / layout.copies;
  require(shards == 1, "mesh.dp_shard = ", shards,
          ": shards what training keeps, and a model that is only read keeps none of it; cut it by mesh.tp or mesh.pp, or leave mesh.dp_shard out");
  pipeline_layout(config, layout.stage_ranks);  // or a refusal
  validate_context(config, std::max<int64_t>(config.model.max_seq_len.value_or(1), 1), "model.max_seq_len", layout.column_ranks, layout.tensor_ranks);
  require(layout.tensor_ranks > 1 || !config.tensor.sequence_parallel,
          "tensor.sequence_parallel = true: cuts the sequence between layers that mesh.tp cuts, and mesh.tp is 1; leave it out, or set mesh.tp to more");
  validate_experts_over_ranks(config, layout.tensor_ranks, /*over_replicas=*/false, /*reads=*/true);
  validate_expert_choice(config, layout.column_ranks > 1, /*reads=*/true);
  if (layout.tensor_ranks > 1) check_tensor_parallel(config, layout.tensor_ranks, std::max<int64_t>(config.model.max_seq_len.value_or(1), 1));
  return layout;
}

ReadingGroups reading_groups(const Config& config, const Mesh& mesh) {
  const MeshRoles roles = mesh_roles(config);
  return {.layers = mesh[roles.layers], .stages = pipeline_channels(mesh, roles.stages), .columns = mesh[roles.columns], .experts = expert_ranks(config, mesh)};
}

LoadedModel load_newest(FoundModel& found, const ReadingGroups& groups, at::Device device, const comm::Group& all) {
  for (int choice = 1;; ++choice) {
    nlohmann::json lost;
    std::optional<LoadedModel> loaded;
    try {
      loaded = load_model(found, groups, device);
    } catch (const ConfigError&) {
      if (!found.checkpoint || !found.checkpoint->gone()) throw;
      lost = found.checkpoint->removal();
      if (found.checkpoint->chosen_from.empty() || choice == kMostChoices) throw ConfigError(lost.get<std::string>());
    }
    if (!found.checkpoint || found.checkpoint->chosen_from.empty()) return std::move(*loaded);
    const auto answers = checkpoint::gather_json(all, lost);
    if (std::ranges::all_of(answers, [](const auto& answer) { return answer.is_null(); })) return std::move(*loaded);
    loaded.reset();  // before there is a second one
    choose_again(*found.checkpoint);
    choose_together(found, all);
  }
}

StartingFiles starting_files(const FoundModel& found) {
  const Config& config = found.config;
  const bool folder = !config.model.from_hf.empty(), adapted = !config.lora.modules.empty() && !config.lora.from_peft.empty();
  if (!found.checkpoint) return {.weights = folder, .adapters = adapted, .fewer_bits = folder};
  const auto& [sets, manifest] = std::tie(found.checkpoint->sets, found.checkpoint->manifest);
  StartingFiles read;
  read.fewer_bits =
      folder && std::ranges::any_of(quantized_weights(config), [&](const std::string& name) { return !manifest.tensors.contains("model." + name); });
  if (!config.checkpoint.partial.empty()) {
    for (const std::string& name : partial_load(manifest, config).fresh) {
      if (nn::is_adapter(name)) {
        read.adapters = adapted;
      } else {
        read.weights = folder;
      }
    }
  }
  const std::set<std::string> named = parse_config("", std::filesystem::current_path(), sets).given;
  // For weights that it was trained beside in fewer bits, and does not hold, nothing else will do.
  const auto quantized = manifest.agreement.find("quantize.modules");
  const bool needed = named.contains("model.from_hf") || (quantized != manifest.agreement.end() && *quantized != "");
  read.no_weights = (read.weights || read.fewer_bits) && !needed && !holds_weights(config);
  read.no_adapters = read.adapters && !named.contains("lora.from_peft") && !holds_adapters(config);
  if (read.no_weights) read.weights = read.fewer_bits = false;
  if (read.no_adapters) read.adapters = false;
  return read;
}

LoadedModel load_model(const FoundModel& found, const ReadingGroups& groups, at::Device device) {
  const auto& stored = found.checkpoint;
  const SavedWeights saved = stored ? SavedWeights{&stored->folder, &stored->manifest} : SavedWeights();
  const StartingFiles read = starting_files(found);
  if (stored && read.weights) check_quantized_source(found.config, saved);
  Config built = found.config;
  if (read.no_weights) built.model.from_hf.clear();
  LoadedModel loaded = build(built, groups, device, saved);
  load_starting_weights(beginning(found, read), *loaded.model);
  if (!stored) return loaded;
  const auto& folder = stored->folder;
  const auto& manifest = stored->manifest;
  const auto& config = stored->config;
  std::vector<std::string> ignored{"optimizer.", checkpoint::kHookPrefix};
  for (const std::string& name : quantized_weights(config)) ignored.push_back("model." + name);
  checkpoint::load(folder, manifest, checkpoint::model_targets(*loaded.model),
                   {.verify = config.checkpoint.verify,
                    .expected = stored_for_others(config, manifest, loaded),
                    .ignore_prefixes = std::move(ignored),
                    .partial = config.checkpoint.partial,
                    .convert = true});  // precision.params may be another than it was trained with
  return loaded;
}

}  // namespace tessera
