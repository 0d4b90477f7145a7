#pragma once

#include <nlohmann/json.hpp>

#include "tessera/core/config.h"

namespace tessera::checkpoint {

/// What a resumed run must share with the run that saved: every key of [model] but from_hf, [data] but its paths and caches, batch.global_size, run.seed and
/// [optim], by key. Call it on a resolved configuration. `data_identity` stands for the data files, which may move: a hash of the corpus and of the tokenizer.
nlohmann::json agreement_of(const Config& config, const nlohmann::json& data_identity);

/// Throws ConfigError naming the first key that differs, with both values. `source` names the checkpoint in the message.
void check_agreement(const nlohmann::json& saved, const nlohmann::json& current, const std::string& source);

}  // namespace tessera::checkpoint
