#include <cstdio>
#include <filesystem>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/inspect_device.h"
#include "cli/inspect_record.h"
#include "cli/inspect_text.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/core/error.h"
#include "tessera/core/file_type.h"
#include "tessera/core/json_text.h"
#include "tessera/core/log.h"
#include "tessera/data/corpus.h"
#include "tessera/mesh/mesh.h"
#include "tessera/models/flops.h"
#include "tessera/train/progress.h"

namespace tessera::cli {

namespace {

using nlohmann::json;

json boxes_json(const std::vector<Box>& boxes) {
  json list = json::array();
  for (const auto& box : boxes) list.push_back({{"offset", box.offset}, {"size", box.size}});
  return list;
}

/// The axes that they were on; empty where the configuration asks for another number of ranks, as one that a program of somebody's own saved may.
std::string layout_text(const Config& config, int ranks) {
  std::string text;
  try {
    for (const auto& [axis, size] : mesh_shape(config.mesh, config.zero.stage, ranks)) {
      if (size > 1) text += fmt::format("{}{} {}", text.empty() ? "" : " x ", axis, size);
    }
  } catch (const ConfigError&) {
    return "";
  }
  if (text.empty()) text = "one rank";
  for (const auto& [axis, size] : {std::pair{"ep", config.mesh.ep}, {"expert_tp", config.mesh.expert_tp}}) {  // of ranks of those axes
    if (size > 1) text += fmt::format(", {} {}", axis, size);
  }
  return config.zero.stage > 0 ? fmt::format("{}, zero.stage {}", text, config.zero.stage) : text;
}

/// Elements of the model's tensors, with experts also those that one token meets; who saved it, and how the model was dealt over them.
json facts_of(const checkpoint::Manifest& manifest) {
  int64_t total = 0;
  for (const auto& [name, tensor] : manifest.tensors) {
    if (name.starts_with("model.")) total += std::accumulate(tensor.shape.begin(), tensor.shape.end(), int64_t{1}, std::multiplies<>());
  }
  json facts{{"parameters", total}};
  const int ranks = checkpoint::ranks_of(manifest);
  if (ranks > 0) facts["ranks"] = ranks;
  if (const auto kind = manifest.optimizer.find("kind"); kind != manifest.optimizer.end() && kind->is_string()) facts["optimizer"] = *kind;
  const auto config = config_if_any(manifest.progress);
  if (!config) return facts;  // of a program of somebody's own
  const bool as_counted =
      config->lora.modules.empty() && config->quantize.modules.empty();  // what a file holds beside, or not, is no part of the model's count
  if (config->model.experts > 0 && as_counted) facts["active_parameters"] = num_active_parameters(config->model);
  if (const std::string layout = layout_text(*config, ranks); !layout.empty()) facts["layout"] = layout;
  return facts;
}

json checkpoint_json(const std::filesystem::path& folder) {
  const auto manifest = checkpoint::read_or_name_another([&] { return checkpoint::read_manifest(folder); });
  const auto problem = [&]() -> std::optional<std::string> {
    try {
      return checkpoint::problem_with(folder, checkpoint::Thoroughness::Hashes);
    } catch (const checkpoint::UnreadableFile& error) {
      return error.what();
    }
  }();
  json tensors = json::array();
  constexpr std::string_view kModel = "model.";
  for (const auto& [name, tensor] : manifest.tensors) {
    json slices = json::array();
    for (const auto& slice : tensor.slices)
      slices.push_back({{"file", slice.file}, {"key", slice.key}, {"boxes", boxes_json(slice.boxes)}, {"hash", slice.hash}});
    const bool model = name.starts_with(kModel);
    tensors.push_back({{"name", model ? name.substr(kModel.size()) : name},
                       {"kind", model ? "parameter" : "state"},
                       {"dtype", tensor.dtype},
                       {"shape", tensor.shape},
                       {"slices", slices}});
  }
  json found{{"kind", "checkpoint"},    {"step", manifest.step}, {"valid", !problem}, {"problem", problem.value_or("")},
             {"files", manifest.files}, {"tensors", tensors}};
  if (!checkpoint::makes_numbers(manifest.progress)) found["replay"] = "not finite";
  found.update(facts_of(manifest));
  return found;
}

json safetensors_json(const std::filesystem::path& path) {
  const checkpoint::SafetensorsFile file(path);
  json tensors = json::array();
  for (const auto& [name, entry] : file.entries())
    tensors.push_back(
        {{"name", name}, {"dtype", checkpoint::dtype_name(entry.dtype)}, {"shape", entry.shape}, {"offset", entry.offset}, {"bytes", entry.bytes}});
  return {{"kind", "safetensors"}, {"bytes", file.file_bytes()}, {"metadata", file.metadata()}, {"tensors", tensors}};
}

json corpus_json(const std::filesystem::path& path) {
  const auto corpus = data::Corpus::open(path);
  return {{"kind", "corpus"},
          {"tokens", corpus->tokens()},
          {"text_bytes", corpus->text_bytes()},
          {"documents", std::string(data::to_string(corpus->documents()))},
          {"bos", corpus->bos()},
          {"vocab_size", corpus->vocab_size()},
          {"tokenizer", corpus->tokenizer()},
          {"content", corpus->content()}};
}

json describe(const std::filesystem::path& path) {
  require(is_there(path), path.string(), ": no such file or folder; give a checkpoint, a .safetensors file or a packed .bin");
  if (is_folder(path)) {
    if (is_there(path / "manifest.json")) return checkpoint_json(path);
    const auto latest = checkpoint::find_latest(path);
    std::string skipped;
    for (const auto& reason : latest.skipped) skipped += "; " + reason;
    require(latest.folder.has_value(), path.string(), ": holds no valid checkpoint", skipped,
            "; give a checkpoint, a .safetensors file or a packed .bin, or for flight records: tessera inspect record DIR");
    for (const auto& reason : latest.skipped) log().warn("passing over {}", reason);
    return checkpoint_json(*latest.folder);
  }
  if (path.extension() == ".bin") return corpus_json(path);
  return safetensors_json(path);
}

}  // namespace

void add_inspect(Command app, int& exit_code) {
  struct Flags {
    std::string path;
    bool json = false, tensors = false;
  };
  auto flags = std::make_shared<Flags>();
  auto command = app.add_command("inspect", "What a checkpoint, a .safetensors file, a packed corpus or a flight record holds, and which devices there are");
  command.add_option("path", flags->path, "Checkpoint folder, .safetensors file or packed .bin");
  command.add_flag("--json", flags->json, "Print JSON, with every tensor and slice");
  command.add_flag("--tensors", flags->tensors, "List the tensors, with the slices of a checkpoint");
  const auto alone = [flags] {
    require(flags->path.empty(), "inspect: ", flags->path, ": is not looked at beside `record` or `device`; leave one of them out");
  };
  add_inspect_record(command, exit_code, alone);
  add_inspect_device(command, exit_code, alone);
  command.when_chosen([flags, command, &exit_code] {
    if (command.has_chosen_command()) return;
    require(!flags->path.empty(),
            "inspect: no path; give a checkpoint, a .safetensors file or a packed .bin, `record` and a folder of flight records, or `device`");
    const json found = describe(flags->path);
    const std::string text = flags->json ? json_text(found, 2) + "\n" : found_text(found, flags->tensors);
    std::fputs(text.c_str(), stdout);
    std::fflush(stdout);
    require(found.value("valid", true), found.value("problem", ""), "; name another checkpoint, or copy this one anew");
    exit_code = 0;
  });
}

}  // namespace tessera::cli
