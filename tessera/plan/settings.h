#pragma once

#include <string>
#include <vector>

#include "tessera/config/config.h"

namespace tessera::plan {

/// `config` with keys changed as `--set` changes them ("zero.stage=1"), resolved anew. Throws ConfigError for a value that no key takes.
Config with_settings(const Config& config, const std::vector<std::string>& sets);

/// "--set zero.stage=1 --set recompute.mode=full".
std::string flags_of(const std::vector<std::string>& sets);

}  // namespace tessera::plan
