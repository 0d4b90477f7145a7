#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/safetensors.h"

namespace tessera::checkpoint {

/// "step-00000010"
std::string folder_name(int64_t step);

/// Folder of a checkpoint that is being written, or taken away: ".tmp-step-00000010". Nothing reads these.
std::string temporary_name(int64_t step);

/// Everything in `dir` that is named as a checkpoint, by step. Empty where `dir` does not exist.
std::map<int64_t, std::filesystem::path> checkpoint_folders(const std::filesystem::path& dir);

/// Removes what killed saves and removals left in `dir`.
void remove_leftovers(const std::filesystem::path& dir);

/// Throws ConfigError naming file, tensor and offset unless `file` holds `slice` of the tensor `name` as the manifest describes it; with `hash`, its bytes are
/// read and hashed too.
void check_stored(const SafetensorsFile& file, const std::string& name, const StoredTensor& tensor, const StoredSlice& slice, bool hash);

}  // namespace tessera::checkpoint
