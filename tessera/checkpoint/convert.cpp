#include "tessera/checkpoint/convert.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/GradMode.h>
#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/fullest.h"
#include "tessera/checkpoint/hugging_face_family.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/checkpoint/narrowing.h"
#include "tessera/checkpoint/problems.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/checkpoint/stored_slices.h"
#include "tessera/checkpoint/unfinished_folder.h"
#include "tessera/config/limits.h"
#include "tessera/core/file_type.h"
#include "tessera/core/rng.h"
#include "tessera/nn/adapter_names.h"

// All that is wrong with a checkpoint is found before the first byte is written, and told at once. Then one tensor at a time is put together from its slices,
// hashed as they are read, so that a model need not fit into memory. The folder has another name until it is whole.

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// A tensor of their files, and how it is written.
struct Planned {
  FileTensor tensor;
  at::ScalarType dtype = at::kFloat;

  int64_t bytes() const { return static_cast<int64_t>(tensor_bytes(dtype, tensor.shape).value()); }
};

std::string stored_name(const HuggingFaceTensor& row) { return "model." + row.ours; }

/// A row that no checkpoint holds: its values are drawn.
bool is_drawn(const HuggingFaceTensor& row) { return row.ours.empty(); }

void draw_row(const HuggingFaceTensor& row, at::Tensor theirs, uint64_t seed) {
  const at::Tensor drawn = at::empty(row.shape, at::device(at::kCPU).dtype(at::kFloat));
  CounterRng(seed, row.theirs).fill_normal(drawn.mutable_data_ptr<float>(), 0, drawn.numel(), 0, 0.02F);
  theirs.copy_(drawn);
}

ModelConfig upcycled(const ModelConfig& dense, const Upcycling& options) {
  require(dense.family == "llama", "model.family = ", dense.family, ": only a llama becomes a mixture of experts, whose Mixtral has its blocks");
  require(options.experts >= 1 && options.experts <= kMostExperts, "--experts = ", options.experts, ": expected 1 to ", kMostExperts,
          " (Mixtral has 8); set --experts");
  require(options.experts_per_token >= 1 && options.experts_per_token <= options.experts, "--experts-per-token = ", options.experts_per_token,
          ": expected 1 to --experts = ", options.experts, "; set --experts-per-token");
  require(options.experts == 1 || options.experts_per_token > 1, "--experts-per-token = 1: a token's weights sum to one in a Mixtral, so that the router of ",
          options.experts, " experts would get no gradient from the loss; set --experts-per-token to 2 or more");
  ModelConfig mixture = dense;
  mixture.family = "mixtral";
  mixture.experts = options.experts;
  mixture.experts_per_token = options.experts_per_token;
  return mixture;
}

/// The mixture's table, filled from the dense model: every expert is layers.N.feed_forward.w.weight, and the router is drawn.
std::vector<HuggingFaceTensor> upcycled_table(std::vector<HuggingFaceTensor> table) {
  constexpr std::string_view kExperts = ".experts.";
  for (HuggingFaceTensor& row : table) {
    if (row.ours.ends_with(".router.weight")) row.ours.clear();
    const size_t at = row.ours.find(kExperts);
    if (at == std::string::npos) continue;
    row.ours = row.ours.substr(0, at) + "." + row.ours.substr(at + kExperts.size()) + ".weight";
    row.row = row.rows = 0;
  }
  return table;
}

/// That of the first tensor that is stored: what is made again, or drawn, is written as the others are.
at::ScalarType stored_dtype(const std::vector<FileTensor>& tensors, const Manifest& manifest) {
  for (const auto& tensor : tensors) {
    for (const auto& row : tensor.parts) {
      if (const auto stored = manifest.tensors.find(stored_name(row)); stored != manifest.tensors.end()) return dtype_from_name(stored->second.dtype);
    }
  }
  return at::kFloat;
}

/// Refuses a checkpoint that does not hold the model, with all that is wrong.
std::vector<Planned> plan_tensors(const std::vector<FileTensor>& tensors, const Manifest& manifest, const fs::path& checkpoint, const ExportOptions& options) {
  Problems problems;
  std::vector<Planned> plan;
  const at::ScalarType others = stored_dtype(tensors, manifest);
  for (const auto& tensor : tensors) {
    at::ScalarType dtype = others;
    for (const auto& row : tensor.parts) {
      if (is_drawn(row) || options.remade.contains(row.ours)) continue;
      const auto stored = manifest.tensors.find(stored_name(row));
      if (stored == manifest.tensors.end()) {
        problems.add("missing ", stored_name(row));
        continue;
      }
      if (stored->second.shape != row.whole_shape()) {
        problems.add("shape of ", row.ours, ": ", at::IntArrayRef(stored->second.shape), " in the checkpoint, ", at::IntArrayRef(row.whole_shape()),
                     " in the model");
      }
      dtype = dtype_from_name(stored->second.dtype);
    }
    plan.push_back({tensor, options.dtype.value_or(dtype)});
  }
  problems.refuse(checkpoint.string(), ": the checkpoint does not hold the model of its configuration: ");
  return plan;
}

/// Tensors dealt to files in their order; no file exceeds `most` bytes unless one tensor alone does.
std::vector<std::vector<Planned>> deal_files(std::vector<Planned> tensors, int64_t most) {
  std::vector<std::vector<Planned>> files(1);
  int64_t bytes = 0;
  for (auto& tensor : tensors) {
    if (!files.back().empty() && bytes + tensor.bytes() > most) {
      files.emplace_back();
      bytes = 0;
    }
    bytes += tensor.bytes();
    files.back().push_back(std::move(tensor));
  }
  return files;
}

std::string file_name(size_t index, size_t count) {
  return count == 1 ? "model.safetensors" : fmt::format("model-{:05}-of-{:05}.safetensors", index + 1, count);
}

/// Where the values of a checkpoint's tensors come from.
class Source {
 public:
  Source(const fs::path& checkpoint, const Manifest& manifest, const ExportOptions& options)
      : place_(checkpoint.string()), manifest_(manifest), stored_(checkpoint, manifest, /*verify=*/true, refuse_beyond_dtype), options_(options) {
    const bool adapted = std::ranges::any_of(manifest.tensors, [](const auto& each) { return nn::is_adapter(each.first); });
    require(!adapted || options.lora_scale, checkpoint.string(),
            ": was trained with lora.modules, and its weights alone are what it began with; add the adapters to them with --merge-lora, or write these alone "
            "with --to peft");
    require(adapted || !options.lora_scale, "--merge-lora: ", checkpoint.string(), " holds no adapters; leave it out");
  }

  void fill(const HuggingFaceTensor& row, at::Tensor theirs) {
    const std::string layer = row.ours.substr(0, row.ours.rfind('.') + 1);
    const bool adapted = row.ours.ends_with(".weight") && manifest_.tensors.contains("model." + layer + std::string(nn::kLoraA));
    if (!adapted) return fill_alone(row, theirs, theirs.scalar_type());
    at::Tensor sum = at::empty(row.shape, at::device(at::kCPU).dtype(at::kFloat));
    const at::ScalarType dtype = theirs.scalar_type();
    fill_alone(row, sum, dtype);
    theirs.copy_(sum.add_(at::mm(read(layer + std::string(nn::kLoraB), dtype), read(layer + std::string(nn::kLoraA), dtype)), *options_.lora_scale));
    refuse_beyond_dtype(theirs, {sum}, place_, row.ours);
  }

 private:
  /// `dtype`: what it is written as.
  void fill_alone(const HuggingFaceTensor& row, at::Tensor theirs, at::ScalarType dtype) {
    if (options_.remade.contains(row.ours) && !manifest_.tensors.contains(stored_name(row))) {
      const Slice slice = row.slice_of(row.ours);
      const at::Tensor remade = options_.remake(row.ours);
      copy_slices({Slice::whole(row.ours, row.whole_shape())}, {remade}, slice, theirs);
      refuse_beyond_dtype(theirs, {remade}, place_, row.ours);
    } else {
      fill_fullest(stored_, manifest_, std::move(theirs), row.slice_of(stored_name(row)), dtype, refuse_beyond_dtype, place_);
    }
  }

  at::Tensor read(const std::string& parameter, at::ScalarType dtype) {
    const std::string name = "model." + parameter;
    const auto& shape = manifest_.tensors.at(name).shape;
    const at::Tensor values = at::empty(shape, at::device(at::kCPU).dtype(at::kFloat));
    fill_fullest(stored_, manifest_, values, Slice::whole(name, shape), dtype, refuse_beyond_dtype, place_);
    return values;
  }

  const std::string place_;
  const Manifest& manifest_;
  StoredSlices stored_;
  const ExportOptions& options_;
};

void write_tensors(const fs::path& path, const std::vector<Planned>& tensors, Source& source, uint64_t seed) {
  std::vector<TensorSpec> specs;
  for (const auto& planned : tensors) specs.push_back({planned.tensor.name, planned.dtype, planned.tensor.shape});
  SafetensorsWriter writer(path, std::move(specs), {{"format", "pt"}});
  for (const auto& planned : tensors) {
    const at::Tensor theirs = at::empty(planned.tensor.shape, at::device(at::kCPU).dtype(planned.dtype));
    for (const auto& row : planned.tensor.parts) {
      is_drawn(row) ? draw_row(row, view_of(row, theirs), seed) : source.fill(row, view_of(row, theirs));
    }
    writer.write(theirs);
  }
  writer.finish();
}

Exported write_files(const fs::path& folder, const std::vector<std::vector<Planned>>& files, Source& source, uint64_t seed) {
  Exported exported{.files = static_cast<int64_t>(files.size())};
  nlohmann::json weight_map = nlohmann::json::object();
  for (size_t i = 0; i < files.size(); ++i) {
    const std::string name = file_name(i, files.size());
    write_tensors(folder / name, files[i], source, seed);
    for (const auto& planned : files[i]) {
      weight_map[planned.tensor.name] = name;
      exported.bytes += planned.bytes();
      ++exported.tensors;
    }
  }
  if (files.size() > 1) {
    const nlohmann::json index{{"metadata", {{"total_size", exported.bytes}}}, {"weight_map", weight_map}};
    write_file(folder / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  return exported;
}

/// What the folder that a model began from says of its text; nothing where it cannot be read any more, or is damaged.
struct Origin {
  nlohmann::json config;
  std::optional<std::string> generation_config;  ///< its text
  std::set<int64_t> ends{}, generation_ends{};   ///< eos_token_id of the two
};

std::optional<Origin> origin_of(const ModelConfig& model) {
  const fs::path folder = model.from_hf;
  if (folder.empty()) return std::nullopt;
  try {
    Origin origin{.config = read_json(folder / "config.json"), .generation_config = std::nullopt};
    origin.ends = read_ids(HuggingFaceConfig(folder / "config.json"), "eos_token_id");
    const fs::path generation = folder / "generation_config.json";
    if (is_there(generation)) {
      origin.generation_config = read_text_file(generation, 1 << 20);
      origin.generation_ends = read_ids(HuggingFaceConfig(generation), "eos_token_id");
    }
    return origin;
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

/// As transformers writes them.
nlohmann::json ends_json(const std::set<int64_t>& ends) {
  if (ends.empty()) return nullptr;
  return ends.size() == 1 ? nlohmann::json(*ends.begin()) : nlohmann::json(ends);
}

/// Without an id that ends a text, a generate of transformers goes on to its last token. One that config.json leaves out is what their class takes for it.
void add_text_ids(nlohmann::json& config, const std::optional<Origin>& origin, const TextIds& ids) {
  if (!origin || !ids.folders) {
    config["bos_token_id"] = ids.bos ? nlohmann::json(*ids.bos) : nlohmann::json();
    config["eos_token_id"] = ends_json(ids.ends);
    return;
  }
  for (const char* const key : {"bos_token_id", "eos_token_id", "pad_token_id"}) {
    if (origin->config.contains(key)) config[key] = origin->config[key];
  }
  if (!ids.ends.empty() && ids.ends != origin->ends) config["eos_token_id"] = ends_json(ids.ends);
}

/// A generate of transformers takes its ends from there, where there is such a file; nothing: there is to be none, as its ids stand for other text.
std::optional<std::string> generation_config_of(const std::optional<Origin>& origin, const TextIds& ids) {
  if (!origin || !origin->generation_config || !ids.folders) return std::nullopt;
  if (ids.ends.empty() || ids.ends == origin->generation_ends) return origin->generation_config;
  auto config = nlohmann::json::parse(*origin->generation_config);
  config["eos_token_id"] = ends_json(ids.ends);
  return config.dump(2) + "\n";
}

std::string dtype_text(at::ScalarType dtype) {
  switch (dtype) {
    case at::kBFloat16:
      return "bfloat16";
    case at::kHalf:
      return "float16";
    case at::kFloat:
      return "float32";
    default:
      throw ConfigError(detail::concat("Hugging Face files of dtype ", c10::toString(dtype), " are not written; choose fp32, fp16 or bf16"));
  }
}

}  // namespace

Exported export_hugging_face(const fs::path& checkpoint, const ModelConfig& source, const fs::path& out, const ExportOptions& options) {
  const ModelConfig model = options.upcycling ? upcycled(source, *options.upcycling) : source;
  const HuggingFaceFamily family = require_family(model, checkpoint.string() + " cannot be converted");
  require(!is_there(out) && !fs::is_symlink(out), out.string(), ": exists already; name a folder that does not");
  const Manifest manifest = read_or_name_another([&] { return read_manifest(checkpoint); });
  const auto table = options.upcycling ? upcycled_table(family.table(model)) : family.table(model);
  const auto plan = plan_tensors(file_tensors(table), manifest, checkpoint, options);
  nlohmann::json config = family.write_config(model);
  config["architectures"] = {family.architecture};
  config["model_type"] = family.model_type;
  const auto origin = origin_of(model);
  const TextIds text_ids = options.text_ids ? options.text_ids(origin.has_value()) : TextIds();
  add_text_ids(config, origin, text_ids);
  config["dtype"] = config["torch_dtype"] = dtype_text(plan.front().dtype);  // the key of transformers 5, and that of 4

  const c10::NoGradGuard no_grad;
  Source values(checkpoint, manifest, options);
  std::optional<UnfinishedFolder> folder;
  try {
    folder.emplace(out);
  } catch (const Error& error) {
    throw ConfigError(detail::concat("OUT = ", out.string(), ": cannot be written (", error.what(), "); name a folder that can be made"));
  }
  const Exported exported = write_files(folder->path(), deal_files(plan, options.max_shard_bytes), values, options.upcycling.value_or(Upcycling{}).seed);
  write_file(folder->path() / "config.json", config.dump(2) + "\n");
  if (const auto generation = generation_config_of(origin, text_ids)) write_file(folder->path() / "generation_config.json", *generation);
  require(folder->commit(), out.string(), ": exists by now, made while this conversion was at work, and is left as it is; name a folder that does not");
  return exported;
}

}  // namespace tessera::checkpoint
