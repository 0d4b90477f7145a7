#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

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

/// Loads weights alone, for eval and generate. Throws ConfigError.
LoadedModel load_model(const ModelSource& source, const std::vector<std::string>& sets, at::Device device = at::kCPU);

}  // namespace tessera
