#pragma once

#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "tessera/config/config.h"

namespace tessera::checkpoint {

/// What a resumed run must share with the run that saved, by key: every key of [model] but from_hf, [data] but its paths and caches, bos and seq_len, run.seed
/// and optim.name. How the steps are made of the data (batch.global_size, data.seq_len) is data::carried's to judge; rates, clipping, decay and losses may
/// change. Call it on a resolved configuration. `data_identity` stands for the data files, which may move: a hash of the corpus and of the tokenizer, and
/// whether documents begin with a beginning-of-text id ("bos"; where it is absent, they do not).
nlohmann::json agreement_of(const Config& config, const nlohmann::json& data_identity);

/// Throws ConfigError naming the first key that differs, with both values. `source` names the checkpoint in the message; `followed` says which keys nobody
/// gave, and whose value they have (followed_defaults), so that the key is named that somebody changed.
void check_agreement(const nlohmann::json& saved, const nlohmann::json& current, const std::string& source,
                     const std::map<std::string, std::string>& followed = {});

/// A key that two agreements have otherwise, and how.
struct Disagreement {
  std::string key, saved, current;
};

/// Of what check_agreement refuses, the keys that make another model of the same weights: [model], [lora] and [quantize]. For who reads a checkpoint, and may
/// have other data, or none.
std::vector<Disagreement> model_disagreements(const nlohmann::json& saved, const Config& current);

/// What two configurations of one run set otherwise, as "optim.lr = 0.001 (was 0.01)": all but paths, [checkpoint], [log] and run.steps, which are no part of
/// what is computed, or are somebody else's to tell. What a run has settled on (Config::asked) is what is compared; a `saved` that still says what was asked
/// for is no change where `current` was asked for the same.
std::vector<std::string> changed_settings(const Config& saved, const Config& current);

}  // namespace tessera::checkpoint
