#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/manifest.h"
#include "tessera/core/config.h"
#include "tessera/data/corpus.h"
#include "tessera/data/tokenizer.h"

namespace tessera {

/// Reads a configuration as `train` and `plan` take it: file, `--set`, from_hf's shape, defaults that follow from other fields.
Config read_config(const std::filesystem::path& file, const std::vector<std::string>& sets);

/// A checkpoint that a run goes on from, with its manifest read and found whole.
struct ResumePoint {
  std::filesystem::path folder;
  checkpoint::Manifest manifest;
};

/// What a run needs from disk. Opening it checks everything that is knowable from configuration, manifests and file sizes: no process group
/// exists yet, so a refusal is one line of one process.
struct Inputs {
  std::unique_ptr<data::Tokenizer> tokenizer;
  std::shared_ptr<const data::Corpus> corpus;
  std::shared_ptr<const data::Corpus> validation;  ///< null without validation_files
  std::optional<ResumePoint> resume;
  std::vector<std::string> remarks;  ///< to be said aloud once: checkpoints that were passed over, a fresh start
};

/// Opens text, tokenizer and checkpoint of a validated configuration. `restarted`: a launcher started this attempt after a failure, so
/// `latest` is implied where there is a checkpoint.dir. Throws ConfigError.
Inputs open_inputs(const Config& config, bool restarted = false);

/// What stands for the data in a checkpoint's agreement: text and tokenizer by content.
nlohmann::json data_identity(const data::Corpus& corpus);

}  // namespace tessera
