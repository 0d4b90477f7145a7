#pragma once

#include <chrono>
#include <filesystem>
#include <memory>

#include "tessera/checkpoint/run_lock.h"
#include "tessera/train/observer.h"
#include "tessera/train/observers/record_file.h"

namespace tessera {

/// `log_dir/metrics.jsonl`: one JSON object per optimizer step, flushed at once: step loss grad_norm lr tokens step_s tokens_per_s peak_bytes
/// peak_by_category current_by_category, then extras;
/// floats as shortest round trip (a value that is not finite is null, as JSON has no word for it). Validations go to `log_dir/validation.jsonl` (step loss
/// bits_per_byte), so that metrics.jsonl keeps one line per step, and timelines to `log_dir/timeline.jsonl` (schedules::to_json), one line for each pipeline,
/// where there are any.
///
/// A run from step 1 starts these files anew; a resumed one keeps the lines below its first step, drops later ones and any half-written line, and appends.
/// Where a line is no record, a copy of the file stays in metrics.jsonl.unreadable-1 (or the next free number), which is said aloud. Where lines below its
/// first step are another run's (RunRecord), they are none of its own either, and a copy stays in metrics.jsonl.another-run-1. On a full disk, where nothing
/// can be copied, the file itself is renamed so, aloud, and this start's lines begin another one. Throws ConfigError where log_dir cannot be written, where
/// another live run writes its records there, or where a named pipe stands in the files' place. A line that is lost is said aloud (RecordFile), and ends a run
/// whose log is strict.
class MetricsFile : public Observer {
 public:
  explicit MetricsFile(bool strict = false) : metrics_(strict), validation_(strict), timeline_(strict) {}

  /// Throws ConfigError where a live run writes its records into `log_dir`, and `patience` later still does (lock_patience).
  static void check_free(const std::filesystem::path& log_dir, std::chrono::milliseconds patience = {});

  /// Takes `log_dir` for this run, before anything there is read or written, until it ends or this object goes: check_free() looks, and another run may begin
  /// between a look and the first line. Where no lock is to be had (a full disk, a file system without), it goes without. Throws ConfigError as check_free().
  void hold(const std::filesystem::path& log_dir, std::chrono::milliseconds patience = {});

  /// Holds log_dir, where nobody has said so before; until on_end.
  void on_start(const RunInfo& run) override;
  void after_step(const StepResult& result) override;
  void after_validation(const ValidationResult& result) override;
  void on_end(const RunEnd& end) override;
  bool lacks_validation(int64_t step) const override { return last_step_ == step && last_validation_ < step; }

 private:
  void open_timeline();

  std::unique_ptr<checkpoint::RunLock> lock_;
  RecordFile metrics_, validation_, timeline_;
  RunInfo run_{};
  int64_t own_steps_ = 0;                        ///< of what the files held
  int64_t last_step_ = 0, last_validation_ = 0;  ///< of those, the last steps with a line
  bool timed_ = false;                           ///< timeline.jsonl is open
};

}  // namespace tessera
