#pragma once

#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/deal.h"
#include "tessera/checkpoint/safetensors.h"
#include "tessera/comm/group.h"
#include "tessera/core/hash.h"

/// save() in its two halves, between which the tensors may be copied so that training goes on while the copy is written.
namespace tessera::checkpoint {

/// A save that has begun: what is written where is decided, and nothing needs the tensors but write().
struct SavePlan {
  std::filesystem::path folder{}, temporary{};
  std::vector<std::vector<HeldSlice>> held{};  ///< by rank
  std::vector<std::vector<size_t>> dealt{};    ///< by rank: what it writes, as indices into its `held`
  int64_t step = 0;
  nlohmann::json optimizer, progress, agreement;
  RunIdentity run{};
};

/// Why `progress` cannot be saved; empty where it can. JSON has no word for a float that is not finite, and writes null, which nobody reads back as a number.
std::string problem_with_progress(const nlohmann::json& progress);

/// Collective: makes the temporary folder, deals the slices. Where any rank fails, all throw.
SavePlan begin_save(const std::filesystem::path& dir, const CheckpointState& state, const comm::Group& group);

/// What a rank reports of its file, for the manifest: its size, and the hash of each slice.
struct WrittenFile {
  uint64_t bytes = 0;
  std::vector<std::string> hashes;
};

/// This rank's file, written in any portions.
class RankFile {
 public:
  RankFile(const SavePlan& plan, int rank);

  /// The next bytes of the rank's slices, which follow each other in the order of the plan.
  void write(std::span<const std::byte> bytes);
  /// Synced and renamed.
  WrittenFile finish();

 private:
  std::vector<uint64_t> sizes_;  ///< of the slices, in bytes
  SafetensorsWriter writer_;
  WrittenFile written_;
  Hasher hasher_;
  uint64_t hashed_ = 0;  ///< bytes of the slice that has begun
};

/// All of this rank's file, as the tensors are now.
WrittenFile write_values(const SavePlan& plan, int rank, const CheckpointState& state);

/// Collective: every rank writes its file by `write`; once all have, rank 0 writes the manifest and renames the folder, which makes the checkpoint exist. Where
/// any rank fails, all throw, and what was written is removed.
void finish_save(const SavePlan& plan, const comm::Group& group, const std::function<WrittenFile()>& write);

}  // namespace tessera::checkpoint
