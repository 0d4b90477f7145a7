#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>

#include "tessera/checkpoint/run_identity.h"
#include "tessera/train/observer.h"

namespace tessera {

/// Up to which step what `writer` wrote, or took up, is of the line that `run` stands on: the steps of starts that both follow. 0: of none.
int64_t shared_steps(const checkpoint::RunIdentity& run, const checkpoint::RunIdentity& writer);

/// Whose records a folder holds, `written_by.json` beside them: who wrote the last of them. Where log.dir was another run's meanwhile, one that goes on finds
/// that run's lines, of the same steps as its own. A folder without it (of a version that wrote none), and a run that is no Trainer's, go by the steps alone.
class RunRecord {
 public:
  explicit RunRecord(const std::filesystem::path& folder);

  /// The last step of which records there are those of `run`: below its first step.
  int64_t own_steps(const RunInfo& run) const;

  /// From now on they are those of `run`. Where that cannot be written it is said aloud, and nobody's name stays.
  void write(const RunInfo& run) const;

 private:
  std::filesystem::path file_;
  std::optional<checkpoint::RunIdentity> writer_;
};

}  // namespace tessera
