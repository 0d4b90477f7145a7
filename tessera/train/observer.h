#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint/run_identity.h"
#include "tessera/memory/history.h"
#include "tessera/pipeline/schedules/timed.h"
#include "tessera/train/expert_load.h"

namespace tessera {

/// What is known of a run before its first step.
struct RunInfo {
  std::string name;               ///< for titles: the configuration's file stem
  std::filesystem::path log_dir;  ///< where files of the run go; exists
  int64_t first_step = 1;         ///< number of the step that comes next: 1, or the resumed checkpoint's step + 1
  int64_t last_step = 0;          ///< run.steps
  int ranks = 1;
  int64_t parameters = 0;                 ///< logical parameters, tied ones once
  checkpoint::RunIdentity identity = {};  ///< whose steps they are; without a start where no Trainer tells of them
};

/// One finished optimizer step; all numbers are global (all ranks).
struct StepResult {
  int64_t step = 0;      ///< steps taken, those that were skipped included: the first is 1
  double loss = 0;       ///< mean over all valid tokens of the global batch, before the update
  double grad_norm = 0;  ///< 2-norm of that gradient before clipping
  double lr = 0;         ///< used in this step
  int64_t tokens = 0;    ///< of this step
  double step_s = 0;     ///< wall time with data and optimizer
  double tokens_per_s = 0;
  int64_t peak_bytes = 0;                                            ///< maximum over ranks since the step began
  MemoryUse memory{};                                                ///< of that rank, by category
  std::map<std::string, double> extras{};                            ///< further numbers by name, written after the fixed ones
  std::vector<ExpertLoad> experts{};                                 ///< of every layer with a mixture of experts
  std::shared_ptr<const MemoryHistory> memory_history{};             ///< of this very rank in this step, where it was asked for and this is the step; else null
  std::shared_ptr<const std::vector<schedules::Timed>> timelines{};  ///< of every pipeline, where log.timeline_every asks for this step; else null
};

struct ValidationResult {
  int64_t step = 0;          ///< after this many updates
  double loss = 0;           ///< mean nats per target over all windows
  double bits_per_byte = 0;  ///< of the text those targets stand for
};

/// Why a run ended.
struct RunEnd {
  int64_t step = 0;      ///< finished updates
  bool finished = true;  ///< false: interrupted or failed
  double seconds = 0;    ///< since on_start
  std::string reason{};  ///< of one that was asked to stop: who asked, and what was saved
};

/// Hears of a run's progress and takes no part in it, but for what its records lack. One rank (the first) has observers; calls come from the training thread.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void on_start(const RunInfo&) {}
  virtual void after_step(const StepResult&) {}
  virtual void after_validation(const ValidationResult&) {}
  virtual void on_end(const RunEnd&) {}

  /// Behind on_start of a run that goes on: whether there is a record of `step`, the one that it goes on from, and none of the validation behind that step. An
  /// earlier start ended in between, so this one validates first.
  virtual bool lacks_validation(int64_t /*step*/) const { return false; }
};

}  // namespace tessera
