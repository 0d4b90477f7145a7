#pragma once

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "tessera/checkpoint/manifest.h"
#include "tessera/config/config.h"
#include "tessera/core/attachment.h"
#include "tessera/models/model.h"
#include "tessera/quantize/quantize.h"

namespace tessera {

/// A checkpoint that weights may come from; null: there is none.
struct SavedWeights {
  const std::filesystem::path* folder = nullptr;
  const checkpoint::Manifest* manifest = nullptr;
};

/// Adds what [lora] says to a whole model on meta, and freezes the rest; nothing where it names no modules. Comes before precision, which then sets the types
/// of what was added, too. Throws ConfigError.
Attachment add_adapters(const Config& config, LanguageModel& model);

/// What a fresh model begins with where a configuration names files: parameters of `root` from model.from_hf, adapters from lora.from_peft. Throws ConfigError.
void load_starting_weights(const Config& config, const torch::nn::Module& root);

/// Whether model.from_hf holds such a model, and lora.from_peft such adapters, as load_starting_weights() has them. Throws UnreadableFile where nobody can
/// tell.
bool holds_weights(const Config& config);
bool holds_adapters(const Config& config);

/// Keeps the weights that [quantize] names, of what is held here of a model on meta, in fewer bits on `device`, each made anew from where it comes from: the
/// checkpoint, where `saved` is one that has it, else model.from_hf, else the seed. Comes when layers are cut and before anything is sharded: `sharding` says
/// over which ranks these weights are. Throws ConfigError.
quantize::Report quantize_frozen(const Config& config, torch::nn::Module& root, at::Device device, const SavedWeights& saved = {},
                                 const quantize::Sharding& sharding = {});

/// What tells the files that these weights come from apart from others, for a checkpoint, which does not hold them ("quantize.from" of its agreement); empty
/// where they come from the seed, or there are none.
std::string quantized_source(const Config& config);

/// Throws ConfigError where the weights that `saved`, which is a checkpoint, was trained beside are others than those that are in model.from_hf now.
void check_quantized_source(const Config& config, const SavedWeights& saved);

/// The names of those weights in the whole model.
std::vector<std::string> quantized_weights(const Config& config);

/// What makes such a weight by its name, whole, as it is computed with: fp32. Empty where there are none. Lays the model out once.
std::function<at::Tensor(const std::string& name)> quantized_weight_maker(const Config& config);

}  // namespace tessera
