#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/manifest.h"
#include "tessera/checkpoint/safetensors.h"

namespace tessera::checkpoint {

/// "step-00000010"
std::string folder_name(int64_t step);

/// Folder of a checkpoint that is being written, or taken away: ".tmp-step-00000010". Nothing reads these.
std::string temporary_name(int64_t step);
/// Whether a name is that of a folder that saves make, move aside or delete.
bool is_of_saves(const std::filesystem::path& name);

/// How many ranks saved a checkpoint, as its files are called; 0: they are called otherwise.
int ranks_of(const Manifest& manifest);

/// Everything in `dir` that is named as a checkpoint, by step. Empty where `dir` does not exist.
std::map<int64_t, std::filesystem::path> checkpoint_folders(const std::filesystem::path& dir);

/// Whether nothing says that the weights make no number: a save marks as progress.replay.not_finite that the loss which a load must find again was none.
bool makes_numbers(const nlohmann::json& progress);
inline constexpr std::string_view kMakesNoNumbers = "the loss that it recorded when it was saved is not finite, so that no step goes on from its weights";

/// A checkpoint and who wrote it; nobody is known where its manifest cannot be read, or is of another step than the folder's name.
struct WrittenCheckpoint {
  int64_t step = 0;
  std::filesystem::path folder;
  std::optional<RunIdentity> writer;
  bool makes_numbers = true;
};

/// The checkpoints in `dir`, oldest first.
std::vector<WrittenCheckpoint> written_checkpoints(const std::filesystem::path& dir);

/// The entries of a checkpoint, or of one that is being written, that no save makes: what somebody else put there, by name. None of a folder that is not there;
/// "." for what is no folder.
std::vector<std::string> foreign_entries(const std::filesystem::path& folder);

/// Why a folder that a save has left unfinished in `dir`, by its name, is none: "<path>: holds mine.txt, which no save writes". Nothing where all are.
std::optional<std::string> foreign_leftover(const std::filesystem::path& dir);

/// Moves folders of `dir` into a new one in it, where nothing looks for checkpoints: "set-aside-1", or the first number that is free. Returns it.
std::filesystem::path set_aside(const std::filesystem::path& dir, const std::vector<std::filesystem::path>& folders);

/// Throws ConfigError naming file, tensor and offset unless `file` holds `slice` of the tensor `name` as the manifest describes it; with `hash`, its bytes are
/// read and hashed too.
void check_stored(const SafetensorsFile& file, const std::string& name, const StoredTensor& tensor, const StoredSlice& slice, bool hash);

}  // namespace tessera::checkpoint
