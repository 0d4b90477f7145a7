#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "tessera/config/config.h"

namespace c10d {
class Store;
}

namespace tessera::comm {

/// What ranks were told differently, as one sentence that names the first such setting, its values with their ranks, and the other settings; nothing where
/// `of_ranks` are all alike. A setting that only some have counts.
std::optional<std::string> disagreement(const std::vector<Settings>& of_ranks);

/// Throws ConfigError, on every rank the same, unless all `size` ranks bring the same settings; c10's error where they do not come within `timeout`. Through
/// the store alone: for what the engines of groups are made of. Of each rank a few requests, and of the last to come one for each rank.
void compare_in_store(c10d::Store& store, int rank, int size, const Settings& mine, std::chrono::milliseconds timeout);

}  // namespace tessera::comm
