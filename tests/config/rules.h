#pragma once

#include <string>

#include "tessera/config/config.h"
#include "tessera/config/defaults.h"
#include "tessera/core/error.h"

/// A configuration that is taken, and what is said of one change of it.
namespace tessera::config_rules {

inline Config good() {
  Config config;
  config.model.family = "llama";
  config.model.dim = 64;
  config.model.layers = 2;
  config.model.heads = 4;
  config.data.files = {"/text.txt"};
  config.data.seq_len = 16;
  config.batch.global_size = 8;
  config.optim.lr = 1e-3;
  config.run.steps = 10;
  resolve(config);
  return config;
}

/// The refusal of the good configuration after one change.
template <class Change>
std::string refusal(const Change& change, int world_size = 1, Purpose purpose = Purpose::Train) {
  Config config = good();
  change(config);
  try {
    validate(config, world_size, purpose);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "(accepted)";
}

}  // namespace tessera::config_rules
