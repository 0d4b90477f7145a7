#pragma once

#include <string>
#include <vector>

#include "tessera/config/config.h"

namespace tessera::plan {

/// `config` with keys changed as `--set` changes them ("zero.stage=1"), resolved anew; what it has settled on (Config::asked) stays. Throws ConfigError for a
/// value that no key takes.
Config with_settings(const Config& config, const std::vector<std::string>& sets);

/// "--set zero.stage=1 --set recompute.mode=full", as a shell takes it.
std::string flags_of(const std::vector<std::string>& sets);

/// Keys of a mixture's settings whose arithmetic knows where a micro-batch ends, so that another batch.micro_size trains another objective:
/// "moe.balance_loss, moe.z_loss". Empty where there are none.
std::string terms_of_a_micro_batch(const Config& config);

}  // namespace tessera::plan
