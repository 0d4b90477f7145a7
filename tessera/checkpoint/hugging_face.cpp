#include "tessera/checkpoint/hugging_face.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include <c10/util/accumulate.h>

#include "tessera/checkpoint/hugging_face_family.h"
#include "tessera/checkpoint/json_file.h"
#include "tessera/core/file_type.h"

namespace tessera::checkpoint {
namespace {

std::string list_of(const std::vector<HuggingFaceFamily>& families) {
  std::string names;
  for (const auto& family : families) names += (names.empty() ? "" : ", ") + family.architecture;
  return names;
}

HuggingFaceFamily family_of(const HuggingFaceConfig& config) {
  const auto families = hugging_face_families();
  const auto architectures = config.find<std::vector<std::string>>("architectures").value_or(std::vector<std::string>{});
  const auto model_type = config.find<std::string>("model_type").value_or("");
  const auto found = std::find_if(families.begin(), families.end(), [&](const auto& family) {
    return architectures.empty() ? family.model_type == model_type : family.architecture == architectures.front();
  });
  require(found != families.end(), config.file().string(), ": architecture '", architectures.empty() ? model_type : architectures.front(),
          "' is not supported; supported: ", list_of(families));
  require(model_type.empty() || model_type == found->model_type, config.file().string(), ": model_type = \"", model_type,
          "\" contradicts architectures, which say ", found->architecture, ": its model_type is \"", found->model_type, "\"; correct the one that is wrong");
  return *found;
}

/// What neither family computes here, whatever its own class in transformers makes of it.
void refuse_other_numbers(const HuggingFaceConfig& config) {
  const auto refuse = [&](const std::string& key, const std::string& what) {
    const auto value = config.find<nlohmann::json>(key);
    require(!value, config.file().string(), ": ", key, " = ", value.value_or(nullptr).dump(), ": ", what);
  };
  refuse("quantization_config", "quantized weights are not supported; give the weights as fp32, fp16 or bf16, without it");
  refuse("per_layer_config", "layers that differ from one another are not supported; leave it out where it changes nothing");
  if (config.find<double>("partial_rotary_factor")) config.expect("partial_rotary_factor", 1.0, 1.0);  // null is none, for them, too
  config.expect("is_causal", true, true);
  (void)named_weights(config);
}

/// Where PEFT is installed, their AutoModel adds an adapter that lies beside the weights, unasked.
void refuse_adapter_unasked(const std::filesystem::path& dir, const LoraConfig& lora) {
  const auto adapter = dir / "adapter_config.json";
  if (!is_there(adapter)) return;
  std::error_code none;
  const bool asked = !lora.modules.empty() && std::filesystem::equivalent(lora.from_peft, dir, none);
  require(asked, "model.from_hf = ", dir.string(), ": an adapter lies beside its weights (", adapter.string(),
          "), which transformers adds to them; set lora.from_peft to this folder, with lora.modules, or move the adapter away");
}

template <class T>
std::string text_of(const T& value) {
  return nlohmann::json(value).dump();
}
template <class T>
std::string text_of(const std::optional<T>& value) {
  return value ? text_of(*value) : "unset";
}

/// The fields of two models side by side: visit(key, of the first, of the second).
template <class Visit>
void for_each_pair(const ModelConfig& first, const ModelConfig& second, Visit&& visit) {
  std::vector<std::string> texts;
  ModelConfig::for_each_field(second, [&](const char*, const auto& value, const FieldRule&, std::string_view) { texts.push_back(text_of(value)); });
  size_t index = 0;
  ModelConfig::for_each_field(
      first, [&](const char* key, const auto& value, const FieldRule&, std::string_view) { visit(std::string(key), text_of(value), texts[index++]); });
}

}  // namespace

HuggingFaceConfig::HuggingFaceConfig(std::filesystem::path file) : file_(std::move(file)), json_(read_json(file_)) {
  require(json_.is_object(), file_.string(), ": is not a JSON object");
}

int64_t HuggingFaceConfig::size(const std::string& key, int64_t most, std::optional<int64_t> absent) const {
  const auto value = contains(key) ? find<int64_t>(key) : absent;
  require(value.has_value(), file_.string(), ": ", key, " is missing");
  require(*value >= 1 && *value <= most, file_.string(), ": ", key, " = ", *value, " must lie between 1 and ", most);
  return *value;
}

int64_t HuggingFaceConfig::size_by(const std::string& key, const std::string& alias, int64_t most, std::optional<int64_t> absent) const {
  if (!find<int64_t>(alias)) return size(key, most, absent);
  const int64_t value = size(alias, most);
  require(find<int64_t>(key).value_or(value) == value, file_.string(), ": ", key, " = ", json_.value(key, nlohmann::json()).dump(), " contradicts ", alias,
          " = ", value, ", another name of it; correct the one that is wrong");
  return value;
}

std::optional<std::string> named_weights(const HuggingFaceConfig& config) {
  const auto name = config.find<std::string>("transformers_weights");
  const bool fits = !name || (name->find('/') == std::string::npos && (name->ends_with(".safetensors") || name->ends_with(".safetensors.index.json")));
  require(fits, config.file().string(), ": transformers_weights = ", nlohmann::json(name.value_or("")).dump(),
          ": is no file of weights beside it that can be read here; name a .safetensors or a .safetensors.index.json, or leave it out");
  return name;
}

std::vector<HuggingFaceFamily> hugging_face_families() { return {llama_family(), mistral_family(), gpt2_family(), mixtral_family()}; }

std::vector<FileTensor> file_tensors(const std::vector<HuggingFaceTensor>& table) {
  std::vector<FileTensor> tensors;
  for (const auto& row : table) {
    if (tensors.empty() || tensors.back().name != row.theirs) tensors.push_back({row.theirs, {}, row.leading, {}});
    FileTensor& tensor = tensors.back();
    auto shape = row.shape;
    if (row.transposed) std::reverse(shape.begin(), shape.end());
    shape[row.dim] += row.offset;
    if (row.index >= 0) shape.insert(shape.begin(), row.index + 1);
    tensor.shape = std::move(shape);  // the last part ends where the tensor does
    tensor.parts.push_back(row);
  }
  for (const auto& tensor : tensors) {
    int64_t covered = 0;
    for (const auto& part : tensor.parts) covered += c10::multiply_integers(part.shape);
    invariant(covered == c10::multiply_integers(tensor.shape), "the parts of '", tensor.name, "' do not cover its shape ", at::IntArrayRef(tensor.shape));
  }
  return tensors;
}

std::vector<int64_t> HuggingFaceTensor::whole_shape() const {
  auto whole = shape;
  if (rows > 0) whole.front() = rows;
  return whole;
}

Slice HuggingFaceTensor::slice_of(const std::string& name) const {
  return rows > 0 ? Slice::along(name, whole_shape(), 0, row, shape.front()) : Slice::whole(name, shape);
}

at::Tensor view_of(const HuggingFaceTensor& row, const at::Tensor& theirs) {
  const int64_t size = row.transposed ? row.shape[row.shape.size() - 1 - row.dim] : row.shape[row.dim];
  const auto part = (row.index >= 0 ? theirs.select(0, row.index) : theirs).narrow(row.dim, row.offset, size);
  return row.transposed ? part.t() : part;
}

namespace {
/// The one that can compute the model; none, and why the last of its family cannot.
std::optional<HuggingFaceFamily> find_family(const ModelConfig& model, std::string& refusal) {
  for (const auto& family : hugging_face_families()) {
    if (family.family != model.family) continue;
    refusal = family.refusal == nullptr ? "" : family.refusal(model);
    if (refusal.empty()) return family;
  }
  return std::nullopt;
}
}  // namespace

HuggingFaceFamily require_family(const ModelConfig& model, const std::string& consequence) {
  std::string refusal;
  if (auto family = find_family(model, refusal)) return *std::move(family);
  require(refusal.empty(), refusal, "; ", consequence);
  throw ConfigError("model.family = " + model.family + ": Hugging Face has no such model, so " + consequence);
}

std::optional<std::vector<HuggingFaceTensor>> hugging_face_table(const ModelConfig& model) {
  std::string refusal;
  const auto family = find_family(model, refusal);
  return family ? std::optional(family->table(model)) : std::nullopt;
}

void require_model_folder(const std::filesystem::path& dir) {
  require(is_there(dir), "model.from_hf = ", dir.string(), ": there is no such folder; where it lies elsewhere by now, name that (--set model.from_hf=DIR)");
}

ModelConfig read_hugging_face_config(const Config& config) {
  const std::filesystem::path dir = config.model.from_hf;
  require_model_folder(dir);
  require(is_there(dir / "config.json"), "model.from_hf = ", dir.string(), ": no config.json there; it must be the folder of a Hugging Face model");
  const HuggingFaceConfig file(dir / "config.json");
  const HuggingFaceFamily family = family_of(file);
  refuse_other_numbers(file);
  refuse_adapter_unasked(dir, config.lora);
  ModelConfig model = family.read_config(file);
  model.family = family.family;
  model.from_hf = config.model.from_hf;
  model.dropout = config.model.dropout;
  if (config.model.max_seq_len) {
    require(family.family != "gpt2" || *config.model.max_seq_len <= *model.max_seq_len, "model.max_seq_len = ", *config.model.max_seq_len,
            ": the model of model.from_hf has learned ", *model.max_seq_len, " positions, and no more can be used");
    model.max_seq_len = config.model.max_seq_len;
  }
  for_each_pair(config.model, model, [&](const std::string& key, const std::string& stated, const std::string& theirs) {
    require(stated == theirs || !config.given.contains("model." + key), "model.", key, " = ", stated, ": ", file.file().string(), " says ", theirs,
            "; leave the key out, or set it to that");
  });
  return model;
}

std::optional<std::filesystem::path> hugging_face_tokenizer(const std::filesystem::path& dir) {
  const auto model = dir / "tokenizer.model";
  return is_there(model) ? std::optional(model) : std::nullopt;
}

}  // namespace tessera::checkpoint
