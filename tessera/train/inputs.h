#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/checkpoint/manifest.h"
#include "tessera/comm/world.h"
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
  bool hashed = false;  ///< the hash of each of its slices has been checked, so whoever loads them need not
  bool newest = false;  ///< found by `latest`: an older one will do where it turns out to be damaged
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

/// Who a process that opens inputs is.
struct OpenOptions {
  bool restarted = false;          ///< a launcher started this attempt after a failure: `latest` is implied where there is a checkpoint.dir
  std::filesystem::path hashed{};  ///< a checkpoint whose hashes the process that started this one has just checked; empty: none
  bool one_of_several = false;     ///< check_hashes() will follow, which shares the reading between ranks
};

/// Opens text, tokenizer and checkpoint of a validated configuration. With checkpoint.verify a checkpoint is read whole to be hashed, here (but for what
/// `options` says) and not again on loading. Throws ConfigError.
Inputs open_inputs(const Config& config, const OpenOptions& options = {});

/// Checks the hashes that open_inputs() has left; collective over the world. Each rank reads its part of the checkpoint among the ranks of its host, so that
/// every host has seen every byte once. Where one is damaged, all ranks go on from the newest older one that is not, and remark it, or, where it was named,
/// refuse it. Throws ConfigError; also where ranks do not see the same checkpoint.
void check_hashes(Inputs& inputs, const Config& config, const comm::World& world);

/// What stands for the data in a checkpoint's agreement: text and tokenizer by content.
nlohmann::json data_identity(const data::Corpus& corpus);

}  // namespace tessera
