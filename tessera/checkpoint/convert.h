#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <set>
#include <string>

#include <ATen/core/Tensor.h>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/stored_slices.h"
#include "tessera/config/config.h"

namespace tessera::checkpoint {

/// A mixture of experts from a dense model (sparse upcycling, arXiv:2212.05055): each expert begins as the feed-forward layer that was there, the router as
/// normal numbers (std 0.02) of `seed`. Since a token's weights sum to one, the model computes what the dense one did, until experts learn from other tokens.
struct Upcycling {
  int64_t experts = 8, experts_per_token = 2;
  uint64_t seed = 0;
};

/// Of the tokenizer that a model was trained with.
struct TextIds {
  std::optional<int64_t> bos{}, eos{};
};

struct ExportOptions {
  std::optional<at::ScalarType> dtype{};             ///< of all tensors, of the values that fill_fullest() gives; nothing: as stored
  int64_t max_shard_bytes = int64_t{5'000'000'000};  ///< of one file; a tensor that is larger has a file of its own
  std::optional<Upcycling> upcycling{};              ///< of a LLaMA: writes a Mixtral
  std::set<std::string> remade{};  ///< weights that the checkpoint need not hold ("layers.0.attention.wq.weight"): `remake` gives them, whole, in fp32
  std::function<at::Tensor(const std::string& name)> remake{};
  std::function<TextIds()> text_ids{};  ///< called where model.from_hf, whose ids are taken, cannot be read; null: there are none
  std::optional<double> lora_scale{};   ///< alpha / rank: adapters are added to the weights, W + scale B A, summed in fp32 and rounded once
};

struct Exported {
  int64_t tensors = 0, files = 0, bytes = 0;
};

/// The stored tensor that fills the stored `weight` ("model.norm.weight") for who wants it as `dtype`. Stored as that, itself; as another, its fp32 master,
/// where there is one: that is what was trained, of which the weight is a rounding, and with which a run goes on. Where updates are delayed, masters are one
/// update ahead of the weights, and stand in for none.
std::string fullest(const Manifest& manifest, const std::string& weight, at::ScalarType dtype);

/// Fills `target` with `slice` of a stored weight, for who wants it as `dtype`, as fullest() says; where its master does not round to it, somebody has written
/// the weight since the last update, and it is the weight's value, element by element, as in the next update (precision::MasterWeights). `narrowed` and `place`
/// are those of `stored`. Memory: of the slice, once more in fp32 and once as stored.
void fill_fullest(StoredSlices& stored, const Manifest& manifest, at::Tensor target, const Slice& slice, at::ScalarType dtype,
                  const StoredSlices::Narrowed& narrowed, const std::string& place);

/// Writes the weights of a checkpoint, saved in any layout, as a Hugging Face model: config.json and model.safetensors, or where that would exceed
/// max_shard_bytes model-00001-of-0000n.safetensors with an index. A tied head is left out, as there. `model` is resolved and must be the checkpoint's. Every
/// slice that is read is hashed. Memory: one tensor at a time. The folder appears whole or not at all: an existing one is refused. The ids at which texts
/// begin, end and are padded are those of the folder model.from_hf, as is generation_config.json, where it can still be read.
/// Throws ConfigError: upcycling of a model that is no LLaMA, or to fewer experts than a token visits; a family without Hugging Face files, a folder that
/// exists, a checkpoint that does not hold the model, or holds adapters where no lora_scale is given (they would be lost), or none where one is.
Exported export_hugging_face(const std::filesystem::path& checkpoint, const ModelConfig& model, const std::filesystem::path& out,
                             const ExportOptions& options = {});

}  // namespace tessera::checkpoint
