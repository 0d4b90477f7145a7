#include "tessera/train/inputs.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <set>
#include <string_view>
#include <tuple>
#include <utility>

#include "tessera/checkpoint/agreement.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/gather_json.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/comm/call_site.h"
#include "tessera/config/defaults.h"
#include "tessera/config/schedule_kinds.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/format.h"
#include "tessera/data/loader.h"
#include "tessera/mesh/mesh.h"
#include "tessera/mesh/roles.h"
#include "tessera/models/model.h"
#include "tessera/nn/adapter_names.h"
#include "tessera/nn/attach.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/optim/groups.h"
#include "tessera/optim/schedule.h"
#include "tessera/optim/whole_model.h"
#include "tessera/precision/loss_scale.h"
#include "tessera/train/adapters.h"
#include "tessera/train/found_tokenizer.h"
#include "tessera/train/progress.h"
#include "tessera/train/replay.h"

// Everything that can be refused is refused here, before there is a process group: by one process in one line, instead of by all ranks at once after they have
// met. The exception are hashes of a large checkpoint, which ranks share: so they are checked after the meeting, and a bad one has to be agreed upon, or ranks
// would go on from different steps.

namespace tessera {

namespace {

std::vector<std::filesystem::path> paths(const std::vector<std::string>& names) { return {names.begin(), names.end()}; }

void refuse_named(const std::string& folder, const std::string& problem) {
  throw ConfigError(detail::concat("checkpoint.resume = ", folder, ": ", problem, "; name another checkpoint, or \"latest\" for the newest valid one"));
}

/// A launcher's attempt fails by it, and is made again.
[[noreturn]] void refuse_unreadable(std::string problem, bool restarted) {
  if (restarted) throw Error(std::move(problem));
  throw ConfigError(std::move(problem));
}

ResumePoint named_point(const CheckpointConfig& config, const std::string& folder, checkpoint::Thoroughness thoroughness, bool restarted) {
  if (is_folder(folder) && !is_there(std::filesystem::path(folder) / "manifest.json")) {
    const auto within = checkpoint::find_latest(folder, checkpoint::Thoroughness::Sizes).folder;
    require(!within, "checkpoint.resume = ", folder,
            ": is a folder of checkpoints, and one is to be named; set checkpoint.resume = ", within.value_or("").string(), ", or checkpoint.dir = ", folder,
            " and checkpoint.resume = latest to go on there");
  }
  try {
    if (const auto problem = checkpoint::problem_with(folder, thoroughness)) refuse_named(folder, *problem);
  } catch (const checkpoint::UnreadableFile& error) {
    refuse_unreadable(detail::concat("checkpoint.resume = ", folder, ": ", error.what()), restarted);
  }
  ResumePoint point{.folder = folder, .manifest = checkpoint::read_manifest(folder)};
  require(!config.verify || checkpoint::makes_numbers(point.manifest.progress), "checkpoint.resume = ", folder, ": ", checkpoint::kMakesNoNumbers,
          "; name an older checkpoint, or \"latest\" for the newest whose loss is finite, or set checkpoint.verify = false to go on from it all the same");
  return point;
}

/// Whether a checkpoint went on from the one named in checkpoint.resume, which may be gone by now: `keep` removes what lies on the run's own line.
bool went_on_from(const std::string& named, const checkpoint::Manifest& manifest) {
  try {
    const auto from = checkpoint::read_manifest(named);
    return manifest.run.descends_from(from.run, from.step);
  } catch (const ConfigError&) {
    const auto name = std::filesystem::path(named).lexically_normal().filename().string();
    return std::ranges::any_of(manifest.run.lineage, [&](const auto& ancestor) { return checkpoint::folder_name(ancestor.step) == name; });
  }
}

/// How one says which checkpoints: "step-00000010" or "step-00000010 to step-00000030".
std::string names_of(const std::vector<std::filesystem::path>& folders) {
  const auto name = [](const std::filesystem::path& folder) { return folder.filename().string(); };
  return folders.size() == 1 ? name(folders.front()) : name(folders.front()) + " to " + name(folders.back());
}

/// Of what cannot be read nothing is known: going on from an older one, or from none, would set it aside.
checkpoint::Latest find_readable(const CheckpointConfig& config, checkpoint::Thoroughness thoroughness, bool restarted, int64_t before) {
  try {
    return checkpoint::find_latest(config.dir, thoroughness, before, config.verify);
  } catch (const checkpoint::UnreadableFile& error) {
    refuse_unreadable(
        detail::concat("checkpoint.resume = latest: ", error.what(), ", name another checkpoint, or move it out of checkpoint.dir = ", config.dir), restarted);
  }
}

/// Goes on from the newest valid checkpoint below step `before` in checkpoint.dir. Where one is named in checkpoint.resume: that went on from it, or else the
/// named one. Unless `latest` was asked for, whoever wrote it, this is a restart, which goes on from its own job's: an attempt may end before it has set aside
/// (or refused) what others left there, and the next one must do no more than it would have done.
void find_newest(const Config& config, checkpoint::Thoroughness thoroughness, Inputs& inputs, int64_t before = std::numeric_limits<int64_t>::max()) {
  const auto& [dir, from] = std::tie(config.checkpoint.dir, config.checkpoint.resume);
  const bool named = !from.empty() && from != "latest";
  const bool own_alone = from != "latest" && !inputs.job.empty();
  inputs.resume.reset();
  std::vector<std::filesystem::path> others;  // newest first
  while (!inputs.resume) {
    const auto found = find_readable(config.checkpoint, thoroughness, inputs.restarted, before);
    for (const auto& reason : found.skipped) inputs.remarks.push_back("passing over " + reason);
    if (!found.folder) break;
    ResumePoint point{.folder = *found.folder, .manifest = checkpoint::read_manifest(*found.folder), .newest = true};
    before = point.manifest.step;
    if (named && !went_on_from(from, point.manifest)) continue;
    if (own_alone && point.manifest.run.job != inputs.job) {
      others.push_back(point.folder);
    } else {
      inputs.resume = std::move(point);
    }
  }
  if (!others.empty()) {
    std::ranges::reverse(others);
    inputs.remarks.push_back(detail::concat("passing over ", names_of(others), " in ", dir, ": of another job, and a restart goes on from its own job's"));
  }
  if (!inputs.resume && named) inputs.resume = named_point(config.checkpoint, from, thoroughness, inputs.restarted);
  if (!inputs.resume) {
    const size_t unusable = others.empty() ? checkpoint::checkpoint_folders(dir).size() : 0;
    inputs.remarks.push_back(unusable > 0 ? detail::concat("none of the ", unusable, " checkpoints in ", dir, " can be used: starting afresh")
                                          : detail::concat("no checkpoint ", others.empty() ? "" : "of this job ", "in ", dir, ": starting afresh"));
  }
  inputs.may_start_afresh = !inputs.resume && others.empty();  // what is another's is for checkpoint.replace to set aside
}

void find_resume(const Config& config, const OpenOptions& options, Inputs& inputs) {
  const auto& from = config.checkpoint;
  const bool again = options.restarted && !from.dir.empty();
  if (from.resume.empty() && !again) return;
  const bool latest = from.resume == "latest" || again;
  require(!latest || !from.dir.empty(), "checkpoint.resume = latest: there is no checkpoint.dir to look in; set checkpoint.dir, or name the checkpoint");
  const bool known = !options.hashed.empty() && options.hashed == from.resume;
  const bool hashing = from.verify && !known && !options.one_of_several;
  const auto thoroughness = hashing ? checkpoint::Thoroughness::Hashes : checkpoint::Thoroughness::Sizes;
  if (latest) {
    find_newest(config, thoroughness, inputs);
  } else {
    inputs.resume = named_point(from, from.resume, thoroughness, inputs.restarted);
  }
  if (inputs.resume) inputs.resume->hashed = hashing || known;
}

/// What `describe` says of the model, whole and without values, with its adapters.
template <class Describe>
auto of_described_model(const Config& config, const Describe& describe) {
  const auto model = on_meta([&] { return make_model(config.model); });
  const Attachment adapted = add_adapters(config, *model);
  nn::assign_paths(*model);
  return describe(*model);
}

/// The model's parameters, and what an optimizer's choice by kind asks of them.
optim::WholeModel described_model(const Config& config) {
  return of_described_model(config, [](const torch::nn::Module& model) { return optim::whole_model(model); });
}

/// Its parameters and buffers, as a checkpoint names them.
std::vector<Slice> described_tensors(const Config& config) {
  return of_described_model(config, [](const torch::nn::Module& model) {
    std::vector<Slice> tensors;
    for (auto& held : checkpoint::training_tensors(model, /*optimizer=*/nullptr)) tensors.push_back(std::move(held.slice));
    return tensors;
  });
}

/// Whether a run goes on with adapters of the checkpoint's, which were trained with its alpha: with those that checkpoint.partial does not name, and with those
/// that it names and that fit one of the run's own, which are loaded all the same.
bool goes_on_with_adapters(const Config& config, const checkpoint::Manifest& saved) {
  constexpr std::string_view kModel = "model.";
  std::map<std::string, std::vector<int64_t>> own;
  for (const Slice& parameter : described_model(config).parameters) own.emplace(parameter.name, parameter.shape);
  return std::ranges::any_of(saved.tensors, [&](const auto& tensor) {
    const auto& [stored_name, stored] = tensor;
    if (!stored_name.starts_with(kModel) || !nn::is_adapter(stored_name)) return false;
    const std::string name = stored_name.substr(kModel.size());
    const auto found = own.find(name);
    const bool fits = found != own.end() && found->second == stored.shape;
    return fits || !checkpoint::may_differ(config.checkpoint.partial, name);
  });
}

/// What the checkpoint must agree with. A partial load is there for models that differ: in what it names, and in which layers have adapters. Weights in fewer
/// bits are in no checkpoint, so that it can name none of them.
nlohmann::json agreement_with(const Config& config, const data::Corpus& corpus, const checkpoint::Manifest& saved) {
  auto agreement = checkpoint::agreement_of(config, data_identity(corpus));
  if (config.checkpoint.partial.empty()) return agreement;
  const bool scaled = goes_on_with_adapters(config, saved);
  const auto quantized = saved.agreement.find("quantize.modules");
  const bool in_fewer_bits = quantized != saved.agreement.end() && *quantized != "";
  for (auto entry = agreement.begin(); entry != agreement.end();) {
    const std::string& key = entry.key();
    const bool may_differ =
        key.starts_with("model.") || key == "lora.modules" || (key.starts_with("lora.") && !scaled) || (key.starts_with("quantize.") && !in_fewer_bits);
    entry = may_differ ? agreement.erase(entry) : std::next(entry);
  }
  return agreement;
}

/// An optimizer with momentum carries what it does not without.
void check_momentum(const OptimConfig& saved, const OptimConfig& now, const std::string& whose, const std::string& folder) {
  // Muon keeps its buffer with 0 as well: what is there is then the last gradient, and no average to go on with.
  if (now.name != "sgd" && now.name != "adafactor" && now.name != "muon") return;
  const bool without = momentum_of(saved) == 0;
  require(without == (momentum_of(now) == 0), "optim.momentum = ", format_float(momentum_of(now)), whose, ": ", folder,
          without ? " was written without momentum, and holds none to go on with" : " holds momentum, which would be lost", "; set optim.momentum ",
          without ? "= 0" : "above 0", ", or start anew with checkpoint.resume = \"\"");
}

/// Rates and decay of a parameter may change; what its state is may not, but for those that checkpoint.partial names: their state begins anew.
void check_optimizers(const Config& saved, const Config& config, const checkpoint::Manifest& manifest, const std::string& folder) {
  const auto& partial = config.checkpoint.partial;
  if (saved.optim.groups.empty() && config.optim.groups.empty() && partial.empty()) return check_momentum(saved.optim, config.optim, "", folder);
  const auto before = optim_groups(saved.optim), now = optim_groups(config.optim);
  const optim::WholeModel model = described_model(config);
  for (const Slice& parameter : model.parameters) {
    const std::string& name = parameter.name;
    const auto by = [&](const OptimConfig& optim, const auto& groups) {
      return optim::settings_of(optim, groups, name, parameter.shape.size(), model).settings;
    };
    const OptimConfig was = by(saved.optim, before), is = by(config.optim, now);
    // What another kind has kept is told by the checkpoint, unless it is an old one; a last gradient cannot be told from Muon's average.
    if (checkpoint::may_differ(partial, name) && (was.name == is.name ? is.name != "muon" : manifest.optimizer.contains("kinds"))) continue;
    require(was.name == is.name, "optim.groups: '", name, "' would be updated by ", is.name, ", and ", folder, " holds what ", was.name,
            " kept of it; give it name = ", was.name, " again, or start anew with checkpoint.resume = \"\"");
    check_momentum(was, is, detail::concat(" for '", name, "'"), folder);
  }
}

/// A tokenizer that nobody named is that of model.from_hf, and was `byte` before there was this rule; the folder may have changed, too.
void check_tokenizer(const Config& config, const Inputs& inputs) {
  if (!inputs.resume || config.model.from_hf.empty() || config.given.contains("data.tokenizer")) return;
  const std::string folder = inputs.resume->folder.string();
  const auto& manifest = inputs.resume->manifest;
  const std::string saved = config_of(manifest.progress, folder).data.tokenizer;
  const auto identity = data_identity(manifest);
  const bool agrees = saved == config.data.tokenizer || identity.empty() || identity.value("tokenizer", "") == inputs.tokenizer->fingerprint();
  require(agrees, "data.tokenizer is not given, and by model.from_hf it is ", config.data.tokenizer, ": ", folder, " was written with ", saved,
          "; set data.tokenizer = ", saved, ", or start anew with checkpoint.resume = \"\"");
}

/// Of texts that the tokenizer cannot spell, as far as a glance shows it: a start is not to grow with the text.
void say_unknown(Inputs& inputs) {
  constexpr int64_t kLookedAt = 1'000'000;
  for (const auto& [corpus, knob] : {std::pair(inputs.corpus, "data.files"), std::pair(inputs.validation, "data.validation_files")}) {
    if (!corpus) continue;
    const auto found = data::unknown_among_first(*corpus, *inputs.tokenizer, kLookedAt);
    const std::string which =
        found.ids < corpus->tokens() ? detail::concat("the first ", found.ids, " tokens of ", knob) : detail::concat("the tokens of ", knob);
    if (auto remark = data::unknown_remark(found, which); !remark.empty()) inputs.text_remarks.push_back(std::move(remark));
  }
}

void check_fit(const Config& config, const Inputs& inputs) {
  if (!inputs.resume) return;
  const std::string folder = inputs.resume->folder.string();
  const auto& manifest = inputs.resume->manifest;
  for (const std::string& name : quantized_weights(config)) {
    require(!manifest.tensors.contains("model." + name), "quantize.modules = ", config.quantize.modules, ": ", folder, " holds '", name,
            "' whole, and checkpoints of this run would not; write it with `tessera convert --to hf`, and name that folder as model.from_hf");
  }
  checkpoint::check_agreement(manifest.agreement, agreement_with(config, *inputs.corpus, manifest), folder, followed_defaults(config));
  data::carried(cursor_of(manifest.progress, folder), *inputs.corpus,
                {.seq_len = config.data.seq_len,
                 .global_size = config.batch.global_size,
                 .micro_size = config.batch.micro_size,
                 .shuffle = config.data.shuffle,
                 .seed = static_cast<uint64_t>(*config.data.seed)});
  require(manifest.step <= config.run.steps, "run.steps = ", config.run.steps, ": ", folder, " is already at step ", manifest.step,
          "; raise run.steps, or resume from an earlier checkpoint");
  check_optimizers(config_of(manifest.progress, folder), config, manifest, folder);
  if (config.checkpoint.partial.empty()) return;
  std::vector<std::string> names;
  for (const Slice& tensor : described_tensors(config)) names.emplace_back(checkpoint::parameter_of(tensor.name));
  checkpoint::check_partial(config.checkpoint.partial, manifest, names);
}

/// With the momentum that holds: checkpoints of before it could be unset say one that nobody gave.
Config with_momentum(Config config) {
  config.optim.momentum = momentum_of(config.optim);
  return config;
}

/// With what `auto` became where it was saved, if the checkpoint says so, for a run that knows what it has become here.
Config with_settled_compute(Config saved, const nlohmann::json& progress, const Config& config) {
  if (saved.precision.compute == "auto" && config.precision.compute != "auto") saved.precision.compute = recorded_compute(progress).value_or("auto");
  return saved;
}

/// How many there are that `what`, and which, as far as a line takes them; nothing of none.
std::string some_of(const std::string& what, const std::vector<std::string>& names) {
  constexpr size_t kMost = 4;
  std::string list;
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) list += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kMost) list += detail::concat(" and ", names.size() - kMost, " more");
  return names.empty() ? "" : detail::concat("; ", names.size(), " ", what, " (", list, ")");
}

/// What an update sums on `ranks` ranks.
struct UpdateSum {
  bool within_step;  ///< by a schedule that updates in the midst of a step
  int data_ranks;    ///< that are dealt other samples
  int64_t samples;
};
UpdateSum update_sum(const Config& config, int ranks) {
  const MeshShape axes = mesh_shape(config.mesh, config.zero.stage, ranks);
  const int stages = size_along(axes, mesh_roles(config).stages), data_ranks = size_along(axes, mesh_roles(config).batch);
  UpdateSum update{.within_step = updates_within_steps(config, stages), .data_ranks = data_ranks, .samples = config.batch.global_size};
  if (!update.within_step) return update;
  const int64_t per_update = config.pipeline.per_update > 0 ? config.pipeline.per_update : stages;
  const int64_t summed = config.pipeline.schedule == "pipedream" ? 1 : per_update;
  // Also where some ranks have a micro-batch more than others. What is left for a step's last update follows from it.
  update.samples = std::min(config.batch.global_size, config.batch.micro_size * data_ranks * summed);
  return update;
}

/// Steps that were not applied, for which the schedule waits.
int64_t skipped_steps(const checkpoint::Manifest& manifest) {
  const auto scale = manifest.progress.find("loss_scale");
  const bool known = scale != manifest.progress.end() && scale->is_object() && scale->contains("skipped") && scale->at("skipped").is_number_integer();
  return known ? scale->at("skipped").get<int64_t>() : 0;
}

}  // namespace

Config read_config(const std::filesystem::path& file, const std::vector<std::string>& sets) {
  Config config = load_config(file, sets);
  if (!config.model.from_hf.empty()) config.model = checkpoint::read_hugging_face_config(config);
  take_folder_tokenizer(config);
  resolve(config);
  return config;
}

nlohmann::json data_identity(const data::Corpus& corpus) {
  nlohmann::json identity{{"content", corpus.content()}, {"tokenizer", corpus.tokenizer()}};
  if (corpus.bos()) identity["bos"] = true;
  return identity;
}

bool reads_starting_files(const Config& config, const std::optional<ResumePoint>& resume) { return !resume || !config.checkpoint.partial.empty(); }

Inputs open_inputs(const Config& config, const OpenOptions& options) {
  Inputs inputs;
  inputs.job = options.job;
  inputs.restarted = options.restarted;
  find_resume(config, options, inputs);
  const bool adapted = !config.lora.modules.empty() && !config.lora.from_peft.empty();
  if (adapted && reads_starting_files(config, inputs.resume)) checkpoint::check_peft(config.lora.from_peft, config.lora);
  FoundTokenizer found = open_tokenizer(config, inputs.resume ? &inputs.resume->manifest : nullptr);
  inputs.tokenizer = std::move(found.tokenizer);
  inputs.text_remarks = std::move(found.remarks);
  check_tokenizer(config, inputs);
  const auto open = [&](const std::vector<std::string>& files, const std::string& knob) {
    return data::Corpus::open_or_build(paths(files), *inputs.tokenizer, config.data.cache_dir, 0, knob, data::documents_named(config.data.documents),
                                       found.bos);
  };
  inputs.corpus = open(config.data.files, "data.files");
  data::check_windows(*inputs.corpus, config.data.seq_len, config.batch.global_size, "batch.global_size");
  if (!config.data.validation_files.empty()) {
    inputs.validation = open(config.data.validation_files, "data.validation_files");
    try {
      data::check_windows(*inputs.validation, config.data.seq_len, 1, "data.validation_files");
    } catch (const ConfigError& error) {
      throw ConfigError(detail::concat("data.validation_files: ", error.what()));  // or data.files would be taken for the text that is meant
    }
  }
  say_unknown(inputs);
  check_fit(config, inputs);
  return inputs;
}

void check_hashes(Inputs& inputs, const Config& config, const comm::World& world) {
  const comm::CallSite site("start");
  for (;;) {
    auto& resume = inputs.resume;
    nlohmann::json mine{
        {"step", resume ? resume->manifest.step : 0}, {"run", resume ? resume->manifest.run.run : ""}, {"start", resume ? resume->manifest.run.start : ""}};
    if (resume && config.checkpoint.verify && !resume->hashed) {
      try {
        const auto problem =
            checkpoint::problem_with(resume->folder, checkpoint::Thoroughness::Hashes, {.index = world.local_rank(), .parts = world.local_size()});
        if (problem) mine["problem"] = *problem;
      } catch (const checkpoint::UnreadableFile& error) {
        mine["unreadable"] = error.what();
      }
    }
    std::string problem;
    for (int rank = 0; const auto& theirs : checkpoint::gather_json(world.group(), mine)) {
      require(theirs["step"] == mine["step"], "checkpoint.resume: rank ", rank, " goes on from step ", theirs["step"].dump(), " and rank ", world.rank(),
              " from step ", mine["step"].dump(), "; let every rank see the same checkpoint.dir");
      require(theirs["run"] == mine["run"] && theirs["start"] == mine["start"], "checkpoint.resume: rank ", rank, " and rank ", world.rank(),
              " go on from step ", mine["step"].dump(), " of different runs (", theirs["run"].dump(), " and ", mine["run"].dump(),
              "); let every rank see the same checkpoint.dir");
      if (problem.empty()) problem = theirs.value("problem", "");
      if (theirs.contains("unreadable")) throw Error(detail::concat("checkpoint.resume: rank ", rank, ": ", theirs.value("unreadable", "")));
      ++rank;
    }
    if (problem.empty()) {
      if (resume) resume->hashed = config.checkpoint.verify;
      return;
    }
    if (!resume->newest) refuse_named(resume->folder.string(), problem);
    inputs.remarks.push_back("passing over " + problem);
    find_newest(config, checkpoint::Thoroughness::Sizes, inputs, resume->manifest.step);
    check_fit(config, inputs);
  }
}

PartialLoad partial_load(const checkpoint::Manifest& saved, const Config& config) {
  const auto& stored = saved.tensors;
  const std::vector<std::string> quantized = quantized_weights(config);
  const std::set<std::string> in_fewer_bits(quantized.begin(), quantized.end());
  PartialLoad found;
  std::set<std::string> own;
  for (const Slice& tensor : described_tensors(config)) {
    own.insert(tensor.name);
    std::string name(checkpoint::parameter_of(tensor.name));
    if (in_fewer_bits.contains(name)) continue;
    const auto held = stored.find(tensor.name);
    (held != stored.end() && held->second.shape == tensor.shape ? found.loaded : found.fresh).push_back(std::move(name));
  }
  for (const auto& [name, held] : stored) {
    if (checkpoint::is_of_model(name) && !own.contains(name)) found.unread.emplace_back(checkpoint::parameter_of(name));
  }
  return found;
}

std::string partial_remark(const PartialLoad& found, const std::string& folder) {
  if (found.fresh.empty() && found.unread.empty()) return {};
  return detail::concat("checkpoint.partial: of ", folder, " ", found.loaded.size(), " parameters are loaded", some_of("begin anew", found.fresh),
                        some_of("are left unread", found.unread));
}

std::string other_model(const ResumePoint& resume, const Config& config) {
  if (config.checkpoint.partial.empty()) return {};
  const PartialLoad found = partial_load(resume.manifest, config);
  if (!found.fresh.empty() || !found.unread.empty()) return "as checkpoint.partial leaves some of it out";
  const auto changed = checkpoint::model_disagreements(resume.manifest.agreement, config);
  return changed.empty() ? "" : detail::concat("as by checkpoint.partial it goes on with another ", changed.front().key);
}

std::vector<std::string> changes_since(const ResumePoint& resume, const Config& config) {
  const std::string folder = resume.folder.string();
  const int64_t step = resume.manifest.step;
  const Config saved = with_settled_compute(config_of(resume.manifest.progress, folder), resume.manifest.progress, config);
  std::vector<std::string> remarks;
  const auto changed = checkpoint::changed_settings(with_momentum(saved), with_momentum(config));
  std::string list;
  for (const auto& setting : changed) list += (list.empty() ? "" : ", ") + setting;
  if (!list.empty()) remarks.push_back(detail::concat("going on from ", folder, " with other settings than it was saved with: ", list));
  if (!config.checkpoint.partial.empty()) {
    if (auto remark = partial_remark(partial_load(resume.manifest, config), folder); !remark.empty()) remarks.push_back(std::move(remark));
  }
  const std::string &began_with = saved.model.from_hf, &named = config.model.from_hf;
  const bool reads_it = !config.quantize.modules.empty() || !config.checkpoint.partial.empty();  // then what it holds is used, or compared
  if (!began_with.empty() && !named.empty() && named != began_with && !reads_it) {
    remarks.push_back(
        detail::concat("model.from_hf = ", named, " (was ", began_with, "): the weights are those of ", folder, ", and that folder's are not read"));
  }
  const bool bends = config.run.steps != saved.run.steps && config.optim.schedule != "constant" && saved.optim.schedule != "constant";
  // By the settings of now, whatever they were: what else has changed is on the list, and none of run.steps' doing.
  const optim::LearningRate rate_before(config.optim, saved.run.steps), rate_now(config.optim, config.run.steps);
  const int64_t skipped = skipped_steps(resume.manifest);
  if (skipped > 0 && precision::LossScale(saved.precision).enabled() && !precision::LossScale(config.precision).enabled()) {
    remarks.push_back(detail::concat("precision.loss_scale = ", config.precision.loss_scale, " (was ", saved.precision.loss_scale, "): ", skipped, " of the ",
                                     step, " steps before were skipped, and the learning rate waits for them: step ", step + 1, " is update ",
                                     step + 1 - skipped, " (skipped_steps in metrics.jsonl)"));
  }
  for (int64_t next = step + 1; bends && next <= config.run.steps; ++next) {  // through a warm-up, in which they are the same
    const double before = rate_before.at(next - skipped), now = rate_now.at(next - skipped);
    if (before == now) continue;
    remarks.push_back(detail::concat("run.steps = ", config.run.steps, " (was ", saved.run.steps, "): optim.schedule = ", config.optim.schedule,
                                     " ends there, so the learning rate bends: ", format_float(now), " in step ", next, ", where it would have been ",
                                     format_float(before)));
    break;
  }
  return remarks;
}

std::string other_update(const ResumePoint& resume, const Config& config, int world_size) {
  const std::string folder = resume.folder.string();
  const Config saved = config_of(resume.manifest.progress, folder);
  const int saved_on = checkpoint::ranks_of(resume.manifest);
  if (saved_on == 0 || !(is_asynchronous(saved.pipeline.schedule) || is_asynchronous(config.pipeline.schedule))) return {};
  const UpdateSum before = update_sum(saved, saved_on), now = update_sum(config, world_size);
  if (before.samples == now.samples) return {};
  const bool both = before.within_step && now.within_step;
  return detail::concat("an update sums ", now.samples, " samples on ", now.data_ranks, " data ranks, and summed ", before.samples, " where ", folder,
                        " was saved, so this is another run from here on; to go on as before keep ",
                        both ? "batch.micro_size times data ranks, with pipedream_2bw times pipeline.per_update" : "pipeline.schedule and mesh.pp");
}

void check_checkpoint_dir(const Config& config, const Inputs& inputs) {
  const std::string& dir = config.checkpoint.dir;
  if (dir.empty()) return;
  if (const auto foreign = checkpoint::foreign_leftover(dir)) {
    throw ConfigError(detail::concat("checkpoint.dir = ", dir, ": ", *foreign,
                                     ", and that is where steps are written before they are whole; move it elsewhere, ", "or name another checkpoint.dir"));
  }
  if (config.checkpoint.replace || inputs.may_start_afresh) return;
  const std::string way_out = "name another checkpoint.dir, or set checkpoint.replace = true, which sets them aside within it";
  std::vector<std::filesystem::path> others;
  for (const auto& found : checkpoint::written_checkpoints(dir)) {
    const bool another = !inputs.resume || (found.writer && found.writer->run != inputs.resume->manifest.run.run);
    if (another) others.push_back(found.folder);
  }
  if (others.empty()) return;
  require(inputs.resume.has_value(), "checkpoint.dir = ", dir, ": holds checkpoints of another run (", names_of(others),
          "), and this one starts afresh; to go on from the newest set checkpoint.resume = latest; to start anew ", way_out);
  throw ConfigError(detail::concat("checkpoint.dir = ", dir, ": holds checkpoints of another run (", names_of(others), ") than the one that goes on from ",
                                   inputs.resume->folder.string(), "; ", way_out));
}

std::chrono::milliseconds lock_patience(const Config& config, bool restarted) {
  constexpr std::chrono::milliseconds moment(2000), most(120000);
  if (!restarted) return moment;
  return std::clamp(std::chrono::milliseconds(std::llround(750 * config.comm.timeout_s)), moment, most);
}

void lock_checkpoint_dir(const Config& config, Inputs& inputs) {
  if (config.checkpoint.dir.empty() || inputs.lock) return;
  inputs.lock = std::make_unique<checkpoint::RunLock>(config.checkpoint.dir, lock_patience(config, inputs.restarted));
  for (const auto& remark : inputs.lock->remarks()) inputs.remarks.push_back(remark);
}

std::vector<std::string> hold_on_to_checkpoint_dir(const Config& config, Inputs& inputs) {
  const std::string loss = inputs.lock ? inputs.lock->loss() : "";
  if (loss.empty()) return {};
  const std::string& dir = config.checkpoint.dir;
  inputs.lock.reset();
  try {
    inputs.lock = std::make_unique<checkpoint::RunLock>(dir);
  } catch (const ConfigError& error) {
    throw Error(detail::concat("checkpoint.dir = ", dir, ": ", loss, " while this run went on, and it cannot be taken anew: ", error.what()));
  }
  return {detail::concat("checkpoint.dir = ", dir, ": ", loss, " while this run went on; it is taken anew, and holds what is saved from here on",
                         checkpoint::checkpoint_folders(dir).empty() ? " alone" : "")};
}

checkpoint::RunIdentity run_identity(const Inputs& inputs) {
  const auto& resume = inputs.resume;
  return resume ? resume->manifest.run.continued(resume->manifest.step, inputs.job) : checkpoint::RunIdentity::fresh(inputs.job);
}

std::vector<std::string> enter_checkpoint_dir(const Config& config, const Inputs& inputs, const checkpoint::RunIdentity& run) {
  const auto& [dir, resume] = std::tie(config.checkpoint.dir, inputs.resume);
  std::vector<std::filesystem::path> aside;
  for (const auto& found : checkpoint::written_checkpoints(dir)) {
    // One that nobody can read stays where it is as long as no step of this run will take its name.
    const bool stays = found.writer ? run.holds(*found.writer, found.step) : resume && found.step < resume->manifest.step;
    if (!stays) aside.push_back(found.folder);
  }
  if (aside.empty()) return {};
  const auto place = checkpoint::set_aside(dir, aside);
  return {detail::concat("checkpoint.dir = ", dir, ": ", names_of(aside), aside.size() == 1 ? " is" : " are", " not what this run goes on from: set aside in ",
                         place.string())};
}

}  // namespace tessera
