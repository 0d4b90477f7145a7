#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace tessera::cli {

/// What `inspect` prints of a checkpoint or a file that its --json describes as `found`: each fact in a line; of what has tensors the bytes of each kind and
/// dtype, and those of its files; with `tensors` each tensor, and where its slices lie.
std::string found_text(const nlohmann::json& found, bool tensors);

/// What `inspect device` prints of the devices in `found`, without the columns in which it has nothing of any device.
std::string devices_text(const nlohmann::json& found);

}  // namespace tessera::cli
