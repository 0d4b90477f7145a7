#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include <ATen/core/ScalarType.h>

#include "tessera/config/config.h"

namespace tessera::checkpoint {

struct ExportOptions {
  std::optional<at::ScalarType> dtype{};             ///< of all tensors; nothing: as stored
  int64_t max_shard_bytes = int64_t{5'000'000'000};  ///< of one file; a tensor that is larger has a file of its own
};

struct Exported {
  int64_t tensors = 0, files = 0, bytes = 0;
};

/// Writes the weights of a checkpoint, saved in any layout, as a Hugging Face model: config.json and model.safetensors, or where that would exceed
/// max_shard_bytes model-00001-of-0000n.safetensors with an index. A tied head is left out, as there. `model` is resolved and must be the checkpoint's. Every
/// slice that is read is hashed. Memory: one tensor at a time. The folder appears whole or not at all: an existing one is refused.
/// Throws ConfigError: a family without Hugging Face files, a folder that exists, a checkpoint that does not hold the model.
Exported export_hugging_face(const std::filesystem::path& checkpoint, const ModelConfig& model, const std::filesystem::path& out,
                             const ExportOptions& options = {});

}  // namespace tessera::checkpoint
