#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/config/config.h"

/// Adapters alone (lora/lora.h) in the format of Hugging Face's PEFT: adapter_model.safetensors with base_model.model.PATH.lora_A.weight [rank, in] and
/// lora_B.weight [out, rank], and adapter_config.json.
namespace tessera::checkpoint {

/// Among progress.lora_trained: a run before the adapters trained the whole model.
inline constexpr const char* kWholeModel = "**";

/// Writes the adapters of a checkpoint, saved in any layout. `model` is resolved; its from_hf, where there is one, is what the adapters name as their base,
/// once the weights of the checkpoint have been compared with those there. Memory: one tensor at a time. The folder appears whole or not at all. Throws
/// ConfigError: a checkpoint without adapters, parameters that were trained beside or before them (the format has no place for these here), adapters of layers
/// that Hugging Face stores as one (GPT-2's q, k and v), a folder that exists, a from_hf that holds other weights or cannot be read.
Exported export_peft(const std::filesystem::path& checkpoint, const ModelConfig& model, const LoraConfig& lora, const std::filesystem::path& out,
                     const ExportOptions& options = {});

/// Throws ConfigError where `dir` is no folder with an adapter of the rank and alpha of `lora`: for whoever starts processes that will read it.
void check_peft(const std::filesystem::path& dir, const LoraConfig& lora);

/// Fills `targets` (slices of adapters named as our parameters) from such a folder. Only what the slices need is read. Throws ConfigError with the full list of
/// missing, extra and mis-shaped tensors, and where rank or alpha are not those of `lora`.
void load_peft(const std::filesystem::path& dir, const ModelConfig& model, const LoraConfig& lora, const std::vector<SlicedTensor>& targets,
               const std::vector<std::string>& expected = {});

/// Tells one adapter from another, wherever the folder lies: a hash of names and bytes. Throws ConfigError.
std::string peft_fingerprint(const std::filesystem::path& dir);

}  // namespace tessera::checkpoint
