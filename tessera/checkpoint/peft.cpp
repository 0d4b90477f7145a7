#include "tessera/checkpoint/peft.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <c10/core/GradMode.h>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/fullest.h"
#include "tessera/checkpoint/hugging_face_family.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/checkpoint/narrowing.h"
#include "tessera/checkpoint/problems.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/stored_slices.h"
#include "tessera/checkpoint/unfinished_folder.h"
#include "tessera/core/file_type.h"
#include "tessera/core/hash.h"
#include "tessera/nn/adapter_names.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPeftWeights = "adapter_model.safetensors";
constexpr const char* kPeftConfig = "adapter_config.json";
constexpr std::string_view kWeight = ".weight";

/// Where the layers of a model are in theirs, and which of them are a part of one there.
struct PeftNames {
  std::map<std::string, std::string> theirs;  ///< by our path
  std::set<std::string> fused;                ///< our paths
  bool transposed = false;                    ///< they store weights as [in, out], which their loader asks to be told
};

PeftNames peft_names(const ModelConfig& model) {
  const auto table = require_family(model, "there are no adapters of it").table(model);
  PeftNames names;
  std::map<std::string, int> parts;
  for (const auto& row : table) ++parts[row.theirs];
  for (const auto& row : table) {
    if (row.shape.size() != 2 || row.index >= 0 || !row.ours.ends_with(kWeight) || !row.theirs.ends_with(kWeight)) continue;
    const std::string path = row.ours.substr(0, row.ours.size() - kWeight.size());
    names.theirs[path] = row.theirs.substr(0, row.theirs.size() - kWeight.size());
    if (parts.at(row.theirs) > 1) names.fused.insert(path);
    names.transposed |= row.transposed;
  }
  return names;
}

/// Of an adapter's name, "layers.0.attention.wq.lora_a": the layer's path, and the last word.
std::pair<std::string, std::string> split_adapter(const std::string& name) {
  const size_t dot = name.rfind('.');
  return {name.substr(0, dot), name.substr(dot + 1)};
}

/// The first of what was trained beside adapters, by this run or one that it went on from.
std::string trained_beside(const LoraConfig& lora, const Manifest& manifest) {
  if (!lora.trained.empty()) return lora.trained.front();
  const auto earlier = manifest.progress.find("lora_trained");
  return earlier == manifest.progress.end() || earlier->empty() || !earlier->front().is_string() ? "" : earlier->front().get<std::string>();
}

/// What the tensor is called there.
std::string peft_name(const PeftNames& names, const std::string& ours) {
  const auto [path, which] = split_adapter(ours);
  const auto theirs = names.theirs.find(path);
  require(theirs != names.theirs.end(), "'", path, "' is no linear layer of Hugging Face's model, so its adapter cannot be written in PEFT's format");
  require(!names.fused.contains(path), "'", path, "' is a part of '", theirs->second,
          "' there, which PEFT adapts as one; merge the adapters into the weights (--to hf --merge-lora), or read and write them as checkpoints");
  return "base_model.model." + theirs->second + (which == nn::kLoraA ? ".lora_A.weight" : ".lora_B.weight");
}

/// How `file` was rounded to become `saved`, which is not the file's own rounding to what it is stored as: a run rounds what it reads to its precision.params,
/// and what went on from it may have had another. Nothing where it holds other numbers.
std::optional<std::string> rounding_between(const at::Tensor& file, const at::Tensor& saved) {
  const std::vector<std::pair<std::string, std::vector<at::ScalarType>>> ways{{"bf16", {at::kBFloat16}},
                                                                              {"fp16", {at::kHalf}},
                                                                              {"fp16 and then to bf16", {at::kHalf, at::kBFloat16}},
                                                                              {"bf16 and then to fp16", {at::kBFloat16, at::kHalf}}};
  for (const auto& [name, formats] : ways) {
    at::Tensor rounded = file;
    for (const at::ScalarType format : formats) rounded = rounded.to(format);
    if (at::equal(saved, rounded.to(saved.scalar_type()))) return name;
  }
  return std::nullopt;
}

/// PEFT loads adapters beside what lies in the folder that they name: what else they were trained beside is not written with them. Weights that the checkpoint
/// does not hold are for the caller to know. Returns a remark where it was rounded, and the checkpoint holds that in a wider format. Memory: one tensor,
/// twice, and where it was rounded four times.
std::optional<std::string> check_base(const fs::path& checkpoint, const ModelConfig& model, const Manifest& manifest, StoredSlices& stored) {
  const auto table = hugging_face_table(model).value();
  std::set<std::string> compared;
  std::optional<std::string> remark;
  for (const auto& row : table) {
    const std::string name = "model." + row.ours;
    const auto found = manifest.tensors.find(name);
    if (found == manifest.tensors.end() || !compared.insert(name).second) continue;
    const auto& shape = found->second.shape;
    const at::Tensor saved = at::empty(shape, at::device(at::kCPU).dtype(dtype_from_name(found->second.dtype)));
    const auto read_as = [&](at::ScalarType dtype) {
      const at::Tensor there = at::empty(shape, at::device(at::kCPU).dtype(dtype));
      load_hugging_face(model.from_hf, model, {{there, Slice::whole(row.ours, shape)}});
      return there;
    };
    stored.fill(saved, Slice::whole(name, shape));
    if (at::equal(saved, read_as(saved.scalar_type()))) continue;
    const auto rounding = rounding_between(read_as(at::kFloat), saved);
    require(rounding.has_value(), "model.from_hf = ", model.from_hf, ": its ", row.theirs, " is not what the adapters of ", checkpoint.string(),
            " were trained beside; put back what lay there, or name the folder where it is (--set model.from_hf=DIR)");
    if (remark) continue;
    remark = detail::concat("model.from_hf = ", model.from_hf, ": the adapters were trained beside its weights as precision.params had rounded them, to ",
                            *rounding, " (", row.theirs, " is one); load them so for the model that was trained");
  }
  return remark;
}

nlohmann::json peft_config(const PeftNames& names, const std::set<std::string>& paths, const ModelConfig& model, const LoraConfig& lora) {
  nlohmann::json targets = nlohmann::json::array();
  for (const auto& path : paths) targets.push_back(names.theirs.at(path));
  return {{"peft_type", "LORA"},
          {"task_type", "CAUSAL_LM"},
          {"base_model_name_or_path", model.from_hf.empty() ? nlohmann::json() : nlohmann::json(model.from_hf)},
          {"r", lora.rank},
          {"lora_alpha", lora.alpha},
          {"lora_dropout", lora.dropout},
          {"target_modules", targets},
          {"fan_in_fan_out", names.transposed},
          {"bias", "none"},
          {"modules_to_save", nullptr},
          {"use_rslora", false},
          {"use_dora", false},
          {"init_lora_weights", true},
          {"inference_mode", true}};
}

void expect_scale(const fs::path& file, const nlohmann::json& json, const char* key, double ours, const char* our_key) {
  const auto found = json.find(key);
  require(found != json.end() && found->is_number(), file.string(), ": ", key, " is missing, or no number");
  require(found->get<double>() == ours, our_key, " = ", ours, ": ", file.string(), " has ", key, " = ", found->dump(), "; set ", our_key, " = ", found->dump());
}

fs::path file_of(const fs::path& dir, const char* name) {
  require(is_there(dir), "lora.from_peft = ", dir.string(), ": there is no such folder");
  require(is_there(dir / name), "lora.from_peft = ", dir.string(), ": holds no ", name);
  return dir / name;
}

nlohmann::json read_peft_config(const fs::path& dir, const LoraConfig& lora) {
  const fs::path file = file_of(dir, kPeftConfig);
  nlohmann::json json = read_json(file);
  require(json.is_object() && json.value("peft_type", nlohmann::json()) == "LORA", file.string(), ": peft_type is not LORA, and nothing else can be read");
  const auto rank = json.find("r");
  require(rank != json.end() && rank->is_number_integer() && rank->get<int64_t>() >= 1, file.string(), ": r = ", rank == json.end() ? "" : rank->dump(),
          " is no rank, which is an integer of at least 1; the file is damaged, copy it anew");
  expect_scale(file, json, "r", static_cast<double>(lora.rank), "lora.rank");
  expect_scale(file, json, "lora_alpha", lora.alpha, "lora.alpha");
  for (const char* key : {"use_rslora", "use_dora", "lora_bias"}) {
    const auto found = json.find(key);
    require(found == json.end() || found->is_null() || *found == false, file.string(), ": ", key, " = ", found == json.end() ? "" : found->dump(),
            " is not supported; only plain LoRA is");
  }
  for (const char* key : {"rank_pattern", "alpha_pattern", "modules_to_save", "layers_to_transform", "exclude_modules", "layer_replication",
                          "trainable_token_indices", "target_parameters"}) {
    const auto found = json.find(key);
    require(found == json.end() || found->is_null() || found->empty(), file.string(), ": ", key, " = ", found == json.end() ? "" : found->dump(),
            " is not supported; one rank and alpha for all layers that target_modules names are, and nothing beside them");
  }
  // What is not known here may change what the adapter computes (alora_invocation_tokens does): each version of PEFT has more of it.
  constexpr std::string_view known =
      " auto_mapping base_model_name_or_path bias corda_config ensure_weight_tying eva_config fan_in_fan_out "
      "inference_mode init_lora_weights layers_pattern loftq_config lora_alpha lora_dropout lora_ga_config megatron_config "
      "megatron_core peft_type peft_version qalora_group_size r revision target_modules task_type ";
  for (const auto& [key, value] : json.items()) {
    const bool unset = value.is_null() || value == false || ((value.is_object() || value.is_array()) && value.empty());
    require(unset || known.find(" " + key + " ") != std::string_view::npos, file.string(), ": ", key, " = ", value.dump(),
            " is nothing that plain LoRA has, and what it makes the adapter compute is not known here; write the adapter without it");
  }
  // Of PiSSA, OLoRA, LoftQ and CorDA the matrices are beside other weights: PEFT takes what they begin with out of the model's each time when it loads them.
  constexpr std::array kLeaveTheModel = {"gaussian", "eva", "orthogonal"};
  const auto init = json.find("init_lora_weights");
  const bool plain = init == json.end() || init->is_null() || init->is_boolean() || std::ranges::find(kLeaveTheModel, *init) != kLeaveTheModel.end();
  require(plain, file.string(), ": init_lora_weights = ", plain ? "" : init->dump(),
          " is not supported: it changes the model's weights, too; let PEFT write it as a plain adapter (save_pretrained with "
          "path_initial_model_for_weight_conversion)");
  return json;
}

/// Whether PEFT adapts the module at `path`: a list names the ends of paths, a string is "all-linear" or a regular expression of Python's for whole paths.
std::function<bool(const std::string& path)> targeted_by(const fs::path& file, const nlohmann::json& targets) {
  require(targets.is_array() || targets.is_string(), file.string(), ": target_modules is neither a list nor a string; the file is damaged, copy it anew");
  if (targets.is_array()) {
    return [targets](const std::string& path) {
      return std::ranges::any_of(targets, [&](const nlohmann::json& target) {
        return target.is_string() && (path == target.get<std::string>() || path.ends_with("." + target.get<std::string>()));
      });
    };
  }
  if (targets == "all-linear") return [](const std::string& path) { return path != "lm_head"; };
  try {
    // In polynomial time, whatever stands in the file.
    return [pattern = std::regex(targets.get<std::string>(), std::regex::ECMAScript | std::regex_constants::__polynomial)](const std::string& path) {
      return std::regex_match(path, pattern);
    };
  } catch (const std::regex_error&) {
    throw ConfigError(
        detail::concat(file.string(), ": target_modules = ", targets.dump(), " is a regular expression that is not understood here; write a list of modules"));
  }
}

/// PEFT would load the tensors of target_modules alone.
void check_targets(const fs::path& file, const nlohmann::json& config, const PeftNames& names, const std::vector<std::string>& adapters) {
  const auto is_targeted = targeted_by(file, config.value("target_modules", nlohmann::json()));
  for (const std::string& adapter : adapters) {
    const std::string& theirs = names.theirs.at(split_adapter(adapter).first);
    require(is_targeted(theirs), "lora.modules adapts '", split_adapter(adapter).first, "', and target_modules of ", file.string(), " does not name '", theirs,
            "'; let lora.modules name the same layers");
  }
}

}  // namespace

Exported export_peft(const fs::path& checkpoint, const ModelConfig& model, const LoraConfig& lora, const fs::path& out, const ExportOptions& options) {
  require(!is_there(out) && !fs::is_symlink(out), out.string(), ": exists already; name a folder that does not");
  const Manifest manifest = read_or_name_another([&] { return read_manifest(checkpoint); });
  const std::string trained = trained_beside(lora, manifest);
  require(trained != kWholeModel, "--to peft: the whole model was trained, too, and what it became would be left behind; write it with its adapters (--to hf ",
          "--merge-lora), or train adapters beside a folder that --to hf has written of it (model.from_hf)");
  require(trained.empty(), "--to peft: '", trained,
          "' (lora.trained) was trained beside the adapters, and would be left behind; write the whole model (--to hf --merge-lora)");
  require(std::ranges::any_of(manifest.tensors, [](const auto& stored) { return nn::is_adapter(stored.first); }), checkpoint.string(),
          ": holds no adapters; only what was trained with lora.modules has some");
  const PeftNames names = peft_names(model);
  std::vector<std::pair<std::string, TensorSpec>> adapters;  // what is stored, and how it is written
  std::set<std::string> paths;
  for (const auto& [name, stored] : manifest.tensors) {
    if (!name.starts_with("model.") || !nn::is_adapter(name)) continue;
    const std::string ours = name.substr(std::string_view("model.").size());
    paths.insert(split_adapter(ours).first);
    adapters.emplace_back(name, TensorSpec{peft_name(names, ours), options.dtype.value_or(dtype_from_name(stored.dtype)), stored.shape});
  }

  const c10::NoGradGuard no_grad;
  StoredSlices stored(checkpoint, manifest, /*verify=*/true, refuse_beyond_dtype);
  const auto remark = model.from_hf.empty() ? std::nullopt : check_base(checkpoint, model, manifest, stored);
  UnfinishedFolder folder(out);
  std::vector<TensorSpec> specs;
  for (const auto& [name, spec] : adapters) specs.push_back(spec);
  SafetensorsWriter writer(folder.path() / kPeftWeights, specs, {{"format", "pt"}});
  Exported exported{.tensors = static_cast<int64_t>(adapters.size()), .files = 1};
  if (remark) exported.remarks.push_back(*remark);
  for (const auto& [name, spec] : adapters) {
    const at::Tensor tensor = at::empty(spec.shape, at::device(at::kCPU).dtype(spec.dtype));
    fill_fullest(stored, manifest, tensor, Slice::whole(name, spec.shape), spec.dtype, refuse_beyond_dtype, checkpoint.string());
    writer.write(tensor);
    exported.bytes += static_cast<int64_t>(tensor.nbytes());
  }
  writer.finish();
  write_file(folder.path() / kPeftConfig, peft_config(names, paths, model, lora).dump(2) + "\n");
  require(folder.commit(), out.string(), ": exists by now, made while this conversion was at work, and is left as it is; name a folder that does not");
  return exported;
}

std::string peft_fingerprint(const fs::path& dir) {
  const SafetensorsFile file(file_of(dir, kPeftWeights));
  Hasher hasher;
  for (const auto& [name, entry] : file.entries()) {
    const auto bytes = file.bytes(name);
    hasher.update(name.data(), name.size()).update(bytes.data(), bytes.size());
  }
  return hasher.hex();
}

void check_peft(const fs::path& dir, const LoraConfig& lora) {
  (void)read_peft_config(dir, lora);
  const SafetensorsFile file(file_of(dir, kPeftWeights));
}

void load_peft(const fs::path& dir, const ModelConfig& model, const LoraConfig& lora, const std::vector<SlicedTensor>& targets,
               const std::vector<std::string>& expected) {
  const nlohmann::json config = read_peft_config(dir, lora);
  const SafetensorsFile file(file_of(dir, kPeftWeights));
  const PeftNames names = peft_names(model);
  Problems problems;
  std::set<std::string> known;
  for (const std::string& name : expected) known.insert(peft_name(names, name));
  for (const auto& target : targets) {
    const std::string name = peft_name(names, target.slice.name);
    known.insert(name);
    const auto entry = file.entries().find(name);
    if (entry == file.entries().end()) {
      problems.add("missing ", name);
    } else if (!at::isFloatingType(entry->second.dtype)) {
      problems.add(name, " holds ", dtype_name(entry->second.dtype), ", which are no weights");
    } else if (entry->second.shape != target.slice.shape) {
      problems.add("shape of ", name, ": ", at::IntArrayRef(entry->second.shape), " in the file, ", at::IntArrayRef(target.slice.shape), " here");
    }
  }
  for (const auto& [name, entry] : file.entries()) {
    if (!known.contains(name)) problems.add("extra ", name);
  }
  problems.refuse("lora.from_peft = ", dir.string(), ": the adapter does not fit lora.modules: ");
  std::vector<std::string> adapters = expected;
  for (const auto& target : targets) adapters.push_back(target.slice.name);
  check_targets(dir / kPeftConfig, config, names, adapters);

  const c10::NoGradGuard no_grad;
  for (const auto& [tensor, slice] : targets) {
    at::Tensor target = tensor;
    const at::Tensor whole = file.tensor(peft_name(names, slice.name));
    require(at::isfinite(whole).all().item<bool>(), "lora.from_peft = ", dir.string(), ": ", peft_name(names, slice.name),
            " holds numbers that are not finite, with which no training begins; use another adapter");
    copy_slices({Slice::whole(slice.name, slice.shape)}, {whole}, slice, target);
    refuse_beyond_params(target, {whole}, "lora.from_peft = " + dir.string(), peft_name(names, slice.name));
  }
}

}  // namespace tessera::checkpoint
