#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/config/config.h"

namespace tessera::checkpoint {

/// A mixture of experts from a dense model (sparse upcycling, arXiv:2212.05055): each expert begins as the feed-forward layer that was there, the router as
/// normal numbers (std 0.02) of `seed`. Since a token's weights sum to one, the model computes what the dense one did, until experts learn from other tokens.
struct Upcycling {
  int64_t experts = 8, experts_per_token = 2;
  uint64_t seed = 0;
};

/// Of the texts that a model was trained with.
struct TextIds {
  std::optional<int64_t> bos{};  ///< of its tokenizer
  std::set<int64_t> ends{};      ///< a text ends behind any of them; empty: unknown
  bool folders = true;           ///< by the ids of the folder model.from_hf, as far as anybody knows; else they stand for other text
};

struct ExportOptions {
  std::optional<at::ScalarType> dtype{};  ///< of all tensors, of the values that fill_fullest() gives; nothing: as stored, and what is not as the others
  int64_t max_shard_bytes = int64_t{5'000'000'000};  ///< of one file; a tensor that is larger has a file of its own
  std::optional<Upcycling> upcycling{};              ///< of a LLaMA: writes a Mixtral
  std::set<std::string> remade{};  ///< weights that the checkpoint need not hold ("layers.0.attention.wq.weight"): `remake` gives them, whole, in fp32
  std::function<at::Tensor(const std::string& name)> remake{};
  std::function<TextIds(bool folder)> text_ids{};  ///< told whether the folder model.from_hf can be read; null: nothing is known
  std::optional<double> lora_scale{};              ///< alpha / rank: adapters are added to the weights, W + scale B A, summed in fp32 and rounded once
};

struct Exported {
  int64_t tensors = 0, files = 0, bytes = 0;
  std::vector<std::string> remarks{};  ///< what whoever uses it should know
};

/// Writes the weights of a checkpoint, saved in any layout, as a Hugging Face model: config.json and model.safetensors, or where that would exceed
/// max_shard_bytes model-00001-of-0000n.safetensors with an index. A tied head is left out, as there. `model` is resolved and must be the checkpoint's. Every
/// slice that is read is hashed. Memory: one tensor at a time. The folder appears whole or not at all: an existing one is refused. The ids at which texts
/// begin and are padded are those of the folder model.from_hf, as is generation_config.json, where it can still be read and its ids are the model's; those at
/// which they end are those of `text_ids`, in both files, or where it knows none the folder's.
/// Throws ConfigError: upcycling of a model that is no LLaMA, or to fewer experts than a token visits; a family without Hugging Face files, a folder that
/// exists, a checkpoint that does not hold the model, or holds adapters where no lora_scale is given (they would be lost), or none where one is.
Exported export_hugging_face(const std::filesystem::path& checkpoint, const ModelConfig& model, const std::filesystem::path& out,
                             const ExportOptions& options = {});

}  // namespace tessera::checkpoint
