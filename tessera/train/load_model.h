#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/core/config.h"
#include "tessera/models/model.h"

namespace tessera {

/// Where a trained model comes from: one of the two is set.
struct ModelSource {
  std::filesystem::path from_hf;     ///< folder of a Hugging Face model
  std::filesystem::path checkpoint;  ///< a checkpoint, or a checkpoint.dir, of which the newest valid one is taken
};

struct LoadedModel {
  Config config;                         ///< of the run that trained it, with `--set` on top; only [model] is known of a Hugging Face model
  std::shared_ptr<LanguageModel> model;  ///< in evaluation mode
};

/// A checkpoint and what it was trained with.
struct FoundCheckpoint {
  std::filesystem::path folder;
  checkpoint::Manifest manifest;
  Config config;  ///< with `--set` on top, resolved
};

/// The checkpoint `given`, or the newest valid one where it is a checkpoint.dir. `flag` names it in messages. Throws ConfigError.
FoundCheckpoint find_checkpoint(const std::filesystem::path& given, const std::string& flag, const std::vector<std::string>& sets = {});

/// Loads weights alone, for eval and generate. Throws ConfigError.
LoadedModel load_model(const ModelSource& source, const std::vector<std::string>& sets, at::Device device = at::kCPU);

}  // namespace tessera
