#include "tessera/train/adapters.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/files.h"
#include "tessera/checkpoint/fullest.h"
#include "tessera/checkpoint/hugging_face.h"
#include "tessera/checkpoint/narrowing.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/checkpoint/stored_slices.h"
#include "tessera/config/patterns.h"
#include "tessera/core/error.h"
#include "tessera/lora/lora.h"
#include "tessera/nn/adapter_names.h"
#include "tessera/nn/meta.h"
#include "tessera/nn/parameter.h"
#include "tessera/quantize/quantize.h"
#include "tessera/train/recompute_blocks.h"

namespace tessera {

Attachment add_adapters(const Config& config, LanguageModel& model) {
  if (config.lora.modules.empty()) return {};
  const auto patterns = patterns_in(config.lora.modules);
  for (const std::string& pattern : patterns) check_pattern("lora.modules", model, pattern);
  return lora::attach(model, {.modules = patterns,
                              .rank = config.lora.rank,
                              .alpha = config.lora.alpha,
                              .dropout = config.lora.dropout,
                              .trained = config.lora.trained,
                              .seed = static_cast<uint64_t>(config.run.seed)});
}

namespace {

/// Those of the whole model, of which a rank may hold a part.
std::vector<Slice> adapters_of(const Config& config) {
  const auto whole = on_meta([&] { return make_model(config.model); });
  const Attachment adapted = add_adapters(config, *whole);
  std::vector<Slice> adapters;
  for (const auto& parameter : nn::unique_parameters(*whole)) {
    if (nn::is_adapter(parameter.name)) adapters.push_back(Slice::whole(parameter.name, parameter.tensor.sizes().vec()));
  }
  return adapters;
}

/// Whether `load` finds all that it is to fill. What cannot be read may be whole.
template <class Load>
bool finds(const Load& load) {
  try {
    load();
    return true;
  } catch (const checkpoint::UnreadableFile&) {
    throw;
  } catch (const ConfigError&) {
    return false;
  }
}

}  // namespace

void load_starting_weights(const Config& config, const torch::nn::Module& root) {
  std::vector<checkpoint::SlicedTensor> weights, adapters;
  for (auto& target : checkpoint::parameter_targets(root)) (nn::is_adapter(target.slice.name) ? adapters : weights).push_back(std::move(target));
  if (!config.model.from_hf.empty()) checkpoint::load_hugging_face(config.model.from_hf, config.model, weights);
  if (config.lora.modules.empty() || config.lora.from_peft.empty()) return;
  std::vector<std::string> expected;
  for (const Slice& adapter : adapters_of(config)) expected.push_back(adapter.name);
  checkpoint::load_peft(config.lora.from_peft, config.model, config.lora, adapters, expected);
}

bool holds_weights(const Config& config) {
  // Of what is no model of theirs they hold less.
  return checkpoint::hugging_face_table(config.model) && finds([&] { checkpoint::load_hugging_face(config.model.from_hf, config.model, {}); });
}

bool holds_adapters(const Config& config) {
  std::vector<checkpoint::SlicedTensor> adapters;
  for (Slice& adapter : adapters_of(config)) {
    at::Tensor whole = at::empty(adapter.shape, at::device(at::kCPU).dtype(at::kFloat));
    adapters.push_back({std::move(whole), std::move(adapter)});
  }
  return finds([&] { checkpoint::load_peft(config.lora.from_peft, config.model, config.lora, adapters); });
}

namespace {

kernels::QuantizeForm quantize_form(const QuantizeConfig& config) {
  return {.format = config.format == "int8" ? kernels::WeightFormat::Int8 : kernels::WeightFormat::Nf4,
          .block = config.block,
          .double_scales = config.double_scales};
}

/// One weight's first values, whole.
void fill_frozen(const Config& config, const SavedWeights& saved, const at::Tensor& weight, const at::Tensor& whole) {
  const Slice all = Slice::whole(nn::slice_of(weight).name, whole.sizes().vec());
  const std::string stored = "model." + all.name;
  if (saved.manifest != nullptr && saved.manifest->tensors.contains(stored)) {
    checkpoint::StoredSlices slices(*saved.folder, *saved.manifest, config.checkpoint.verify);
    checkpoint::fill_fullest(slices, *saved.manifest, whole, Slice::whole(stored, all.shape), whole.scalar_type(), checkpoint::refuse_beyond_params,
                             saved.folder->string());
  } else if (!config.model.from_hf.empty()) {
    checkpoint::load_hugging_face(config.model.from_hf, config.model, {{whole, all}});
  } else {
    const at::Tensor drawn = whole.detach();  // the same memory, with what is known of the weight
    nn::set_slice(drawn, all);
    nn::set_init(drawn, nn::init_of(weight).value());
    nn::draw(drawn, static_cast<uint64_t>(config.run.seed));
  }
}

}  // namespace

std::string quantized_source(const Config& config) {
  return config.quantize.modules.empty() || config.model.from_hf.empty() ? "" : checkpoint::hugging_face_fingerprint(config.model.from_hf);
}

void check_quantized_source(const Config& config, const SavedWeights& saved) {
  const auto& agreement = saved.manifest->agreement;
  const bool quantized = agreement.contains("quantize.modules") && agreement.at("quantize.modules") != "";
  if (!quantized && !agreement.contains("quantize.from")) return;
  const std::string& from = config.model.from_hf;  // also for who reads them as they are there
  const std::string now = from.empty() ? "" : checkpoint::hugging_face_fingerprint(from);
  require(agreement.value("quantize.from", "") == now, "model.from_hf = ", from, ": ", saved.folder->string(),
          " was trained beside other weights than are there now; put those back, or name the folder where they are (--set model.from_hf=DIR)");
}

quantize::Report quantize_frozen(const Config& config, torch::nn::Module& root, at::Device device, const SavedWeights& saved,
                                 const quantize::Sharding& sharding) {
  if (config.quantize.modules.empty()) return {};
  require(device.is_cpu() || device.is_meta(), "quantize.modules = ", config.quantize.modules,
          ": weights in fewer bits are multiplied on the CPU alone in this build; set run.device = cpu, or leave quantize.modules out");
  if (saved.manifest != nullptr) check_quantized_source(config, saved);
  return quantize::quantize_weights(
      root, {.modules = patterns_in(config.quantize.modules), .form = quantize_form(config.quantize), .sharding = sharding}, device,
      [&](const at::Tensor& weight, const at::Tensor& whole) { fill_frozen(config, saved, weight, whole); }, /*part_of_model=*/true);
}

std::vector<std::string> quantized_weights(const Config& config) {
  if (config.quantize.modules.empty()) return {};
  const auto whole = on_meta([&] { return make_model(config.model); });
  const auto patterns = patterns_in(config.quantize.modules);
  for (const std::string& pattern : patterns) check_pattern("quantize.modules", *whole, pattern);
  return quantize::weights_named(*whole, patterns);
}

std::function<at::Tensor(const std::string& name)> quantized_weight_maker(const Config& config) {
  if (config.quantize.modules.empty()) return {};
  const auto model = on_meta([&] { return make_model(config.model); });
  return [config, parameters = nn::unique_parameters(*model)](const std::string& name) {
    const auto found = std::ranges::find(parameters, name, &nn::NamedParameter::name);
    invariant(found != parameters.end(), "the model has no '", name, "'");
    const at::Tensor whole = at::empty(found->tensor.sizes(), at::device(at::kCPU).dtype(at::kFloat));
    fill_frozen(config, {}, found->tensor, whole);
    const int64_t rows = whole.size(0), columns = whole.size(1);
    const auto matrix = kernels::quantize(whole, quantize_form(config.quantize), {.rows = rows, .columns = columns, .whole_columns = columns}, at::kCPU);
    return kernels::dequantize(matrix, 0, rows, at::kFloat);
  };
}

}  // namespace tessera
